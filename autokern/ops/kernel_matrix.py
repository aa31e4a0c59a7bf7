"""The Op `kernel_matrix`: the covariance matrix of a gpytorch kernel between two sets of points.

Arguments: ``kernel, x1, x2`` as the kernel's `forward` gets them (active dimensions selected already). The op supports
all kernel trees: sums, products and scales of the families by exact type, ARD or not, batched or not.

Diagonals of ``x1 = x2`` are exact; first and second derivatives are those of the formula.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from gpytorch.kernels import Kernel
from linear_operator import to_dense

from autokern.core.op import Op, Run
from autokern.core.problem import Features, Problem
from autokern.kernels import matrix as matrices
from autokern.kernels import tree as trees
from autokern.kernels.family import known_family
from autokern.kernels.matrix import both, bytes_on
from autokern.ops._candidates import every, on_other_devices, only
from autokern.ops._problems import families, is_ours, kernel_of, kernel_problem, random_matrix

_MAIN = ("rbf", "matern12", "matern32", "matern52")


def _by_family(problem: Problem, forward: Sequence[int], with_gradients: Sequence[int], **others: int) -> int:
    """Return the bytes of the matrices at the peak of each main family; others count as the largest."""
    counts = dict(zip(_MAIN, with_gradients if problem.grad else forward, strict=True))
    counts |= others if problem.grad else {}
    each = [counts.get(name, max(counts.values())) for name in families(problem)]
    return problem.elements * problem.itemsize * (sum(each) + (len(each) > 1))


def _stock_memory(problem: Problem) -> int:
    """Return stock's bytes: one function's for one lengthscale and no gradients by points, else those of autograd."""
    others = [of for name in families(problem) if name not in _MAIN and (of := known_family(name)) is not None]
    if others:
        kept = [of.kept(problem.d) for of in others]
        most = sum(2 * k for k in kept) + 1 if problem.grad else sum(max(4, 2 * k // 3) for k in kept)
        most += 10 * (len(families(problem)) - len(others))
        return problem.elements * problem.itemsize * most
    _, points, ard = (*problem.variant.split("/"), "", "")[:3]
    if ard != "ard" and "x" not in problem.grad.split("/"):
        return _by_family(problem, (2, 2, 2, 3), (5, 5, 5, 5))
    return _by_family(problem, (2, 3, 4, 5), (5, 8, 9, 11) if points == "same" else (5, 6, 7, 10))


def _strips_memory(problem: Problem) -> int:
    """Return the bytes of the matrix, of its slopes, and of a few strips of rows, of constant size."""
    whole, name = problem.m * problem.n * problem.itemsize, problem.words[0]
    each = min(bytes_on(matrices.CACHED, problem.device), whole)
    kept = problem.grad and name in ("matern12", "matern32", "matern52")
    return whole * (2 if kept else 1) + (2 if name in _MAIN else 8 * len(families(problem))) * each


def _differences_memory(problem: Problem) -> int:
    wide = sum(2 if name == "periodic" else 1 for name in families(problem))
    return problem.elements * problem.itemsize * (2 if problem.grad else 1) * (2 * problem.d * wide + 1)


class _KernelMatrix(Op):
    name = "kernel_matrix"
    summary = "covariance matrix of two sets of points (any tree of known kernels)"

    def key(self, kernel: Kernel, x1: torch.Tensor, x2: torch.Tensor) -> Any:
        grads = torch.is_grad_enabled() and (x1.requires_grad, x2.requires_grad)
        points = (x1.__class__, x2.__class__, x1.shape, x2.shape, x1.dtype, x2.dtype, x1.device, x1 is x2)
        return (trees.key(kernel), kernel.__dict__.get("_batch_shape"), points, grads)

    def problem_of(self, kernel: Kernel, x1: torch.Tensor, x2: torch.Tensor) -> Problem | None:
        node = trees.form(kernel)
        if node is None or not is_ours(x1, x2):
            return None
        several = any((getattr(part, "ard_num_dims", None) or 1) > 1 for part in kernel.modules())
        return kernel_problem(self.name, node, kernel, x1, x2, more="/ard" if several else "/iso")

    def reference(self, kernel: Kernel, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
        return trees.dense(*both(kernel, x1, x2)[:2])

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        kernel = kernel_of(problem, generator).requires_grad_("theta" in problem.grad)
        x1 = random_matrix(problem, generator, problem.m, problem.d).requires_grad_("x" in problem.grad)
        same = "same" in problem.variant.split("/")
        return kernel, x1, x1 if same else random_matrix(problem, generator, problem.n, problem.d)

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        full = level == "full"
        sizes = [(400, 8), (100, 5), (1000, 10), (1800, 4)]
        if full:
            sizes = [(20, 5), (50, 2), (100, 8), (400, 32), (800, 10), (1500, 3), (3600, 8)]
        both, none_and_theta = ("rbf", "matern52"), ("", "theta")
        main = [Problem(op="kernel_matrix", m=n, n=n, d=d, dtype=dtype, device=device) for n, d in sizes]
        square = [p.replace(grad=g) for p in main for g in none_and_theta]
        problems = [p.replace(variant=f"{w}/same/{how}") for p in square for w in both for how in ("ard", "iso")]
        problems += [p.replace(variant=f"{w}/same/ard") for p in square for w in ("matern12", "matern32")]
        problems += [p.replace(variant=f"{w}/cross/ard", m=max(1, p.m // 3)) for p in main for w in both]
        problems += [p.replace(variant=f"{w}/cross/ard", grad="theta/x") for p in main[:4] for w in both]
        batched = [(16, 50), (128, 10)] + ([(4, 300), (64, 100), (256, 30)] if full else [])
        several = [main[0].replace(m=n, n=n, batch=b, grad=g) for b, n in batched for g in none_and_theta]
        problems += [p.replace(variant=f"{w}/same/ard") for p in several for w in both]
        rare = ("rq", "periodic") if full else ()
        return problems + [p.replace(variant=f"{w}/same/ard", grad="theta") for p in main[2:4] for w in rare]

    def features(self, problem: Problem) -> Features:
        words = problem.grad.split("/") if problem.grad else []
        each = (of.stock_passes(problem.d) if (of := known_family(name)) else 60.0 for name in families(problem))
        return Features(
            calls=10.0 * (1 + len(words)),
            flops=2.0 * problem.elements * problem.d * (1 + 2 * len(words)),
            bytes=sum(each) * problem.elements * problem.itemsize * (1 + len(words)),
        )

    def remark(self, problem: Problem) -> str:
        plain = problem.dtype == "float64" and problem.device == "cpu" and problem.batch == 1
        few = plain and trees.are_few(problem.m, problem.n, bool(problem.grad))
        return "in a model, the library serves so few points: a choice takes longer than it saves" if few else ""

    def memory(self, problem: Problem) -> int:
        if problem.batch > 1:
            return _by_family(problem, (1, 1, 2, 2), (2, 3, 3, 3), rq=7, periodic=2)
        return _by_family(problem, (1, 1, 2, 2), (1, 2, 2, 3), rq=1, periodic=1)


KERNEL_MATRIX = _KernelMatrix()


@KERNEL_MATRIX.candidate("stock", memory=_stock_memory)
def stock(kernel: Kernel, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """The kernel's own forward."""
    return to_dense(kernel.forward(x1, x2))


