"""Kernels and small exact models for the samples of ops, and what ops on prediction strategies have in common."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy

from autokern.core.problem import Problem
from autokern.kernels import family
from autokern.ops._shared import device_of, dtype_of, iterates, random_matrix

__all__ = ["Trained", "kernel_of", "trained"]


def kernel_of(problem: Problem, generator: torch.Generator) -> Kernel:
    """Return a sum of scaled kernels of the families that a variant names first, with ARD unless it says `iso`."""
    batch = torch.Size([problem.batch]) if problem.batch > 1 else torch.Size()
    words = problem.variant.split("/")
    options = {"ard_num_dims": None if "iso" in words else problem.d, "batch_shape": batch}
    total: Kernel | None = None
    for name in words[0].split("+"):
        base = family(name).sampled(**options)
        base.lengthscale = torch.rand(base.lengthscale.shape, generator=generator) * 0.5 + 0.75 * problem.d**0.5
        one = ScaleKernel(base, batch_shape=batch)
        total = one if total is None else total + one
    assert total is not None
    return total.to(dtype=dtype_of(problem), device=device_of(problem))


class Trained(NamedTuple):
    """A strategy as a fitted model has it, its kernel, and its training points and targets."""

    strategy: DefaultPredictionStrategy
    kernel: Kernel
    x: torch.Tensor
    y: torch.Tensor


def trained(problem: Problem, generator: torch.Generator) -> Trained:
    """Return a model of `n` points in `d` dimensions; its caches are made anew for each trial where stock iterates."""
    like: dict[str, Any] = {"dtype": dtype_of(problem), "device": device_of(problem)}
    kernel = ScaleKernel(RBFKernel(ard_num_dims=problem.d))
    kernel.base_kernel.lengthscale = 0.5 * problem.d**0.5
    likelihood = GaussianLikelihood()
    likelihood.noise = 0.01
    graph = "theta" in problem.grad.split("/")
    for module in (kernel, likelihood):
        module.to(**like).eval().requires_grad_(graph and module is kernel)  # noise enters by detached caches only
    single = problem.replace(batch=1)
    x = random_matrix(single, generator, problem.n, problem.d)
    y = x.sum(-1).sin() + 0.1 * random_matrix(single, generator, problem.n)
    prior = MultivariateNormal(torch.zeros_like(y), LazyEvaluatedKernelTensor(x, x, kernel=kernel))
    strategy = DefaultPredictionStrategy([x], prior, y, likelihood)
    strategy.cold = iterates(problem)
    return Trained(strategy, kernel, x, y)
