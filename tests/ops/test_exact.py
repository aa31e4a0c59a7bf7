"""Exact training: densities of kernel trees, their derivatives of both orders, and the seams that lead to them."""

import gc

import psutil
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel, keops
from linear_operator import operators as o
from support.models import ExactModel, definite, step
from support.outcomes import count, outcome
from support.tiling import KERNELS

import autokern
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.density import gaussian
from autokern.model import marginal
from autokern.runtime import dispatch

pytestmark = pytest.mark.usefixtures("one_thread")

FUSED = {"exact_log_prob": "fused", "inv_quad_logdet": "potri"}


def regression(n=60, d=3, kernel=None, seed=3):
    like = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    x, draw = torch.rand(n, d, **like), torch.randn(n, **like)
    kernel = kernel or ScaleKernel(RBFKernel(ard_num_dims=d))
    return ExactModel(x, (5 * x[:, 0]).sin() + 0.1 * draw, kernel).double().train()


def test_a_second_density_of_one_distribution_is_left_to_stock():
    """Stock keeps the factor, so that it answers further values without factorising again."""
    model = regression()
    with autokern.enabled(), autokern.using(force=FUSED):
        marginal = model.likelihood(model(*model.train_inputs))
        values = [marginal.log_prob(model.train_targets + shift) for shift in (0.0, 1.0, 2.0)]
    assert count("exact_log_prob") == count("exact_log_prob", "fused") == 1
    exact = [model.likelihood(model(*model.train_inputs)).log_prob(model.train_targets + s) for s in (0.0, 1.0, 2.0)]
    torch.testing.assert_close(torch.stack(values), torch.stack(exact), rtol=1e-10, atol=1e-10)


def test_without_gradients_nothing_is_inverted():
    model = regression()
    with autokern.enabled(), autokern.using(force=FUSED), torch.no_grad():
        marginal = model.likelihood(model(*model.train_inputs))
        ours = marginal.log_prob(model.train_targets)
    assert not count("exact_log_prob")
    assert count("inv_quad_logdet") == count("inv_quad_logdet", "potri") == 1
    torch.testing.assert_close(ours, model.likelihood(model(*model.train_inputs)).log_prob(model.train_targets))


@pytest.mark.parametrize(("kind", "served"), [(keops.RBFKernel, False), (RBFKernel, True)])
def test_where_no_matrix_is_formed_the_classes_of_keops_are_left_alone(kind, served):
    model = regression(kernel=ScaleKernel(kind()))
    problem_of, prior = get("exact_log_prob").problem_of, model(*model.train_inputs)
    noise = model.likelihood.noise
    described = marginal.read(prior, noise)
    assert problem_of(described, model.train_targets, True) is not None
    assert (problem_of(described, model.train_targets, False) is not None) == served


STRUCTURED = {
    "Kronecker": lambda: o.KroneckerProductLinearOperator(
        o.DenseLinearOperator(definite(3)), o.DenseLinearOperator(definite(4))
    ),
    "Toeplitz": lambda: o.ToeplitzLinearOperator(torch.tensor([4.0, 1.0, 0.5, 0.1]).double()),
    "low rank": lambda: (
        o.LowRankRootLinearOperator(torch.randn(12, 2).double())
        + o.ConstantDiagLinearOperator(torch.tensor([0.3]).double(), 12)
    ),
    "own preconditioner": lambda: o.AddedDiagLinearOperator(
        o.DenseLinearOperator(definite(12)),
        o.ConstantDiagLinearOperator(torch.tensor([0.3]).double(), 12),
        preconditioner_override=lambda operator: (None, None, None),
    ),
}


@pytest.mark.parametrize("make", STRUCTURED.values(), ids=STRUCTURED)
def test_structured_operators_stay_stock(make):
    torch.manual_seed(0)
    operator = make()
    rhs = torch.randn(operator.shape[-1], 2).double()
    stock = operator.inv_quad_logdet(rhs, logdet=True)
    with autokern.enabled(), autokern.using(force=FUSED):
        ours = type(operator)(*operator._args, **operator._kwargs).inv_quad_logdet(rhs, logdet=True)
    assert not count("inv_quad_logdet", "potri")
    torch.testing.assert_close(ours, stock, rtol=1e-9, atol=1e-10)


def test_the_backward_pass_keeps_to_the_threads_of_the_forward_pass(monkeypatch):
    seen = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(
        gaussian, "inverted", lambda lower: seen.append(torch.get_num_threads()) or torch.cholesky_inverse(lower)
    )
    try:
        model = regression(30)
        with autokern.enabled(), autokern.using(force={"exact_log_prob": "fused@1"}):
            inside_enabled = torch.get_num_threads()
            step(model)
            assert torch.get_num_threads() == inside_enabled
        expected = "fused@1" if inside_enabled > 1 else "stock"  # one core: there is no more than one thread anyway
        assert count("exact_log_prob") == count("exact_log_prob", expected) == 1
        if inside_enabled > 1:
            assert seen == [1]
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_memory_is_flat_over_a_thousand_fits():
    process, resident = psutil.Process(), []
    with autokern.enabled(), autokern.using(force=FUSED):
        for turn in range(1000):
            model = regression(90 + turn % 20, 2, seed=turn)
            step(model)
            if turn % 100 == 99:
                gc.collect()
                resident.append(process.memory_info().rss)
    assert resident[-1] - resident[1] < 16 * 2**20


