"""Models that no hook serves: a step costs few questions, and is stock's to the last bit."""

from __future__ import annotations

import copy

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import RBFKernel, RBFKernelGrad, ScaleKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood

import autokern
from autokern.core.releases.known import Relied
from autokern.hooks import install
from autokern.model.libraries import prediction

DTYPES = [torch.float32, torch.float64]


class Derivatives(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMeanGrad()
        self.covar_module = ScaleKernel(RBFKernelGrad())

    def forward(self, x):
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


class Own(RBFKernel):
    """A kernel of the user's."""


class Batch(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        batch = torch.Size([2])
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        self.covar_module = ScaleKernel(Own(batch_shape=batch), batch_shape=batch)

    def forward(self, x):
        single = MultivariateNormal(self.mean_module(x), self.covar_module(x))
        return MultitaskMultivariateNormal.from_batch_mvn(single)


def stepped(mll, x, y):
    """Return the loss, its gradients, and how often the hooks asked whether all is known."""
    mll.zero_grad()
    with pytest.MonkeyPatch.context() as patching:
        asked, holds = [], Relied.holds
        patching.setattr(Relied, "holds", lambda self: asked.append(self) or holds(self))
        loss = -mll(mll.model(x), y)
        loss.backward()
    return loss.detach(), [p.grad.clone() for p in mll.parameters()], len(asked)


@pytest.mark.parametrize("kind", [Derivatives, Batch])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_of_a_model_that_no_hook_serves(kind, dtype):
    x = torch.linspace(0.0, 5.0, 12, dtype=dtype).unsqueeze(-1)
    y = torch.cat([x.sin(), x.cos()], -1)
    likelihood = MultitaskGaussianLikelihood(num_tasks=2).to(dtype)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, kind(x, y, likelihood).to(dtype))
    loss, gradients, _ = stepped(copy.deepcopy(mll), x, y)
    with autokern.enabled(), autokern.using(force={"kernel_matrix": "stock"}):
        stepped(mll, x, y)
        found, slopes, asked = stepped(mll, x, y)
    assert torch.equal(found, loss)
    assert all(torch.equal(one, other) for one, other in zip(slopes, gradients, strict=True))
    assert asked <= 5


@pytest.mark.parametrize("kind", [Derivatives, Batch])
@pytest.mark.parametrize("fast", [True, False])
def test_a_prediction_that_no_hook_serves(kind, fast):
    """What predictions rely on is hundreds of functions: the first look at them takes longer than the prediction."""
    x = torch.linspace(0.0, 5.0, 12).unsqueeze(-1)
    y = torch.cat([x.sin(), x.cos()], -1)
    likelihood = MultitaskGaussianLikelihood(num_tasks=2).eval()
    model = kind(x, y, likelihood).eval()

    def predicted(model):
        with torch.no_grad(), gpytorch.settings.fast_pred_var(fast):
            found = [model(x[:k] + 0.1) for k in (3, 5)]
            return [t for one in found for t in (one.mean, one.covariance_matrix)]

    expected = predicted(copy.deepcopy(model))
    with autokern.enabled(), pytest.MonkeyPatch.context() as patching:
        asked, holds = [], Relied.holds
        patching.setattr(Relied, "holds", lambda self: asked.append(self) or holds(self))
        found = predicted(model)
    assert not any(one is prediction for one in asked)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_an_idle_hook_asks_nothing(monkeypatch):
    kernel, x = RBFKernel(), torch.rand(5, 2)
    monkeypatch.setattr(Relied, "holds", lambda self: pytest.fail("asked"))
    with autokern.enabled():
        kernel.covar_dist(x1=x, x2=x)
        kernel.covar_dist(x, x, True, False)


def test_a_hook_that_asks_by_itself_takes_all_that_its_release_takes():
    """One with arguments that the hook does not know is asked first whether all is known (T14 passes such ones)."""

    def hooked(self, value):
        return value

    def newer(self, value, anew=None):
        return value

    assert install._takes_all(hooked, hooked)
    assert not install._takes_all(hooked, newer)
    assert not install._takes_all(hooked, lambda self, *values: values)
    assert not install._takes_all(hooked, lambda self: self), "it dropped one"
    assert not install._takes_all(hooked, lambda self, other: other), "it renamed one"
    assert not install._takes_all(hooked, lambda self, value=None: value), "it needs one no more"
    assert not install._takes_all(lambda self, value, **kwargs: value, lambda self, **kwargs: kwargs)
    assert install._takes_all(lambda self, *args, **kwargs: args, newer)
