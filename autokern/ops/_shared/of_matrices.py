"""What `dense_log_prob` and `task_log_prob` share: the log density of a Gaussian whose covariances are matrices.

Arguments: ``forward, *tensors``: covariances, noise, mean and value. `forward` computes the density from them with the
library's operators, or from operators that it holds. Gradients must be required.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch

from autokern.core.problem import Problem
from autokern.density import matrix_density
from autokern.ops._shared.problems import OpOfParts, alike, is_ours, matrix_problem
from autokern.system.threads import one_thread

_MOST, _MOST_TASKS = 1000, 32
"""Numbers of points and tasks above which one thread is too slow."""
Forward = Callable[..., torch.Tensor]


class OfMatrices(OpOfParts):
    nesting = 3
    most: int  # points times tasks up to which `arrays` needs no measurement
    quick: tuple[tuple[int, int], ...]  # points and tasks of the grid, no tasks for a single output
    full: tuple[tuple[int, int], ...]  # more of them
    matrix: Callable[..., torch.Tensor]  # of the covariances and the noise

    @abc.abstractmethod
    def tasks(self, *tensors: torch.Tensor) -> int | None:
        """Return the number of tasks, 0 for a single output, and None for shapes that the op does not serve."""

    def key(self, forward: Forward, *tensors: Any) -> Any:
        if not isinstance(tensors[-1], torch.Tensor):
            return None
        read = ((t.__class__, t.shape, t.dtype, t.device, t.requires_grad) for t in tensors)
        return *read, torch.is_grad_enabled()

    def problem_of(self, forward: Forward, *tensors: torch.Tensor) -> Problem | None:
        k, wanted = tensors[0], torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        served = wanted and k.dim() == 2 and is_ours(k) and alike(*tensors)
        tasks = self.tasks(*tensors) if served else None
        return None if tasks is None else matrix_problem(self.name, k, square=True, d=tasks, grad="a")

    def reference(self, forward: Forward, *tensors: torch.Tensor) -> torch.Tensor:
        return matrix_density.plain(self.matrix, *tensors)

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        sizes = self.quick + self.full * (level == "full")
        return [Problem(op=self.name, m=n, n=n, d=t, dtype=dtype, device=device, grad="a") for n, t in sizes]

    def small(self, problem: Problem) -> bool:
        return problem.n * max(1, problem.d) <= self.most and _unsupported(problem) is None


def _unsupported(problem: Problem) -> str | None:
    few = problem.device == "cpu" and problem.n <= _MOST and problem.d <= _MOST_TASKS
    return None if few else f"for {_MOST} points and {_MOST_TASKS} tasks at most on the CPU"


def register(op: OfMatrices, log_prob: Callable[..., torch.Tensor | None], accuracy: str) -> None:
    """Register the candidates of an op; `log_prob` computes the density by arrays, None if that fails."""

    @op.candidate("stock", memory=lambda p: (8 if p.d else 7) * p.itemsize * (p.n * max(1, p.d)) ** 2)
    def stock(forward: Forward, *tensors: torch.Tensor) -> torch.Tensor:
        """gpytorch's own operators, and autograd through the Cholesky factor of the whole matrix."""
        return forward(*tensors)

    @op.candidate("arrays", accuracy=accuracy, unsupported=_unsupported)
    def arrays(forward: Forward, *tensors: torch.Tensor) -> torch.Tensor:
        """NumPy and LAPACK in float64, one factor of the points (per task), and no autograd between the tensors."""
        with one_thread:
            found = log_prob(*tensors)
        return forward(*tensors) if found is None else found
