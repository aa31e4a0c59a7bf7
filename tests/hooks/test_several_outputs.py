"""Several outputs: Kronecker products of points and modes, and tasks that are independent, a batch of densities."""

import inspect
import sys
from unittest import mock

import gpytorch
import pytest
import torch
from botorch.models import HigherOrderGP
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator import operators
from linear_operator.operators import ConstantDiagLinearOperator, DenseLinearOperator, KroneckerProductLinearOperator
from linear_operator.utils.warnings import NumericalWarning
from support.losses import Model, independent
from support.models import loss_of
from support.outcomes import as_stock, assert_close, both, count, outcome

import autokern


def higher_order(shape, dtype):
    torch.manual_seed(0)
    x = torch.rand(9, 2, dtype=dtype)
    model = HigherOrderGP(x, torch.rand(9, *shape, dtype=dtype)).train()
    return ExactMarginalLogLikelihood(model.likelihood, model), *model.train_inputs, model.train_targets


def near(found, expected, digits):
    """Each tensor is the other one, within so much of its largest entry."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=digits, atol=digits * max(float(other.detach().abs().max()), 1e-3))


class Tasks(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.kernel = RBFKernel()
        self.between = torch.nn.Parameter(torch.eye(3, dtype=x.dtype) + 0.3)

    def forward(self, x):
        product = KroneckerProductLinearOperator(self.kernel(x), DenseLinearOperator(self.between @ self.between.mT))
        return MultivariateNormal(x.new_zeros(3 * len(x)), product)


def written(likelihood):
    torch.manual_seed(0)
    x, y = torch.rand(12, 2).double(), torch.rand(36).double()
    model = Tasks(x, y, likelihood).double().train()
    return ExactMarginalLogLikelihood(likelihood, model), x, y


CASES = {
    "one mode": lambda: higher_order((4,), torch.float64),
    "three modes": lambda: higher_order((2, 3, 2), torch.float64),
    "single precision": lambda: higher_order((3, 2), torch.float32),
    "a user's product": lambda: written(GaussianLikelihood()),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_stock_s(name):
    mll, x, y = CASES[name]()

    def run():
        loss = mll(mll.model(x), y)
        return loss.detach(), *torch.autograd.grad(loss, [p for p in mll.parameters() if p.requires_grad])

    before = count("task_log_prob", "arrays")
    theirs, ours = both(run)
    assert count("task_log_prob", "arrays") == before + 1
    near(ours, theirs, 1e-9 if y.dtype == torch.float64 else 2e-3)


@pytest.mark.parametrize("other", ["fixed noise", "a wrong target", "no gradient"])
def test_what_is_not_such_a_loss_is_left_to_stock(other):
    fixed = FixedNoiseGaussianLikelihood(torch.full((36,), 0.1).double())
    mll, x, y = written(fixed if other == "fixed noise" else GaussianLikelihood())
    y = y[:-1] if other == "a wrong target" else y

    def run():
        with torch.set_grad_enabled(other != "no gradient"):
            return mll(mll.model(x), y).item()

    before = autokern.stats().get("task_log_prob")
    theirs, ours = both(lambda: outcome(run))
    assert autokern.stats().get("task_log_prob") == before
    assert ours == theirs


def test_two_factors_that_are_negative_definite_make_a_product_that_is_not():
    operator, rhs, _ = product(0.3)
    first, second, third = operator.linear_op.linear_ops
    turned = KroneckerProductLinearOperator(*(DenseLinearOperator(-one.to_dense()) for one in (first, second)), third)
    turned = turned + ConstantDiagLinearOperator(torch.tensor([0.3]).double(), 144)
    with autokern.enabled():
        assert_close(turned.solve(rhs), operator.solve(rhs), rtol=1e-7, atol=1e-7)


def test_a_factor_that_is_not_quite_symmetric_is_factorised_as_stock_s():
    operator, rhs, _ = product(0.3)
    first, second, third = (one.to_dense().detach() for one in operator.linear_op.linear_ops)
    apart = KroneckerProductLinearOperator(1e9 * first, 1e-9 * (second + 0.01 * second.triu(1)), third)
    apart = apart + ConstantDiagLinearOperator(torch.tensor([0.3]).double(), 144)
    theirs, ours = both(lambda: apart.solve(rhs))
    assert_close(ours, theirs, rtol=0, atol=0)


def product(noise, batch=(), dtype=torch.float64, sizes=(12, 4, 3), missing=0):
    torch.manual_seed(1)
    roots = [torch.randn(*batch, n, n - missing, dtype=dtype).requires_grad_() for n in sizes]
    covariance = KroneckerProductLinearOperator(*(DenseLinearOperator(r @ r.mT / r.shape[-1]) for r in roots))
    noise = torch.full((*batch, 1), noise, dtype=dtype).requires_grad_()
    n = covariance.shape[-1]
    rhs = torch.randn(*batch, n, 2, dtype=dtype).requires_grad_()
    return covariance + ConstantDiagLinearOperator(noise, n), rhs, [*roots, noise, rhs]


@pytest.mark.parametrize(("batch", "dtype"), [((), torch.float64), ((2,), torch.float64), ((), torch.float32)])
def test_solves_and_their_gradients_of_two_orders_are_stock_s(batch, dtype):
    def run():
        operator, rhs, leaves = product(0.3, batch, dtype)
        found = operator.solve(rhs)
        slopes = torch.autograd.grad(found.square().sum(), leaves, create_graph=True)
        return found, *slopes, *torch.autograd.grad(sum(s.square().sum() for s in slopes), leaves)

    theirs, ours = both(run)
    near(ours, theirs, 1e-8 if dtype == torch.float64 else 5e-3)


def solved(*of, **options):
    """The solution, and how often the library factorised."""
    seen, operator = [], product(*of, **options)
    code = inspect.unwrap(operators.LinearOperator.cholesky).__code__
    sys.setprofile(lambda frame, event, _: seen.append(1) if event == "call" and frame.f_code is code else None)
    try:
        with torch.no_grad():
            return operator[0].solve(operator[1]), len(seen)
    finally:
        sys.setprofile(None)


def test_a_large_product_is_not_factorised_unless_it_is_ordered_and_a_singular_or_small_one_is():
    def warned():
        with pytest.warns(NumericalWarning, match="jitter"):
            return solved(-1e-9, missing=1)

    with autokern.enabled():
        assert solved(0.3)[1] == 0
        assert [d.candidate for d, _ in autokern.explain().decisions if d.problem.op == "solve"] == ["eigenvalues"]
        with autokern.using(force={"solve": "stock"}):
            assert solved(0.3)[1] == 1
        assert solved(0.3, sizes=(5, 4, 3))[1] == 1
    theirs, ours = both(warned)
    assert ours[1] == theirs[1] == 1
    assert_close(ours[0], theirs[0], rtol=0, atol=0)


@pytest.mark.parametrize("rows", [(), (2,), (3, 2)], ids=str)
@pytest.mark.parametrize("batch", [(2,), (3, 1)], ids=str)
def test_batches_of_matrices_and_columns_are_broadcast_as_stock_s(batch, rows):
    operator, _, _ = product(0.3, batch)
    rhs = torch.rand(*rows, 144, 3).double()
    (theirs, _), (ours, _) = both(lambda: outcome(operator.detach().solve, rhs))
    assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


def test_a_backward_pass_solves_with_the_factor_of_its_forward_pass():
    operator, rhs, leaves = product(0.3)
    with autokern.enabled():
        with autokern.using(force={"solve": "stock"}):
            found = operator.solve(rhs)
        before = autokern.stats().get("solve")
        torch.autograd.grad(found.sum(), leaves)
        assert autokern.stats().get("solve") == before


TASKS = 3


def made(kernel=None, n=30, tasks=TASKS, dtype=torch.float64, **noise):
    torch.manual_seed(3)
    batch = torch.Size([tasks])
    x = torch.rand(n, 2, dtype=dtype)
    y = torch.stack([torch.sin((i + 2) * x.sum(-1)) for i in range(tasks)], -1) + 0.1 * torch.randn(n, tasks).to(x)
    kernel = kernel or ScaleKernel(RBFKernel(batch_shape=batch, ard_num_dims=2), batch_shape=batch)
    likelihood, mean = MultitaskGaussianLikelihood(tasks, **noise), ConstantMean(batch_shape=batch)
    model = Model(x, y, likelihood, kernel, mean, independent).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return ExactMarginalLogLikelihood(model.likelihood, model)


def gradients(mll, **how):
    return torch.autograd.grad(loss_of(mll), list(mll.parameters()), **how)


def along(mll, directions):
    """Return how the gradients change along some directions, by differences: the library's derivatives lose a part."""
    found = []
    for step in (1e-5, -2e-5, 1e-5):
        with torch.no_grad():
            for parameter, direction in zip(mll.parameters(), directions, strict=True):
                parameter.add_(direction, alpha=step)
        found.append(gradients(mll))
    return [(a - b) / 2e-5 for a, b in zip(*found[:2], strict=True)]


