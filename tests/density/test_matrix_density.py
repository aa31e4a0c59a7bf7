"""Densities under any matrix and of several tasks at the same points; SciPy is not imported for them."""

import importlib.machinery
import importlib.util
import os
import sys

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import LCMKernel, LinearKernel, MaternKernel, MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from gpytorch.means import LinearMean
from linear_operator.operators import DenseLinearOperator, InterpolatedLinearOperator
from scipy.linalg import _flapack as scipys
from support.densities import D, Tasks, agree, by, of, of_both_orders
from support.densities import of_tasks as made
from support.models import loss_of
from support.outcomes import count
from support.programs import PATH, said

import autokern
from autokern.density import factors, matrices
from autokern.density.gaussian import dense
from autokern.hooks.linear_operator import _looked_up as looked_up


def test_gradients_that_are_not_wanted():
    mll = of("dense")
    with autokern.enabled(), by("dense"):
        with torch.no_grad():
            loss_of(mll)
        mll.requires_grad_(False)
        loss_of(mll)
        assert "arrays" not in autokern.stats().get("dense_log_prob", {})
        mll.likelihood.noise_covar.raw_noise.requires_grad_()
        loss_of(mll).backward()
        assert autokern.stats()["dense_log_prob"]["arrays"] == 1
    found = mll.likelihood.noise_covar.raw_noise.grad.clone()
    mll.zero_grad()
    loss_of(mll).backward()
    torch.testing.assert_close(found, mll.likelihood.noise_covar.raw_noise.grad, rtol=1e-9, atol=1e-11)


def test_covariances_of_tasks_are_looked_up(monkeypatch):
    i, j = torch.tensor([[0], [2], [1], [2]]), torch.tensor([[1], [0]])
    table = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
    several = torch.tensor([[0, 1], [2, 1], [1, 1], [0, 0]])
    weights = torch.full((4, 1), 0.5, dtype=torch.float64)
    operators = [
        (InterpolatedLinearOperator(table, i, None, i, None), True),
        (InterpolatedLinearOperator(table, i, None, j, None), True),
        (InterpolatedLinearOperator(table, several, None, several, None), False),
        (InterpolatedLinearOperator(table, i, weights, i, None), False),
        (InterpolatedLinearOperator(table.expand(2, 3, 3), i.expand(2, 4, 1), None, i.expand(2, 4, 1), None), False),
    ]
    for operator, known in operators:
        dense = torch.rand(operator.shape[-2:], dtype=torch.float64, requires_grad=True)
        assert (looked_up(operator) is not None) == known
        expected = (DenseLinearOperator(dense) * operator).to_dense()
        slopes = torch.autograd.grad(expected.square().sum(), (table, dense))
        with autokern.enabled():
            for found in (DenseLinearOperator(dense) * operator, operator * DenseLinearOperator(dense)):
                assert type(found) is DenseLinearOperator
                torch.testing.assert_close(found.to_dense(), expected, rtol=0, atol=0)
                ours = torch.autograd.grad(found.to_dense().square().sum(), (table, dense))
                torch.testing.assert_close(ours, slopes, rtol=1e-13, atol=1e-13)
    assert looked_up(InterpolatedLinearOperator(table, i + 1, None, i, None)) is None  # there is no task 3
    assert looked_up(DenseLinearOperator(table)) is None
    monkeypatch.delattr("linear_operator.operators.InterpolatedLinearOperator")  # as in a release that renames it
    assert looked_up(operators[0][0]) is None


@pytest.mark.slow
def test_scipy_is_not_imported_by_autokern_nor_by_a_step():
    program = """
import sys, torch, gpytorch
before = "scipy.linalg" in sys.modules
import autokern.auto, autokern
from support.models import ExactModel, step
x = torch.rand(20, 2)
step(ExactModel(x, x.sum(-1)))
left = before or not any(name.startswith("scipy") for name in sys.modules)
from autokern.density import factors, matrices
from autokern.system import threads
alone = matrices._extension()
import scipy.linalg
import numpy as np
assert scipy.linalg._flapack.dpotrf is alone.dpotrf
assert np.allclose(scipy.linalg.cholesky(4 * np.eye(2)), 2 * np.eye(2))
from threadpoolctl import threadpool_info
several = [one for one in threadpool_info() if one["internal_api"] == "openblas"]
assert len(threads._libraries()) == sum(one["threading_layer"] == "pthreads" for one in several)
print(left)
"""
    assert said(program, PYTHONPATH=os.pathsep.join(PATH))[-1] == "True"


