"""The exact model that most tests need: any kernel, mean and likelihood, and a forward as the tutorials write it."""

from __future__ import annotations

import gpytorch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood


class ExactModel(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel=None, likelihood=None, mean=None):
        super().__init__(x, y, likelihood or GaussianLikelihood())
        self.mean_module, self.covar_module = mean or ConstantMean(), kernel or ScaleKernel(RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def loss_of(mll):
    return -mll(mll.model(*mll.model.train_inputs), mll.model.train_targets)


def step(model):
    """Loss and gradients of a step of training."""
    model.train().zero_grad()
    loss = loss_of(ExactMarginalLogLikelihood(model.likelihood, model))
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def rough_model(x, y):
    """One of which iterations are long."""
    return ExactModel(x, y, ScaleKernel(MaternKernel(1.5)))
