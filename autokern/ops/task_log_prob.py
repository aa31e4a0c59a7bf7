"""The Op `task_log_prob`: the log density of several tasks that are observed at the same points, with gradients.

Arguments: ``forward, kx, kt, noise, mean, value``. `forward` computes the density from the others with the library's
operators (or from operators that it holds); `kx` ``(n, n)`` and `kt` ``(t, t)`` are the covariances of points and
tasks, `noise` ``(t, t)`` is that of the tasks' noise at each point; `mean` and `value` are ``(n, t)``. The joint
covariance is ``kx (x) kt + I (x) noise``.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator, KroneckerProductLinearOperator
from linear_operator.operators import KroneckerProductDiagLinearOperator as KroneckerDiagonal

from autokern.core.problem import Features, Problem
from autokern.density import matrix_density
from autokern.model import originals
from autokern.ops._shared.of_matrices import OfMatrices, register
from autokern.ops._shared.problems import positive_definite, random_matrix


class _TaskLogProb(OfMatrices):
    name = "task_log_prob"
    summary = "log density of several tasks observed at the same points"
    most = 3000
    quick = (20, 2), (100, 2), (50, 4), (200, 2)
    full = (10, 2), (50, 2), (300, 2), (100, 4), (400, 2)
    matrix = staticmethod(matrix_density.of_tasks)

    def tasks(self, *tensors: torch.Tensor) -> int | None:
        kx, kt, *others = tensors
        n, t = len(kx), kt.shape[-1] if kt.dim() else 0
        same = t > 0 and [tuple(a.shape) for a in (kt, *others)] == [(t, t), (t, t), (n, t), (n, t)]
        return t if same else None

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        n, t = problem.n, problem.d
        kx, kt = positive_definite(problem, generator), positive_definite(problem.replace(n=t), generator)
        noise = torch.diag(random_matrix(problem, generator, t).square().add_(0.1))
        value = random_matrix(problem, generator, n, t)
        leaves = (a.requires_grad_() for a in (kx, kt, noise, torch.zeros_like(value)))
        return _by_operators, *leaves, value

    def features(self, problem: Problem) -> Features:
        elements = float((problem.n * problem.d) ** 2)
        return Features(500.0, elements * problem.n * problem.d * 4 / 3, 30.0 * elements * problem.itemsize)

    def memory(self, problem: Problem) -> int:
        return 7 * 8 * problem.n**2


def _by_operators(
    kx: torch.Tensor, kt: torch.Tensor, noise: torch.Tensor, mean: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    eye = DiagLinearOperator(kx.new_ones(len(kx)))
    added = KroneckerDiagonal(eye, DiagLinearOperator(noise.diagonal()))
    product = KroneckerProductLinearOperator(kx.contiguous(), kt.contiguous())  # it takes views
    prior = MultivariateNormal(mean.flatten(), product + added)
    density: torch.Tensor = originals.log_prob(prior, value.flatten())
    return density


TASK_LOG_PROB = _TaskLogProb()
register(TASK_LOG_PROB, matrix_density.log_prob_of_tasks, "better")
