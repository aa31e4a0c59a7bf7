"""Kernels and small exact models for the samples of ops."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import AdditiveKernel, Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.models import ExactGP
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from gpytorch.priors import LogNormalPrior

from autokern.core.problem import Problem
from autokern.kernels.family import family
from autokern.ops._problems import device_of, iterates, random_matrix


def kernel_of(problem: Problem, generator: torch.Generator) -> Kernel:
    """Return a sum of scaled kernels of the variant's families, with ARD unless the variant has the word `iso`."""
    batch = torch.Size([problem.batch]) if problem.batch > 1 else torch.Size()
    words = problem.variant.split("/")
    options = {"batch_shape": batch, **({} if "iso" in words else {"ard_num_dims": problem.d})}

    def scaled(name: str) -> Kernel:
        base = family(name).sampled(**options)
        drawn = torch.rand(base.lengthscale.shape, generator=generator, device="cpu")
        base.lengthscale = drawn.to(base.lengthscale.device) * 0.5 + 0.75 * problem.d**0.5
        return ScaleKernel(base, batch_shape=batch)

    total = functools.reduce(operator.add, map(scaled, words[0].split("+")))
    return total.to(dtype=getattr(torch, problem.dtype), device=device_of(problem))


def trained(problem: Problem, generator: torch.Generator) -> Any:
    """Return the strategy of a model of `n` points in `d` dimensions; where stock iterates, trials have no caches."""
    like: dict[str, Any] = {"dtype": getattr(torch, problem.dtype), "device": device_of(problem)}
    kernel = ScaleKernel(MaternKernel(2.5) if "line" in problem.words else RBFKernel(ard_num_dims=problem.d))
    kernel.base_kernel.lengthscale = 0.5 * problem.d**0.5
    likelihood = GaussianLikelihood()
    likelihood.noise = 0.01
    graph = "theta" in problem.grad.split("/")
    for module in (kernel, likelihood):
        module.to(**like).eval().requires_grad_(graph and module is kernel)  # caches detach the noise
    single = problem.replace(batch=1)
    x = random_matrix(single, generator, problem.n, problem.d)
    y = x.sum(-1).sin() + 0.1 * random_matrix(single, generator, problem.n)
    prior = MultivariateNormal(torch.zeros_like(y), LazyEvaluatedKernelTensor(x, x, kernel=kernel))
    strategy = DefaultPredictionStrategy([x], prior, y, likelihood)
    strategy.cold = iterates(problem)
    return strategy


class _Model(ExactGP):  # type: ignore[misc]
    def __init__(self, x: torch.Tensor, y: torch.Tensor, kernel: Kernel) -> None:
        batch = y.shape[:-1]
        likelihood = GaussianLikelihood(noise_prior=LogNormalPrior(-4.0, 1.0), batch_shape=batch)
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = ConstantMean(batch_shape=batch), kernel

    def forward(self, x: torch.Tensor) -> MultivariateNormal:
        mean = self.mean_module(x)
        covariance = self.covar_module(x)
        return MultivariateNormal(mean, covariance)


def objective_model(problem: Problem, generator: torch.Generator, priors: bool = True) -> ExactGP:
    """Return a model in training mode, of `n` points in `d` dimensions, possibly batched, with BoTorch's priors."""
    x = random_matrix(problem, generator, problem.n, problem.d)
    y = x.sum(-1).sin() + 0.1 * random_matrix(problem, generator, problem.n)
    kernel = kernel_of(problem, generator)
    scales = kernel.kernels if type(kernel) is AdditiveKernel else (kernel,)
    for scaled in scales if priors else ():
        base = scaled.base_kernel
        prior = LogNormalPrior(2**0.5 + 0.5 * math.log(problem.d), 3**0.5)
        base.register_prior("lengthscale_prior", prior, base._lengthscale_param, base._lengthscale_closure)
    return _Model(x, y, kernel).to(x)


def prior_of(model: ExactGP) -> MultivariateNormal:
    """Return a model's prior, lazy even while another thread runs a kernel, when gpytorch evaluates eagerly."""
    (x,) = model.train_inputs
    return MultivariateNormal(model.mean_module(x), LazyEvaluatedKernelTensor(x, x, kernel=model.covar_module))
