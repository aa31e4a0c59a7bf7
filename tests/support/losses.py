"""Models whose marginal likelihoods are recorded and replayed, and their training."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import GammaPrior
from support.outcomes import judged

import autokern
from autokern.core.replay import recording
from autokern.hooks import gpytorch as hooks
from autokern.hooks import install
from autokern.hooks.later import repeated

DOUBLE = torch.float64


def at_once(monkeypatch):
    """Record at once, and serve whatever it takes."""
    monkeypatch.setattr(hooks, "_ENOUGH", 0.0)
    monkeypatch.setattr(hooks, "_ENOUGH_VARIATIONAL", 0.0)
    monkeypatch.setattr(recording, "_IN_CACHE", 0)  # results share memory
    for name, value in {"_GAIN": float("inf"), "_histories": {}}.items():
        monkeypatch.setattr(repeated, name, value)


class Own(Kernel):
    """A kernel of the user's: the library's RBF to a power."""

    has_lengthscale = True

    def __init__(self, **options):
        super().__init__(**options)
        self.register_parameter("raw_power", torch.nn.Parameter(torch.zeros(1)))
        self.register_constraint("raw_power", gpytorch.constraints.Positive())

    def forward(self, x1, x2, diag=False, **params):
        power = self.raw_power_constraint.transform(self.raw_power)
        distance = self.covar_dist(x1 / self.lengthscale, x2 / self.lengthscale, diag=diag, square_dist=True)
        return torch.exp(-0.5 * distance).pow(power)


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel, mean, kind=MultivariateNormal, features=None):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module, self.kind, self.features = mean, kernel, kind, features

    def forward(self, x):
        x = x if self.features is None else self.features(x)
        return self.kind(self.mean_module(x), self.covar_module(x))


def points(n=12, d=2, dtype=DOUBLE):
    return torch.rand(n, d, dtype=dtype, generator=torch.Generator().manual_seed(3))


def single(kernel=None, mean=None, dtype=DOUBLE, likelihood=None, kind=ExactMarginalLogLikelihood, features=None):
    x = points(dtype=dtype)
    y = (5 * x).sin().sum(-1)
    torch.manual_seed(0)
    likelihood = likelihood or GaussianLikelihood(noise_prior=GammaPrior(2.0, 5.0))
    model = Model(x, y, likelihood, kernel or ScaleKernel(Own()), mean or ConstantMean(), features=features).to(dtype)
    return kind(model.likelihood, model)


def replays():
    return autokern.stats().get("optimised function", {}).get("replay", 0)


def once(change, when=6):
    """A change of a marginal likelihood at one step of its training."""
    return lambda mll, at: change(mll) if at == when else None


def as_library(served=0, **tolerance):
    """Let a test return the same with replays, at least so many of them, as by the library."""

    def judge(run, _):
        theirs, before = run(), replays()
        with install.enabled():
            ours = run()
        assert replays() - before >= served
        torch.testing.assert_close(ours, theirs, **tolerance)

    return judged(judge)


def step(mll, optimizer=None, change=None, at=None):
    if change is not None:
        change(mll, at)
    optimizer.zero_grad()
    loss = -mll(mll.model(*mll.model.train_inputs), mll.model.train_targets)
    loss.backward()
    optimizer.step()
    return [loss.item(), *(p.grad.clone() for p in mll.parameters() if p.grad is not None)]


def trained(make, steps=12, change=None):
    """Return losses and gradients of some steps of training."""
    torch.manual_seed(0)
    mll = make()
    optimizer = torch.optim.Adam(mll.parameters(), lr=0.05)
    return [step(mll, optimizer, change, at) for at in range(steps)]


def same(ours, theirs, rtol=1e-10):
    for one, other in zip(ours, theirs, strict=True):
        assert one[0] == pytest.approx(other[0], rel=rtol)
        size = max(float(b.abs().max()) for b in other[1:])
        for a, b in zip(one[1:], other[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * size)


def called(mll):
    prior = mll.model(*mll.model.train_inputs)
    return mll(prior, mll.model.train_targets), prior
