"""Several tasks at the same points: values, gradients and second derivatives of the matrix of all points and tasks."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import LCMKernel, LinearKernel, MaternKernel, MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, LinearMean, MultitaskMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from support.densities import agree, of_both_orders
from support.models import loss_of

import autokern
from autokern.density.gaussian import dense


def rbf():
    """The library's second derivatives of kernels without ARD are wrong."""
    return RBFKernel(ard_num_dims=2)


def matern():
    return MaternKernel(1.5, ard_num_dims=2)


class Model(gpytorch.models.ExactGP):
    interleaved = True

    def __init__(self, x, y, likelihood, kernel, mean):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = MultitaskMean(mean, num_tasks=y.shape[-1]), kernel

    def forward(self, x):
        mean, covariance = self.mean_module(x), self.covar_module(x)
        return MultitaskMultivariateNormal(mean, covariance, interleaved=self.interleaved)


def made(kernel=None, likelihood=None, mean=None, tasks=3, n=11, dtype=torch.float64, kind=Model):
    torch.manual_seed(0)
    x = torch.rand(n, 2, dtype=dtype)
    y = torch.stack([(x.sum(-1) * 3 + k).sin() for k in range(tasks)], -1) + 0.1 * torch.randn(n, tasks, dtype=dtype)
    likelihood = likelihood or MultitaskGaussianLikelihood(num_tasks=tasks)
    kernel = kernel or MultitaskKernel(rbf(), num_tasks=tasks, rank=1)
    model = kind(x, y, likelihood, kernel, mean or ConstantMean())
    return ExactMarginalLogLikelihood(likelihood, model).to(dtype).train()


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


def served():
    return autokern.stats().get("task_log_prob", {})


def by(name):
    return autokern.using(force={"task_log_prob": name})


MODELS = {
    "usual": made,
    "full rank": lambda: made(MultitaskKernel(matern(), num_tasks=3, rank=3)),
    "linear": lambda: made(MultitaskKernel(ScaleKernel(rbf()) + LinearKernel(), num_tasks=3), mean=LinearMean(2)),
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
    with autokern.enabled(), by("arrays"):
        before, loss = served().get("arrays", 0), loss_of(mll)
        found = [loss.detach(), *of_both_orders(loss, list(mll.parameters()))]
        loss_of(mll).backward()
        assert served()["arrays"] == before + 2
    expected, slopes = truth(mll), [p.grad for p in mll.parameters()]
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-10)
    agree(found, expected, rtol=1e-6, atol=1e-7)
    agree(slopes, found[1 : 1 + len(slopes)], rtol=1e-8, atol=1e-11)


class Apart(Model):
    interleaved = False


OTHERS = {
    "a sum of products": lambda: made(LCMKernel([rbf(), matern()], num_tasks=3, rank=1)),
    "not interleaved": lambda: made(MultitaskKernel(rbf(), num_tasks=3), kind=Apart),
    "another likelihood": lambda: made(likelihood=type("Own", (MultitaskGaussianLikelihood,), {})(3)),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_other_models_run_stock(make):
    mll = make()
    expected = loss_of(mll).item()
    with autokern.enabled(), by("arrays"):
        before = served()
        assert loss_of(mll).item() == pytest.approx(expected, rel=1e-9)
        assert served() == before


@pytest.mark.filterwarnings("ignore:A not p.d.")
def test_noise_without_a_factor():
    mll = made(likelihood=MultitaskGaussianLikelihood(3, rank=1, has_global_noise=False))
    mll.model.set_train_data(targets=torch.zeros(11, 3, dtype=torch.float64))
    expected = loss_of(mll).item()
    with autokern.enabled(), by("arrays"):
        assert loss_of(mll).item() == pytest.approx(expected, rel=1e-6)


def test_more_values_than_stock_factorises():
    mll = made(n=410, tasks=2)
    (x,), y = mll.model.train_inputs, mll.model.train_targets
    expected = torch.autograd.grad(mll(mll.model(x), y), list(mll.parameters()))
    before = served().get("arrays", 0)
    with autokern.enabled():
        found = torch.autograd.grad(mll(mll.model(x), y), list(mll.parameters()))
        assert served()["arrays"] == before + 1
        with gpytorch.settings.cg_tolerance(3.0):  # an order to iterate
            mll(mll.model(x), y)
        assert served()["arrays"] == before + 1
    agree(found, expected, rtol=1e-7, atol=1e-9)
