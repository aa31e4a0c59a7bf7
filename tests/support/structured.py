"""What the tests of points with structure share: a model, its loss and gradients, and what served."""

from __future__ import annotations

import gpytorch
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood

import autokern


class Regression(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.LinearMean(x.shape[-1])
        self.covar_module = kernel
        self.to(x)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def loss_of(model):
    return ExactMarginalLogLikelihood(model.likelihood, model)(model(*model.train_inputs), model.train_targets)


def gradients(loss, model, **options):
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], **options)


def close(found, exact, rounding):
    for one, other in zip(found, exact, strict=True):
        scale = other.detach().abs().max().item() + 1e-3
        torch.testing.assert_close(one.double(), other, rtol=0, atol=rounding * scale)


def served():
    return autokern.stats().get("exact_log_prob", {})