def test_a_scipy_of_another_layout_is_imported(monkeypatch):
    assert matrices._extension.__wrapped__() is scipys
    monkeypatch.delitem(sys.modules, "scipy.linalg._flapack")
    found = (lambda name: None), (lambda name: importlib.machinery.ModuleSpec(name, None, is_package=True))
    for spec in found:
        with monkeypatch.context() as patch:
            patch.setattr(importlib.util, "find_spec", spec)
            assert hasattr(matrices._extension.__wrapped__(), "dpotri")
    alone = matrices._extension.__wrapped__()
    k = np.cov(np.random.default_rng(9).normal(size=(9, 50)))
    np.testing.assert_array_equal(alone.dpotrf(k)[0], scipys.dpotrf(k)[0])


@pytest.mark.parametrize("function", [matrices.density, matrices.leave_one_out])
@pytest.mark.parametrize("n", [2, 100, 301])
def test_both_lapacks_give_the_same_density(function, n, monkeypatch):
    points = np.random.default_rng(n).normal(size=(n, 3))
    k = np.exp(-0.5 * ((points[:, None] - points) ** 2).sum(-1)) + 0.1 * np.eye(n)
    found = []
    monkeypatch.setattr(matrices, "_MANY", 2)
    for model in ("Intel(R) Xeon(R) Processor", "AMD EPYC"):
        monkeypatch.setattr(matrices.host, "cpu_model", lambda model=model: model)
        assert matrices._by_torch(k) is (torch._C.has_mkl and "Intel" in model)
        found.append(function(k.copy(), points[:, 0], 0.5))
        assert function(-k, points[:, 0], 0.5) is None, "without a factor there is no density"
        assert function(k.copy(), points[:, 0], 0.5, graded=False).value == found[-1].value
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(found[0].by_matrix, found[0].by_matrix.T, rtol=1e-13, atol=1e-13)


def rbf():
    """The library's second derivatives of kernels without ARD are wrong."""
    return RBFKernel(ard_num_dims=D)


def matern():
    return MaternKernel(1.5, ard_num_dims=D)


def truth(mll):
    """By torch alone: the library's operators are not differentiable twice."""
    (x,), y = mll.model.train_inputs, mll.model.train_targets
    kernel, likelihood = mll.model.covar_module, mll.likelihood
    n, tasks = y.shape
    noise = torch.zeros(tasks, tasks, dtype=x.dtype)
    if likelihood.has_global_noise:
        noise = noise + likelihood.noise * torch.eye(tasks, dtype=x.dtype)
    if likelihood.has_task_noise:
        noise = noise + (torch.diag(likelihood.task_noises) if likelihood.rank == 0 else likelihood.task_noise_covar)
    k = torch.kron(dense(kernel.data_covar_module, x), kernel.task_covar_module._eval_covar_matrix())
    k = k + torch.kron(torch.eye(n, dtype=x.dtype), noise)
    mean = mll.model.mean_module(x)
    loss = -torch.distributions.MultivariateNormal(mean.flatten(), k).log_prob(y.flatten()) / y.numel()
    return [loss.detach(), *of_both_orders(loss, list(mll.parameters()))]


MODELS = {
    "usual": made,
    "full rank": lambda: made(MultitaskKernel(matern(), num_tasks=3, rank=3)),
    "linear": lambda: made(MultitaskKernel(ScaleKernel(rbf()) + LinearKernel(), num_tasks=3), mean=LinearMean(D)),
    "two tasks": lambda: made(tasks=2),
    "one task": lambda: made(tasks=1),
    "one point": lambda: made(n=1),
    "noise of rank two": lambda: made(likelihood=MultitaskGaussianLikelihood(3, rank=2)),
    "noise of tasks alone": lambda: made(likelihood=MultitaskGaussianLikelihood(3, has_global_noise=False)),
    "the same noise": lambda: made(likelihood=MultitaskGaussianLikelihood(3, has_task_noise=False)),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_values_and_derivatives(make):
    mll = make()
    with autokern.enabled(), by("tasks"):
        before, loss = count("task_log_prob", "arrays"), loss_of(mll)
        found = [loss.detach(), *of_both_orders(loss, list(mll.parameters()))]
        loss_of(mll).backward()
        assert count("task_log_prob", "arrays") == before + 2
    expected, slopes = truth(mll), [p.grad for p in mll.parameters()]
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-10)
    agree(found, expected, rtol=1e-6, atol=1e-7)
    agree(slopes, found[1 : 1 + len(slopes)], rtol=1e-8, atol=1e-11)


