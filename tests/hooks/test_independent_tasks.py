"""Tasks that are independent: one batch of densities in place of a matrix of all points and tasks."""

from unittest import mock

import gpytorch
import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from support.losses import Model, independent
from support.models import loss_of
from support.outcomes import as_stock, assert_close, count

import autokern

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
    near(ours, loss, 1e-10 if exact else 1e-4)
    for of, expected, digits in ((slopes, first, 1e-8), (curved, second, 1e-6)):
        for one, other in zip(of, expected, strict=True):
            if exact or of is slopes:
                near(one, other, digits if exact else 2e-2)


def near(one, other, digits):
    torch.testing.assert_close(one, other, rtol=digits, atol=digits * max(float(other.detach().abs().max()), 1e-3))


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
