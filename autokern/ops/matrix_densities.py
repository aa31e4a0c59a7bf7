"""The Ops `dense_log_prob` and `task_log_prob`: the log density of a Gaussian whose covariances are matrices.

Arguments: ``forward, *tensors``. `forward` computes the density from the tensors with the library's operators, or from
operators that it holds. Gradients must be required.

`dense_log_prob` takes ``k, noise, mean, value``: `k` ``(n, n)`` is a covariance that the library forms as a matrix (for
example of a user's kernel), without its noise ``(1,)`` or ``(n,)``; mean and value are ``(n,)``.

`task_log_prob` takes ``kx, kt, noise, mean, value``: the covariances `kx` ``(n, n)`` of points and `kt` ``(t, t)`` of
tasks, the noise ``(t, t)`` of the tasks at each point; `mean` and `value` are ``(n, t)``. The joint covariance is
``kx (x) kt + I (x) noise``. A problem's `d` is the number of tasks, 0 for a single output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import (
    AddedDiagLinearOperator,
    ConstantDiagLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    KroneckerProductDiagLinearOperator,
    KroneckerProductLinearOperator,
)

from autokern.core.problem import Features, Problem
from autokern.density import matrices
from autokern.model import libraries
from autokern.ops._candidates import OpOfParts
from autokern.ops._problems import alike, is_ours, matrix_problem, positive_definite, random_matrix
from autokern.system.threads import one_thread

_MOST, _MOST_TASKS = 1000, 128  # numbers of points and tasks above which one thread is too slow
Forward = Callable[..., torch.Tensor]


class _OfMatrices(OpOfParts):
    nesting = 3
    most: int  # points times tasks up to which `arrays` needs no measurement
    quick: tuple[tuple[int, int], ...]  # points and tasks of the grid, no tasks for a single output
    full: tuple[tuple[int, int], ...]  # more of them
    work: tuple[float, float, int]  # calls and passes of stock, and the matrices of points that `arrays` holds
    matrix: Callable[..., torch.Tensor]  # of the covariances and the noise
    evaluate: Callable[..., Any]
    tasks: Callable[..., int | None]  # the number of tasks, 0 for a single output, None for other shapes

    def key(self, forward: Forward, *tensors: Any) -> Any:
        if not isinstance(tensors[-1], torch.Tensor):
            return None
        return *((t.__class__, t.shape, t.dtype, t.device, t.requires_grad) for t in tensors), torch.is_grad_enabled()

    def problem_of(self, forward: Forward, *tensors: torch.Tensor) -> Problem | None:
        k, wanted = tensors[0], torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        served = wanted and k.dim() == 2 and is_ours(k) and alike(*tensors)
        tasks = self.tasks(*tensors) if served else None
        return None if tasks is None else matrix_problem(self.name, k, square=True, d=tasks, grad="a")

    def reference(self, forward: Forward, *tensors: torch.Tensor) -> torch.Tensor:
        return matrices.plain(self.matrix, *tensors)

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        sizes = self.quick + self.full * (level == "full")
        return [Problem(op=self.name, m=n, n=n, d=t, dtype=dtype, device=device, grad="a") for n, t in sizes]

    def features(self, problem: Problem) -> Features:
        calls, passes, _ = self.work
        rows = problem.n * max(1, problem.d)
        elements = float(rows**2)
        return Features(calls, elements * rows * 4 / 3, passes * elements * problem.itemsize)

    def memory(self, problem: Problem) -> int:
        return self.work[2] * 8 * problem.n**2

    def small(self, problem: Problem) -> bool:
        return problem.n * max(1, problem.d) <= self.most and _unsupported(problem) is None


def _unsupported(problem: Problem) -> str | None:
    few = problem.device == "cpu" and problem.n <= _MOST and problem.d <= _MOST_TASKS
    return None if few else f"only for {_MOST} points and {_MOST_TASKS} tasks at most on the CPU"


def _register(op: _OfMatrices, accuracy: str) -> None:
    @op.candidate("stock", memory=lambda p: (8 if p.d else 7) * p.itemsize * (p.n * max(1, p.d)) ** 2)
    def stock(forward: Forward, *tensors: torch.Tensor) -> torch.Tensor:
        """gpytorch's own operators, and autograd through the Cholesky factor of the whole matrix."""
        return forward(*tensors)

    @op.candidate("arrays", accuracy=accuracy, unsupported=_unsupported, threads=1)
    def arrays(forward: Forward, *tensors: torch.Tensor) -> torch.Tensor:
        """NumPy and LAPACK in float64, one factor of the points (per task), and no autograd between the tensors."""
        with one_thread:
            found = matrices.log_prob(op.evaluate, op.matrix, *tensors)
        return forward(*tensors) if found is None else found


class _DenseLogProb(_OfMatrices):
    name = "dense_log_prob"
    summary = "log density of a Gaussian process prior with noise, of a covariance that is a matrix"
    most, work = 150, (100.0, 20.0, 5)
    quick = (20, 0), (100, 0), (50, 0), (200, 0)
    full = (10, 0), (35, 0), (70, 0), (140, 0), (300, 0), (450, 0), (700, 0)
    matrix, evaluate = staticmethod(matrices.noisy), staticmethod(matrices.of_one)

    def tasks(self, *tensors: torch.Tensor) -> int | None:
        n, (_, noise, *others) = len(tensors[0]), tensors
        return 0 if noise.shape in ((1,), (n,)) and all(t.shape == (n,) for t in others) else None

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        k = positive_definite(problem, generator).requires_grad_()
        value = random_matrix(problem, generator, problem.n)
        return _by_matrix, k, k.new_full((1,), 0.1).requires_grad_(), torch.zeros_like(value).requires_grad_(), value


def _by_matrix(k: torch.Tensor, noise: torch.Tensor, mean: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    covariance = AddedDiagLinearOperator(DenseLinearOperator(k), ConstantDiagLinearOperator(noise, len(k)))
    return libraries.log_prob(MultivariateNormal(mean, covariance), value)


DENSE_LOG_PROB = _DenseLogProb()
_register(DENSE_LOG_PROB, "same")


class _TaskLogProb(_OfMatrices):
    name = "task_log_prob"
    summary = "log density of several tasks observed at the same points"
    most, work = 3000, (500.0, 30.0, 7)
    quick = (20, 2), (100, 2), (50, 4), (200, 2)
    full = (10, 2), (50, 2), (300, 2), (100, 4), (400, 2)
    matrix, evaluate = staticmethod(matrices.kronecker), staticmethod(matrices.of_tasks)

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
        return _by_tasks, *(a.requires_grad_() for a in (kx, kt, noise, torch.zeros_like(value))), value


def _by_tasks(
    kx: torch.Tensor, kt: torch.Tensor, noise: torch.Tensor, mean: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    eye = DiagLinearOperator(kx.new_ones(len(kx)))
    added = KroneckerProductDiagLinearOperator(eye, DiagLinearOperator(noise.diagonal()))
    product = KroneckerProductLinearOperator(kx.contiguous(), kt.contiguous())  # the operator takes views
    return libraries.log_prob(MultivariateNormal(mean.flatten(), product + added), value.flatten())


TASK_LOG_PROB = _TaskLogProb()
_register(TASK_LOG_PROB, "better")
