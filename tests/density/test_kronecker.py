"""Several tasks at the same points: values, gradients and second derivatives of the matrix of all points and tasks."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import LCMKernel, LinearKernel, MaternKernel, MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from gpytorch.means import LinearMean
from support.densities import D, Tasks, agree, by, of_both_orders
from support.densities import of_tasks as made
from support.models import loss_of

import autokern
from autokern.density.gaussian import dense


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


def served():
    return autokern.stats().get("task_log_prob", {})


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
        before, loss = served().get("arrays", 0), loss_of(mll)
        found = [loss.detach(), *of_both_orders(loss, list(mll.parameters()))]
        loss_of(mll).backward()
        assert served()["arrays"] == before + 2
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
        before = served()
        assert loss_of(mll).item() == pytest.approx(expected, rel=1e-9)
        assert served() == before


@pytest.mark.filterwarnings("ignore:A not p.d.")
def test_noise_without_a_factor():
    mll = made(likelihood=MultitaskGaussianLikelihood(3, rank=1, has_global_noise=False))
    mll.model.set_train_data(targets=torch.zeros(11, 3, dtype=torch.float64))
    expected = loss_of(mll).item()
    with autokern.enabled(), by("tasks"):
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
