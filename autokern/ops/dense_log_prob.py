"""The Op `dense_log_prob`: the log density of a Gaussian whose covariance is a matrix plus noise, with gradients.

Arguments: ``forward, k, noise, mean, value``: `k` ``(n, n)`` is a covariance that the library forms as a matrix (for
example of a user's kernel, or of a product of kernels), without its noise ``(1,)`` or ``(n,)``; mean and value are
``(n,)``. Stock factorises the matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import AddedDiagLinearOperator, ConstantDiagLinearOperator, DenseLinearOperator

from autokern.core.problem import Features, Problem
from autokern.density import matrix_density
from autokern.model import originals
from autokern.ops._shared.of_matrices import OfMatrices, register
from autokern.ops._shared.problems import positive_definite, random_matrix


class _DenseLogProb(OfMatrices):
    name = "dense_log_prob"
    summary = "log density of a Gaussian process prior with noise, of a covariance that is a matrix"
    most = 150
    quick = (20, 0), (100, 0), (50, 0), (200, 0)
    full = (10, 0), (35, 0), (70, 0), (140, 0), (300, 0), (450, 0), (700, 0)
    matrix = staticmethod(matrix_density.noisy)

    def tasks(self, *tensors: torch.Tensor) -> int | None:
        n, (_, noise, *others) = len(tensors[0]), tensors
        return 0 if noise.shape in ((1,), (n,)) and all(t.shape == (n,) for t in others) else None

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        k = positive_definite(problem, generator).requires_grad_()
        value = random_matrix(problem, generator, problem.n)
        return _by_operators, k, k.new_full((1,), 0.1).requires_grad_(), torch.zeros_like(value).requires_grad_(), value

    def features(self, problem: Problem) -> Features:
        elements = float(problem.n**2)
        return Features(100.0, elements * problem.n * 4 / 3, 20.0 * elements * problem.itemsize)

    def memory(self, problem: Problem) -> int:
        return 5 * 8 * problem.n**2


def _by_operators(k: torch.Tensor, noise: torch.Tensor, mean: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    covariance = AddedDiagLinearOperator(DenseLinearOperator(k), ConstantDiagLinearOperator(noise, len(k)))
    density: torch.Tensor = originals.log_prob(MultivariateNormal(mean, covariance), value)
    return density


DENSE_LOG_PROB = _DenseLogProb()
register(DENSE_LOG_PROB, matrix_density.log_prob, "same")
