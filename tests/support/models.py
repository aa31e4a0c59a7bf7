"""The exact model that most tests need: any kernel, mean and likelihood, and a forward as the tutorials write it."""

import gpytorch
import torch
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


def points(*shape, d=2, seed=0, dtype=torch.float64):
    """Points in the unit cube, the same in both precisions."""
    return torch.rand(*shape, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def definite(*shape, seed=0, dtype=torch.float64):
    """Positive definite matrices of a batch shape and a size."""
    a = torch.randn(*shape, shape[-1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (a @ a.mT / shape[-1] + torch.eye(shape[-1], dtype=torch.float64)).to(dtype)


def rough(n, dtype=torch.float64, noise=1e-2, seed=0):
    """One of a sine and a slope, with a short lengthscale, of which iterations are long."""
    x = points(n, dtype=dtype, seed=seed)
    model = ExactModel(x, (6 * x[:, 0]).sin() + x[:, 1], ScaleKernel(MaternKernel(1.5))).to(dtype)
    model.likelihood.noise, model.covar_module.base_kernel.lengthscale = noise, 0.3
    return model
