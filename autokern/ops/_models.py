"""Small exact models for the samples of ops on prediction strategies, and what those ops have in common."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy

from autokern.ops._shared import device_of, dtype_of, iterates, random_matrix
from autokern.problem import Problem

__all__ = ["Trained", "trained"]


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
