"""Points that occur several times count once: densities, gradients of both orders, and where the ordinary way runs."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from support.outcomes import outcome
from support.structured import Regression, close, gradients, loss_of, served

import autokern
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.density import gaussian, repeated_points
from autokern.kernels import tree as trees
from autokern.model import marginal
from autokern.ops.exact_log_prob import EXACT_LOG_PROB

pytestmark = pytest.mark.usefixtures("one_thread")

MERGED = {"exact_log_prob": "merged", "objective": "stock"}
KERNELS = {
    "rbf": RBFKernel,
    "scaled ARD matern": lambda: ScaleKernel(MaternKernel(2.5, ard_num_dims=2)),
    "rough": lambda: ScaleKernel(MaternKernel(0.5)),
    "sum": lambda: (
        ScaleKernel(RBFKernel(active_dims=(0,)) * PeriodicKernel(active_dims=(1,))) + ScaleKernel(MaternKernel(1.5))
    ),
    "active dimension": lambda: ScaleKernel(RBFKernel(active_dims=(0,)), active_dims=(1, 0)),
}


def repeated(n=300, m=60, d=2, dtype=torch.float64, seed=0):
    """Points of which m differ, in any order, and targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(m, d, generator=generator, dtype=torch.float64)
    x = x[torch.cat([torch.arange(m), torch.randint(m, (n - m,), generator=generator)])]
    y = (5 * x[:, 0]).sin() + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def regression(x, y, kernel=None, noise=None):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        kernel = ScaleKernel(MaternKernel(2.5)) if kernel is None else kernel
        likelihood = GaussianLikelihood() if noise is None else FixedNoiseGaussianLikelihood(noise)
        return Regression(x, y, kernel, likelihood).train()


def truth(model):
    """The same model in float64, and its loss by the plain formula."""
    model = copy.deepcopy(model).double()
    x, y = (t.double() for t in (*model.train_inputs, model.train_targets))
    noise = model.likelihood.noise_covar.noise
    k = model.covar_module.active_dims
    tree = trees.read(model.covar_module, x if k is None else x.index_select(-1, k))
    return model, gaussian.reference(tree, noise, y - model.mean_module(x)) / len(y)


def distinct(x):
    return repeated_points.distinct(x)


# --- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("per_point", [False, True], ids=["one noise", "noise of each point"])
def test_density_and_gradients_of_both_orders(make, dtype, per_point):
    x, y = repeated(dtype=dtype)
    noise = 0.05 + torch.rand(len(y), generator=torch.Generator().manual_seed(2)).to(dtype) if per_point else None
    model = regression(x, y, make(), noise)
    exact_model, exact = truth(model)
    with autokern.enabled(), autokern.using(force=MERGED):
        loss = loss_of(model)
        assert served() == {"merged": 1}
        first = gradients(loss, model, create_graph=True)
    expected = gradients(exact, exact_model, create_graph=True)
    rounding = 1e-10 if dtype is torch.float64 else 1e-3
    assert loss.item() == pytest.approx(exact.item(), rel=rounding)
    close(first, expected, rounding)
    second = gradients(sum(g.square().sum() for g in first), model)
    wanted = gradients(sum(g.square().sum() for g in expected), exact_model)
    close(second, wanted, 100 * rounding)


def described(x, value, noise, mean):
    """A marginal whose noise, mean and value want gradients."""
    prior = gpytorch.distributions.MultivariateNormal(mean, ScaleKernel(RBFKernel()).double()(x))
    found = marginal.read(prior, noise)
    assert found is not None
    return found, value, True


def test_gradients_by_noise_mean_and_targets():
    x, y = repeated(seed=3)
    leaves = [y.requires_grad_(), torch.tensor([0.2]).double().requires_grad_(), torch.zeros_like(y).requires_grad_()]
    args = described(x, *leaves)
    out, exact = EXACT_LOG_PROB["merged"].run(*args), EXACT_LOG_PROB.reference(*args)
    torch.testing.assert_close(out, exact, rtol=1e-11, atol=0)
    found = torch.autograd.grad(out, leaves, retain_graph=True)
    close(found, torch.autograd.grad(exact, leaves), 1e-10)
    for one, again in zip(found, torch.autograd.grad(out, leaves), strict=True):  # a second backward pass
        torch.testing.assert_close(one, again, rtol=1e-9, atol=1e-12)


# --- which points are the same ----------------------------------------------------------------------------------------


def test_only_equal_rows_are_one_point():
    x, _ = repeated(240, 60)
    assert distinct(x) == 60
    near = x.clone()
    near[60:] *= 1 + torch.rand(180, 2, dtype=torch.float64) * 1e-12
    assert distinct(near) == 240
    signed = torch.zeros(240, 2, dtype=torch.float64)
    signed[::2] *= -1
    assert distinct(signed) == 2
    for number in (torch.nan, torch.inf):
        other = x.clone()
        other[7, 1] = number
        assert repeated_points.found(other) is None
    few = torch.cat([torch.rand(230, 2), torch.full((10, 2), 0.5)])
    assert distinct(few) == 240


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_groups_and_counts(dtype):
    x, _ = repeated(300, 40, 3, dtype)
    found = repeated_points.found(x.T.contiguous().T)  # columns in memory
    assert torch.equal(x[found.first][found.group], x)
    assert len(x[found.first].unique(dim=0)) == 40
    assert torch.equal(found.group.bincount(), found.counts.long())


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(repeated_points, "_kept", {})
    monkeypatch.setattr(repeated_points, "_KEPT", 3)
    for seed in range(10):
        repeated_points.found(repeated(seed=seed)[0])
        assert len(repeated_points._kept) <= 3
    assert repeated_points.found(repeated(seed=9)[0]) is repeated_points.found(repeated(seed=9)[0])
    monkeypatch.setattr(repeated_points, "_KEPT_BYTES", 1000)
    assert distinct(repeated(1000, 100)[0]) == 100
    assert all(len(points) < 1000 for points, _ in repeated_points._kept.values())


