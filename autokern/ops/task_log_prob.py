"""The Op `task_log_prob`: the log density of several tasks that are observed at the same points, with gradients.

Arguments: ``forward, kx, kt, noise, mean, value``. `forward` computes the density from the others with the library's
operators (or from operators that it holds); `kx` ``(n, n)`` and `kt` ``(t, t)`` are the covariances of points and
tasks, `noise` ``(t, t)`` is that of the tasks' noise at each point; `mean` and `value` are ``(n, t)``. The joint
covariance is ``kx (x) kt + I (x) noise``.

Contract: the value is that of a matrix within ``4 n t eps max |K|`` of K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator, KroneckerProductLinearOperator
from linear_operator.operators import KroneckerProductDiagLinearOperator as KroneckerDiagonal

from autokern.core.arguments import in_float64
from autokern.core.problem import Features, Problem
from autokern.gp import kronecker, originals
from autokern.ops._shared import (
    EPS,
    OpOfParts,
    alike,
    density_error,
    is_ours,
    matrix_problem,
    positive_definite,
    random_matrix,
)
from autokern.system.blas import one_thread

_MOST = 1000
"""Number of points above which one thread is too slow."""
_MOST_TASKS = 32
_SMALL = 800
"""Points times tasks up to which `arrays` needs no measurement: gpytorch factorises the joint matrix there."""
Forward = Callable[..., torch.Tensor]


class _TaskLogProb(OpOfParts):
    name = "task_log_prob"
    summary = "log density of several tasks observed at the same points"
    contract = "the value is that of a matrix within 4 n t eps max|K| of K"
    nesting = 3

    def key(self, forward: Forward, *tensors: torch.Tensor) -> Any:
        return tuple((t.__class__, t.shape, t.dtype, t.device, t.requires_grad) for t in tensors), (
            torch.is_grad_enabled()
        )

    def problem_of(self, forward: Forward, *tensors: torch.Tensor) -> Problem | None:
        kx, kt, *_ = tensors
        if kx.dim() != 2 or kt.dim() != 2 or not is_ours(kx, kt) or not torch.is_grad_enabled():
            return None
        n, t = len(kx), len(kt)
        shapes = [(n, n), (t, t), (t, t), (n, t), (n, t)]
        same = alike(*tensors) and [tuple(a.shape) for a in tensors] == shapes
        if not same or not any(a.requires_grad for a in tensors):
            return None
        return matrix_problem(self.name, kx, d=t, grad="a")

    def reference(self, forward: Forward, *tensors: torch.Tensor) -> torch.Tensor:
        return kronecker.plain(*tensors)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        n, t = problem.n, problem.d
        kx, kt = positive_definite(problem, generator), positive_definite(problem.replace(n=t), generator)
        deviations = random_matrix(problem, generator, t).square().add_(0.1).requires_grad_()
        mean = torch.zeros_like(random_matrix(problem, generator, n, t)).requires_grad_()
        value = random_matrix(problem, generator, n, t)
        kx.requires_grad_()
        kt.requires_grad_()
        with torch.enable_grad():
            noise = torch.diag(deviations).detach().requires_grad_()

        return _by_operators, kx, kt, noise, mean, value

    def check(self, problem: Problem, out: Any, args: tuple[Any, ...]) -> float:
        kx, kt, noise, mean, value = (t.detach() for t in in_float64(args[1:]))
        k = kronecker.matrix(kx, kt, noise)
        return density_error(k, (value - mean).flatten(), out, 4 * len(k), EPS[problem.dtype])

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        sizes = [(20, 2), (100, 2), (50, 4), (200, 2)]
        sizes += [(10, 2), (50, 2), (300, 2), (100, 4), (400, 2)] if level == "full" else []
        return [Problem(op=self.name, m=n, n=n, d=t, dtype=dtype, device=device, grad="a") for n, t in sizes]

    def features(self, problem: Problem) -> Features:
        elements = float((problem.n * problem.d) ** 2)
        return Features(500.0, elements * problem.n * problem.d * 4 / 3, 30.0 * elements * problem.itemsize)

    def memory(self, problem: Problem) -> int:
        return 7 * 8 * problem.n**2

    def default_candidate(self, problem: Problem) -> str:
        """Return `arrays` for sizes at which stock factorises the joint matrix of all points and tasks."""
        small = problem.n * problem.d <= _SMALL and problem.d <= _MOST_TASKS
        return "arrays" if small and problem.device == "cpu" else "stock"


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


@TASK_LOG_PROB.candidate("stock", memory=lambda p: 8 * p.itemsize * (p.n * p.d) ** 2)
def stock(forward: Forward, *tensors: torch.Tensor) -> torch.Tensor:
    """gpytorch's own operators, and autograd through the matrix of all points and tasks."""
    return forward(*tensors)


def _unsupported(problem: Problem) -> str | None:
    few = problem.device == "cpu" and problem.n <= _MOST and problem.d <= _MOST_TASKS
    return None if few else f"for {_MOST} points and {_MOST_TASKS} tasks at most on the CPU"


@TASK_LOG_PROB.candidate("arrays", accuracy="better", unsupported=_unsupported)
def arrays(forward: Forward, *tensors: torch.Tensor) -> torch.Tensor:
    """One small eigendecomposition makes tasks independent; one factor of the points per task (LAPACK, float64)."""
    with one_thread:
        found = kronecker.log_prob(*tensors)
    return forward(*tensors) if found is None else found