def _of_numbers(run: Run) -> Run:
    """Let stock serve points that are not finite: stock's expansion of squares spreads NaN to more entries."""

    @functools.wraps(run)
    def checked(kernel: Kernel, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
        numbers = all(math.isfinite(x.detach().sum().item()) for x in ((x1,) if x1 is x2 else (x1, x2)))
        return (run if numbers else stock)(kernel, x1, x2)

    return checked


@KERNEL_MATRIX.candidate("gemm")
def gemm(kernel: Kernel, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """One GEMM, epilogue in place, closed-form gradients."""
    return matrices.matrix(*both(kernel, x1, x2), "whole")


_strips_unsupported = every(
    only("strips of rows are for a single matrix", lambda p: p.batch <= 1),
    only("too few rows for strips", lambda p: p.m >= 64),
)


@KERNEL_MATRIX.candidate("tiled", unsupported=_strips_unsupported, memory=_strips_memory)
def tiled(kernel: Kernel, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """The same in strips of rows that stay in the cache."""
    return matrices.matrix(*both(kernel, x1, x2), "tiled")


@KERNEL_MATRIX.candidate(
    "broadcast",
    unsupported=only("would hold n m d elements", lambda p: p.d <= 8 and p.elements <= 10**6),
    memory=_differences_memory,
)
@_of_numbers
def broadcast(kernel: Kernel, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """All differences at once by broadcasting."""
    return KERNEL_MATRIX.reference(kernel, x1, x2)


@KERNEL_MATRIX.candidate(
    "cdist",
    unsupported=only("torch.cdist has no second derivatives", lambda p: not p.grad),
    memory=lambda p: _by_family(p, (3, 4, 5, 5), (6, 8, 9, 11)),
)
@_of_numbers
def by_cdist(kernel: Kernel, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """torch.cdist without its matrix product, then the formula."""
    return matrices.by_cdist(trees.read(kernel, x1), None if x1 is x2 else trees.read(kernel, x2).points)


on_other_devices(
    KERNEL_MATRIX, matrices.matrix, "One GEMM on the {}; the time includes all copies.", read=both, on_cpu=None
)