def test_threads_share_what_is_kept(monkeypatch):
    monkeypatch.setattr(repeated_points, "_kept", {})

    def look(seed):
        for step in range(30):
            assert distinct(repeated(seed=100 * seed + step)[0]) == 60

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(look, range(4)))


def test_a_model_whose_points_change_is_right():
    x, y = repeated()
    model = regression(x, y)
    with autokern.enabled():
        for points in (x, torch.rand(300, 2).double(), repeated(seed=9)[0], repeated(m=299, seed=9)[0]):
            model.train_inputs[0].data.copy_(points)
            with autokern.using(force=MERGED):
                loss = loss_of(model)
            torch.testing.assert_close(loss, truth(model)[1], rtol=1e-10, atol=0)


# --- what it does not serve -------------------------------------------------------------------------------------------


def test_problems_that_are_not_served():
    whole = Problem(op="exact_log_prob", m=400, n=1000, d=3, grad="theta", variant="rbf/cholesky")
    why = EXACT_LOG_PROB["merged"].unsupported
    assert why(whole) is None
    for change in (
        {"m": 950}, {"n": 100, "m": 50}, {"batch": 2}, {"grad": "theta/x"}, {"device": "cuda"},
        {"variant": "linear+rbf/cholesky"}, {"m": 1001},
    ):  # fmt: skip
        assert why(whole.replace(**change))


def test_gradients_by_the_points_and_batches_take_the_ordinary_way():
    x, y = repeated()
    model = regression(x.requires_grad_(), y)
    with autokern.enabled(), autokern.using(force=MERGED):
        loss = loss_of(model)
    found = torch.autograd.grad(loss, x)[0]
    plain = x.detach().requires_grad_()
    model.set_train_data(plain, strict=False)
    torch.testing.assert_close(found, torch.autograd.grad(truth_at(model, plain), plain)[0], rtol=1e-7, atol=1e-9)
    batch = regression(x.detach().expand(2, -1, -1), y.expand(2, -1))
    with autokern.enabled(), autokern.using(force=MERGED):
        both = loss_of(batch)
    torch.testing.assert_close(both, loss.detach().expand(2), rtol=1e-9, atol=0)
    assert "merged" not in served()


def truth_at(model, x):
    tree = trees.read(model.covar_module, x)
    residual = model.train_targets - model.mean_module(x)
    return gaussian.reference(tree, model.likelihood.noise, residual) / len(residual)


@pytest.mark.parametrize("noise", [0.0, 1e-17, 1e-13, -1e-3])
def test_noise_that_rounding_may_swallow_is_the_ordinary_ways_matter(noise):
    def run():
        model = regression(*repeated(250, 50), RBFKernel())
        model.likelihood.noise_covar.register_constraint("raw_noise", GreaterThan(-1.0))
        model.likelihood.noise_covar.initialize(noise=torch.tensor([noise]).double())
        return loss_of(model).item()

    with autokern.enabled():
        with autokern.using(force={"exact_log_prob": "fused", "objective": "stock"}):
            ordinary = outcome(run)
        with autokern.using(force=MERGED):
            assert outcome(run) == ordinary
            assert served()["merged"] == 1
    if not isinstance(outcome(run)[0], float):
        assert outcome(run)[0] == ordinary[0]


def test_noise_of_a_point_alone_may_be_too_little():
    x, y = repeated()
    noise = torch.full_like(y, 0.1)
    noise[17] = 1e-16
    with autokern.enabled(), gpytorch.settings.min_fixed_noise(double_value=1e-20):
        model = regression(x, y, noise=noise)
        with autokern.using(force={"exact_log_prob": "fused", "objective": "stock"}):
            ordinary = outcome(lambda: loss_of(model).item())
        with autokern.using(force=MERGED):
            assert outcome(lambda: loss_of(model).item()) == ordinary


def test_parameters_that_are_no_numbers_raise_as_stock_does():
    def run():
        model = regression(*repeated(), RBFKernel())
        model.covar_module.raw_lengthscale.data.fill_(torch.nan)
        return loss_of(model).item()

    stock = outcome(run)
    with autokern.enabled(), autokern.using(force=MERGED):
        assert outcome(run) == stock


def test_targets_that_are_no_numbers_raise_as_stock_does_where_it_iterates():
    def run():
        x, y = repeated(820)
        y[3] = torch.nan
        return loss_of(regression(x, y)).item()

    stock = outcome(run)
    assert not isinstance(stock[0], float)
    with autokern.enabled(), autokern.using(force=MERGED):
        assert outcome(run) == stock


def test_samples_have_as_many_points_that_differ():
    problem = Problem(op="exact_log_prob", m=70, n=300, d=3, grad="theta", variant="matern52/cholesky")
    op = get("exact_log_prob")
    args = op.sample(problem, torch.Generator().manual_seed(0))
    assert op.problem_of(*args) == problem
    assert op.check(problem, op["merged"].run(*args), args) < 1
