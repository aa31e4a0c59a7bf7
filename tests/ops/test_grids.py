"""Points on a grid under a kernel that is a product over its axes: a Kronecker product of small matrices."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import ConstantKernel, MaternKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from linear_operator.utils.errors import NanError
from support.structured import Regression, close, gradients, loss_of, served

import autokern
from autokern.core.problem import Problem
from autokern.gp import grids, likelihood, structure
from autokern.kernels import tree as trees
from autokern.ops.exact_log_prob import EXACT_LOG_PROB

pytestmark = pytest.mark.usefixtures("one_thread")

KRONECKER = {"exact_log_prob": "kronecker", "objective": "stock"}


def drawn(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixed(x, seed=1):
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))]


def grid(*shape):
    """Random values along each axis, all combinations, in any order."""
    axes = [drawn(size, seed=at) for at, size in enumerate(shape)]
    return mixed(torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(shape)))


def space_time(stations, times):
    there = drawn(stations, 2).repeat_interleave(times, 0)
    return mixed(torch.cat([there, drawn(times, 1, seed=2).repeat(stations, 1)], -1))


CASES = {
    "rbf ARD": (lambda: ScaleKernel(RBFKernel(ard_num_dims=2)), grid(12, 20)),
    "three axes": (RBFKernel, grid(5, 8, 6)),
    "a constant column": (RBFKernel, torch.cat([grid(12, 18), torch.full((216, 1), 0.3).double()], -1)),
    "products": (
        lambda: ScaleKernel(
            ScaleKernel(MaternKernel(2.5, active_dims=(1,)))
            * ScaleKernel(PeriodicKernel(active_dims=(0,)) + RQKernel(active_dims=(0,)) + ConstantKernel())
            * RBFKernel(ard_num_dims=2)
        ),
        grid(14, 15),
    ),
    "space and time": (
        lambda: ScaleKernel(
            MaternKernel(1.5, ard_num_dims=2, active_dims=(0, 1)) * MaternKernel(0.5, active_dims=(2,))
        ),
        space_time(15, 18),
    ),
}
each_case = pytest.mark.parametrize(("make", "x"), CASES.values(), ids=CASES)


def regression(x, kernel, dtype=torch.float64, noise=None):
    y = (5 * x.sum(-1)).sin() + 0.3 * torch.randn(len(x), generator=torch.Generator().manual_seed(3)).double()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Regression(x.to(dtype), y.to(dtype), kernel, noise or GaussianLikelihood())
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.rand(parameter.shape)
    return model.train()


def truth(model):
    model = copy.deepcopy(model).double()
    x, y = (t.double() for t in (*model.train_inputs, model.train_targets))
    tree = trees.read(model.covar_module, x)
    return model, likelihood.reference(tree, model.likelihood.noise, y - model.mean_module(x)) / len(y)


@each_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_density_and_gradients_of_both_orders(make, x, dtype, monkeypatch):
    model = regression(x, make(), dtype)
    exact_model, exact = truth(model)
    monkeypatch.setattr(likelihood, "log_prob", None)  # nothing takes a factor of all points
    with autokern.enabled(), autokern.using(force=KRONECKER):
        loss = loss_of(model)
        assert served() == {"kronecker": 1}
        first = gradients(loss, model, create_graph=True)
    expected = gradients(exact, exact_model, create_graph=True)
    rounding = 1e-9 if dtype is torch.float64 else 1e-3
    assert loss.dtype is dtype
    assert loss.item() == pytest.approx(exact.item(), rel=rounding)
    close(first, expected, rounding)
    second = gradients(sum(g.square().sum() for g in first), model)
    close(second, gradients(sum(g.square().sum() for g in expected), exact_model), 100 * rounding)


def test_backward_twice_and_with_another_cotangent():
    make, x = CASES["products"]
    model = regression(x, make())
    with autokern.enabled(), autokern.using(force=KRONECKER):
        loss = loss_of(model)
    first = gradients(loss, model, retain_graph=True)
    second = gradients(3 * loss, model)
    torch.testing.assert_close([3 * g for g in first], list(second))


def test_batched_gradients_and_what_wants_none():
    make, x = CASES["products"]
    model = regression(x, make())
    model.covar_module.base_kernel.requires_grad_(False)
    with autokern.enabled(), autokern.using(force=KRONECKER):
        loss = loss_of(model)
    weights = torch.tensor([1.0, -2.0]).double()
    single = gradients(loss, model, retain_graph=True)
    several = gradients(loss, model, grad_outputs=weights, is_grads_batched=True)
    for one, each in zip(single, several, strict=True):
        torch.testing.assert_close(each, weights.view(-1, *[1] * one.dim()) * one)
    exact_model, exact = truth(model)
    close(single, gradients(exact, exact_model), 1e-9)


def test_where_stock_iterates_the_density_is_the_exact_one():
    model = regression(grid(40, 30), ScaleKernel(RBFKernel(ard_num_dims=2)))
    exact_model, exact = truth(model)
    with autokern.enabled(), autokern.using(force=KRONECKER):
        loss = loss_of(model)
    assert served() == {"kronecker": 1}
    torch.testing.assert_close(loss, exact, rtol=1e-10, atol=0)
    close(gradients(loss, model), gradients(exact, exact_model), 1e-8)


def test_it_runs_where_nothing_is_measured():
    model = regression(grid(18, 20), ScaleKernel(RBFKernel()))
    with autokern.enabled():
        loss_of(model)
    assert served() == {"kronecker": 1}


# --- what is a grid ---------------------------------------------------------------------------------------------------


def test_what_is_a_grid_to_a_kernel():
    x, rbf = grid(12, 20), RBFKernel()
    found = grids.found(rbf, x)
    assert found.shape == (12, 20)
    assert torch.equal(x[found.order].view(12, 20, 2)[:, 0], x[found.lines[0]])
    assert torch.equal(x[found.order].view(12, 20, 2)[0], x[found.lines[1]])
    assert grids.found(MaternKernel(2.5), x) is None
    assert grids.found(RBFKernel(active_dims=(0,)) + RBFKernel(active_dims=(1,)), x) is None
    assert grids.found(MaternKernel(active_dims=(0,)) * MaternKernel(active_dims=(0, 1)), x) is None
    assert grids.found(MaternKernel(active_dims=(0,)) * MaternKernel(active_dims=(1,)), x).shape == (12, 20)
    assert grids.found(RBFKernel(), space_time(15, 18)) is None
    assert grids.found(rbf, grid(3, 80)) is None
    for changed in (x[1:], torch.cat([x[1:], x[:1] + 1e-9]), torch.cat([x[1:], x[1:2]]), x.requires_grad_()):
        assert grids.found(rbf, changed) is None
    far = grid(12, 20)
    far[far == far[0, 0]] = torch.nan
    assert grids.found(rbf, far) is None
    assert grids.found(rbf, torch.rand(240, 2)) is None
    assert grids.found(rbf, torch.linspace(0, 1, 240)[:, None]) is None


def test_points_that_change_are_looked_at_again():
    model = regression(grid(12, 20), ScaleKernel(RBFKernel(ard_num_dims=2)))
    with autokern.enabled(), autokern.using(force=KRONECKER):
        for points in (grid(20, 12), torch.rand(240, 2).double(), grid(12, 20)):
            model.train_inputs[0].data.copy_(points)
            torch.testing.assert_close(loss_of(model), truth(model)[1], rtol=1e-9, atol=0)


def test_kernels_that_are_exchanged_are_looked_at_again():
    model = regression(grid(18, 20), ScaleKernel(RBFKernel()))
    with autokern.enabled():
        for kernel in (RBFKernel(), MaternKernel(2.5), RBFKernel()):
            model.covar_module.base_kernel = kernel.double()
            torch.testing.assert_close(loss_of(model), truth(model)[1], rtol=1e-9, atol=0)
    assert served()["kronecker"] == 2


# --- what takes the ordinary way --------------------------------------------------------------------------------------


def test_problems_that_are_not_served():
    whole = Problem(op="exact_log_prob", m=40, n=1000, d=3, grad="theta", variant="rbf/cholesky/grid")
    why, merged = EXACT_LOG_PROB["kronecker"].unsupported, EXACT_LOG_PROB["merged"].unsupported
    assert why(whole) is None
    assert merged(whole)
    for change in (
        {"variant": "rbf/cholesky"}, {"batch": 2}, {"grad": "theta/x"}, {"device": "cuda"}, {"n": 100}, {"m": 300},
        {"variant": "linear+rbf/cholesky/grid"},
    ):  # fmt: skip
        assert why(whole.replace(**change))


def test_noise_of_each_point_is_not_served():
    x = grid(12, 20)
    model = regression(x, RBFKernel(), noise=FixedNoiseGaussianLikelihood(0.1 + drawn(240)))
    with autokern.enabled(), autokern.using(force=KRONECKER):
        torch.testing.assert_close(loss_of(model), truth(model)[1], rtol=1e-10, atol=0)
    assert "kronecker" not in served()


@pytest.mark.parametrize("noise", [1e-17, 1e-13, -1e-3])
def test_noise_that_rounding_may_swallow_takes_the_ordinary_way(noise):
    model = regression(grid(12, 20), RBFKernel())
    model.likelihood.noise_covar.register_constraint("raw_noise", GreaterThan(-1.0))
    model.likelihood.noise_covar.initialize(noise=torch.tensor([noise]).double())
    outcomes = []
    for way in ("fused", "kronecker"):
        forced = autokern.using(force={"exact_log_prob": way, "objective": "stock"})
        with autokern.enabled(), forced, warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                found = loss_of(model).item()
            except Exception as error:
                found = type(error), str(error)
            outcomes.append((found, [str(w.message) for w in heard]))
    assert outcomes[0] == outcomes[1]


def test_parameters_that_are_no_numbers_raise_as_stock_does():
    model = regression(grid(12, 20), RBFKernel())
    model.covar_module.raw_lengthscale.data.fill_(torch.nan)
    with autokern.enabled(), autokern.using(force=KRONECKER), pytest.raises(NanError, match="57600 of 57600"):
        loss_of(model)


def test_targets_that_are_no_numbers_raise_as_stock_does_where_it_iterates():
    model = regression(grid(20, 42), RBFKernel())
    model.train_targets[3] = torch.nan
    with pytest.raises(RuntimeError) as stock:
        loss_of(model)
    with autokern.enabled(), autokern.using(force=KRONECKER), pytest.raises(type(stock.value)) as ours:
        loss_of(model)
    assert str(ours.value) == str(stock.value)


@pytest.mark.parametrize(("m", "n"), [(20, 400), (30, 217), (300, 250), (3, 1000)])
def test_samples_of_any_sizes_are_of_a_problem_near(m, n):
    asked = Problem(op="exact_log_prob", m=m, n=n, d=3, grad="theta", variant="rbf/cholesky/grid")
    problem = EXACT_LOG_PROB.nearest(asked)
    args = EXACT_LOG_PROB.sample(problem, torch.Generator().manual_seed(0))
    assert EXACT_LOG_PROB.problem_of(*args) == problem
    assert problem.n > 0.7 * n
    assert EXACT_LOG_PROB.check(problem, EXACT_LOG_PROB["kronecker"].run(*args), args) < 1
    assert structure.of(args[0].lazy.x1).may_be_grid