def priors():
    """Distributions that differ in what might matter, each with noise and value."""
    x, y = torch.rand(7, 3).double(), torch.rand(7).double()
    noise = torch.tensor([0.1]).double()
    for make in KERNELS.values():
        for batch in (torch.Size(), torch.Size([2])):
            kernel = make(batch).double()
            yield MultivariateNormal(torch.zeros_like(y), kernel(x)), noise, y
            yield MultivariateNormal(torch.zeros_like(y), kernel.requires_grad_(False)(x)), noise, y
    kernel = ScaleKernel(RBFKernel()).double()
    yield MultivariateNormal(torch.zeros_like(y), kernel(x)), noise.clone().requires_grad_(), y
    yield MultivariateNormal(torch.zeros_like(y), kernel(x.clone().requires_grad_())), noise, y
    yield MultivariateNormal(torch.zeros_like(y).requires_grad_(), kernel(x)), noise, y
    yield MultivariateNormal(torch.zeros_like(y), kernel(x)), noise, y.expand(2, 7)
    yield MultivariateNormal(torch.zeros(2, 7).double(), kernel(x.expand(2, 7, 3))), noise, y
    yield MultivariateNormal(torch.zeros_like(y), kernel(x)), noise.expand(3, 1), y
    yield MultivariateNormal(torch.zeros(7), kernel(x)), noise, y
    yield MultivariateNormal(torch.zeros_like(y), kernel(x)), noise.float(), y
    yield MultivariateNormal(torch.zeros_like(y), kernel(x)), noise, y.float()
    yield MultivariateNormal(torch.zeros_like(y), ScaleKernel(RBFKernel())(x)), noise, y
    for other in (MaternKernel(1.5), MaternKernel(2.5), LinearKernel()):
        yield MultivariateNormal(torch.zeros_like(y), other.double()(x)), noise, y
    yield MultivariateNormal(torch.zeros_like(y), o.DenseLinearOperator(kernel(x).to_dense())), noise, y
    yield MultivariateNormal(torch.zeros_like(y), kernel(x, x.clone())), noise, y
    yield MultivariateNormal(torch.zeros(1).double(), kernel(x[:1])), noise, y[:1]
    with torch.no_grad():
        yield MultivariateNormal(torch.zeros_like(y), kernel(x)), noise, y
    for diagonal in (o.ConstantDiagLinearOperator(noise, 7), o.DiagLinearOperator(torch.rand(7).double())):
        yield MultivariateNormal(torch.zeros_like(y), kernel(x) + diagonal), None, y


def described_priors():
    """Those of them that the op takes, as it takes them."""
    described = ((marginal.read(prior, noise), value) for prior, noise, value in priors())
    return [(prior, value) for prior, value in described if prior is not None]


@pytest.mark.parametrize("grad", [True, False])
def test_equal_keys_mean_equal_problems(grad):
    op, known = get("exact_log_prob"), {}
    for described, value in described_priors():
        for exact in (True, False):
            with torch.set_grad_enabled(grad):
                key, problem = op.key(described, value, exact), op.problem_of(described, value, exact)
            assert known.setdefault(key, problem) == problem
    assert len({p for p in known.values() if p is not None}) > (10 if grad else -1)
    assert grad or not any(known.values())


def test_every_odd_prior_gives_stocks_density_or_error():
    op = get("exact_log_prob")
    for described, value in described_priors():
        stock, warned = outcome(op.stock.run, described, value, True)
        with autokern.using(force=FUSED):
            ours, warned_too = outcome(dispatch.route(op), described, value, True)
        assert warned == warned_too
        if isinstance(stock, tuple):
            assert ours == stock
        else:
            torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)


def odd_matrices():
    k = definite(6)
    yield from (k, k.float(), k[None], k.expand(2, 6, 6), k.mT, k[:, :5], k[:5], k[0], k[:0, :0], k[:1, :1])
    yield from (k.to(torch.complex128), k.clone().requires_grad_(), k.to(torch.int64), k.to("meta"), k.to_sparse())


def odd_columns():
    b = torch.randn(6, 2, generator=torch.Generator().manual_seed(4)).double()
    yield from (b, b.float(), b[:, 0], b[None], b.expand(2, 6, 2), b[:5], b[:, :0], b.mT.contiguous().mT, b[:1])
    yield b.clone().requires_grad_()


def test_odd_matrices_give_stocks_values_or_errors():
    op = get("inv_quad_logdet")
    call, known = dispatch.route(op), {}
    for k in odd_matrices():
        for b in odd_columns():
            try:
                key, problem = op.key(k, b, True, True), op.problem_of(k, b, True, True)
            except (RuntimeError, NotImplementedError, IndexError):
                continue
            assert known.setdefault(key, problem) == problem
            if k.device.type == "meta":
                continue
            with autokern.using(force=FUSED):
                (stock, _), (ours, _) = (outcome(run, k, b, True, True) for run in (op.stock.run, call))
            if isinstance(stock[0], type):
                assert ours[0] is stock[0], (k.shape, b.shape)
            else:
                torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)
    assert sum(problem is not None for problem in known.values()) > 4


def test_a_linear_kernel_alone_is_the_librarys():
    """It is of low rank there, which takes far less than a factor of all points; a sum with others is not."""

    def asked(op, variant):
        return dispatch.explain(Problem(op=op, m=100, n=100, d=3, variant=variant, grad="theta"))

    for alone in (asked("objective", "linear"), asked("exact_log_prob", "linear/cholesky")):
        assert (alone.candidate, alone.excluded["arrays"]) == (
            "stock",
            "the library solves a linear kernel by its rank",
        )
    assert asked("objective", "linear+rbf").candidate == "arrays"