MODELS = {
    "a kernel for each": made,
    "one task": lambda: made(tasks=1),
    "one point": lambda: made(n=1),
    "single precision": lambda: made(dtype=torch.float32),
    "the same noise": lambda: made(has_task_noise=False),
    "noise of tasks alone": lambda: made(has_global_noise=False),
    "noise between tasks": lambda: made(rank=1),
    "a sum": lambda: made(ScaleKernel(MaternKernel(2.5)) + RBFKernel(batch_shape=torch.Size([TASKS]), ard_num_dims=2)),
    "a linear kernel": lambda: made(LinearKernel(batch_shape=torch.Size([TASKS]))),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_losses_and_derivatives(make):
    mll = make()
    loss, first = loss_of(mll), gradients(mll)
    directions = [g.cos() for g in first]
    second = along(mll, directions)
    with autokern.enabled(), autokern.using(force={"exact_log_prob": "fused"}):  # stock's second ones lose a part
        ours = loss_of(mll)
        slopes = gradients(mll, create_graph=True)
        served = all(one.requires_grad for one in slopes)  # the library has no second derivatives of noise with a rank
        curved = torch.autograd.grad(slopes, list(mll.parameters()), directions) if served else second
    assert served or mll.likelihood.rank
    exact = loss.dtype is torch.float64
    near([ours], [loss], 1e-10 if exact else 1e-4)
    near(slopes, first, 1e-8 if exact else 2e-2)
    if exact:
        near(curved, second, 1e-6)


@as_stock()
def test_a_likelihood_that_is_patched_is_followed():
    mll, stock = made(), MultitaskGaussianLikelihood.marginal

    def doubled(self, distribution, *args, **kwargs):
        found = stock(self, distribution, *args, **kwargs)
        return type(found)(found.mean, 2 * found.lazy_covariance_matrix)

    before = loss_of(mll)
    with mock.patch.object(MultitaskGaussianLikelihood, "marginal", doubled):
        return before, loss_of(mll)


def test_more_values_than_stock_factorises():
    mll = made(n=410, tasks=2)
    with gpytorch.settings.max_cholesky_size(10_000):
        expected = gradients(mll)
    with autokern.enabled():
        found = gradients(mll)
    (served,) = autokern.stats()["exact_log_prob"]
    assert served != "stock"
    assert count("exact_log_prob", served) == 1
    assert_close(found, expected, rtol=1e-7)