class Apart(Tasks):
    def forward(self, x):
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x), interleaved=False)


OTHERS = {
    "a sum of products": lambda: made(LCMKernel([rbf(), matern()], num_tasks=3, rank=1)),
    "not interleaved": lambda: made(MultitaskKernel(rbf(), num_tasks=3), kind=Apart),
    "another likelihood": lambda: made(likelihood=type("Own", (MultitaskGaussianLikelihood,), {})(3)),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_other_models_run_stock(make):
    mll = make()
    expected = loss_of(mll).item()
    with autokern.enabled(), by("tasks"):
        before = count("task_log_prob")
        assert loss_of(mll).item() == pytest.approx(expected, rel=1e-9)
        assert count("task_log_prob") == before


@pytest.mark.filterwarnings("ignore:A not p.d.")
@pytest.mark.parametrize("seed", [0, 103, 298])  # noise of the last two has a factor of rounding errors
def test_noise_without_a_factor(seed):
    torch.manual_seed(seed)
    mll = made(likelihood=MultitaskGaussianLikelihood(3, rank=1, has_global_noise=False))
    mll.model.set_train_data(targets=torch.zeros(11, 3, dtype=torch.float64))
    expected = loss_of(mll).item()
    with autokern.enabled(), by("tasks"):
        assert loss_of(mll).item() == pytest.approx(expected, rel=1e-6)


def test_more_values_than_stock_factorises():
    mll = made(n=410, tasks=2)
    (x,), y = mll.model.train_inputs, mll.model.train_targets
    expected = torch.autograd.grad(mll(mll.model(x), y), list(mll.parameters()))
    before = count("task_log_prob", "arrays")
    with autokern.enabled():
        found = torch.autograd.grad(mll(mll.model(x), y), list(mll.parameters()))
        assert count("task_log_prob", "arrays") == before + 1
        with gpytorch.settings.cg_tolerance(3.0):  # an order to iterate
            mll(mll.model(x), y)
        assert count("task_log_prob", "arrays") == before + 1
    agree(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("n", "leaf"), [(0, 8), (1, 8), (8, 8), (9, 8), (131, 8), (200, 64), (257, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_an_inverse_by_products_is_as_exact_as_lapacks(n, leaf, dtype, batch):
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(*batch, n, n, dtype=torch.float64, generator=generator).to(dtype)
    covariance = rows @ rows.mT / max(n, 1) + 0.1 * torch.eye(n, dtype=dtype)
    lower = torch.linalg.cholesky(covariance)  # column-major
    assert lower.is_contiguous() is (n < 2)
    found = [factors.inverted_by_products(of, leaf) for of in (lower.contiguous(), lower.clone())]
    truth, usual = torch.linalg.inv(lower.double() @ lower.double().mT), torch.cholesky_inverse(lower)
    for one in found:
        assert one.shape == lower.shape
        assert (one - one.mT).norm() <= 10 * torch.finfo(dtype).eps * one.norm()  # blocks on the diagonal are products
        assert (one - truth).norm() <= 2 * (usual - truth).norm() + 1e-15
    roots = [factors.triangle_inverted(of) for of in (lower, lower.contiguous(), lower.clone().requires_grad_())]
    exact = torch.linalg.inv(lower.double())
    by_solve = torch.linalg.solve_triangular(lower, torch.eye(n, dtype=dtype).expand_as(lower), upper=False)
    assert [root.requires_grad for root in roots] == [False, False, True]
    for root in roots:
        assert torch.equal(root, root.tril())
        assert (root - exact).norm() <= 2 * (by_solve - exact).norm() + 1e-15


@pytest.mark.parametrize("leaf", [8, 64])
def test_autocast_around_a_backward_pass_rounds_no_inverse_by_products(leaf):
    rows = torch.rand(2, 40, 40, generator=torch.Generator().manual_seed(0))
    lower = torch.linalg.cholesky(rows @ rows.mT + torch.eye(40))
    expected = factors.inverted_by_products(lower.clone(), leaf)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(factors.inverted_by_products(lower.clone(), leaf), expected)
