"""The candidate `keops` of `kernel_matmul`: a kernel matrix times columns by KeOps, which never holds the matrix.

The families' own formulae are compiled, for seconds, once per form, dimensions, dtype and number of columns. To keep
these few, columns are padded to few widths, and the scale of the whole tree is applied outside. Torch computes
gradients, tile by tile.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from autokern.core.problem import Problem
from autokern.kernels import embedded as forms
from autokern.kernels.matmul import matmul
from autokern.kernels.partition import Plan, usual
from autokern.kernels.tree import Node, Tree, by_formula, by_leaf, families_of, peeled
from autokern.ops._problems import needs_few
from autokern.ops.kernel_matmul import KERNEL_MATMUL, in_tiles, leaves, of_outputs
from autokern.system.keops import at_work, keops_problem

_WIDTHS = (1, 4, 16, 64)
"""Numbers of columns that are compiled; others are padded with zeros, or split into groups of 64."""
_MOST_DIMENSIONS = {"cpu": 200, "cuda": 100}


def unsupported(d: int, device: str = "cpu") -> str | None:
    """Return why KeOps cannot serve `d` dimensions (the sum over leaves) on a kind of device, None if it can.

    A thread keeps its point in registers. On a GPU they overflow at some 110 dimensions, where a product takes 50 times
    as long (gpytorch #2334). A CPU has no such limit, but KeOps computes distances one by one: as fast as a dense
    product up to 50 dimensions, 6 times slower at 200 (14 s to compile), 10 times at 400 (2 cores, n = 4000, float32).
    """
    most = _MOST_DIMENSIONS.get(device, 0)
    return None if d <= most else f"d too large for KeOps: {d} dimensions, {most} at most on {device}"


def product(tree: Tree, others: list[torch.Tensor] | None, rhs: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return ``K rhs`` by KeOps; same arguments as `products.product`, of which `plan` is unused."""
    inner, scale = peeled(tree)
    factors = [math.sqrt(abs(of.gamma)) for of, _, _ in by_leaf(inner)]
    sets = (inner.points, others or inner.points)
    points = [(z * c).contiguous() for some in sets for z, c in zip(some, factors, strict=True)]
    form = _Form(inner.node, tuple(z.shape[-1] for z in inner.points), len(inner.shapes), len(inner.weights))
    tensors = (*points, *(p.reshape(1) for p in (*inner.shapes, *inner.weights)))
    parts = [_columns(form, part, tensors) for part in rhs.split(_WIDTHS[-1], dim=-1)]
    out = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    return out if scale is None else out * scale


class _Form(NamedTuple):
    """The key of a compiled formula, apart from columns and dtype."""

    node: Node
    dimensions: tuple[int, ...]
    shapes: int
    weights: int


def _columns(form: _Form, rhs: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    t = rhs.shape[-1]
    width = next(w for w in _WIDTHS if w >= t)
    filled = torch.nn.functional.pad(rhs, (0, width - t)).contiguous()
    with at_work(rhs.device.type):
        from pykeops.torch import Genred

        formula, constants = _formula(form, width)
        given = [rhs.new_tensor(c) for c in constants]
        backend = "CPU" if rhs.is_cpu else "GPU"  # KeOps' own choice would copy points from the CPU to the GPU
        found: torch.Tensor = Genred(formula, [], reduction_op="Sum", axis=1)(*tensors, filled, *given, backend=backend)
    return found[:, :t]


@functools.lru_cache(maxsize=256)
def _formula(form: _Form, columns: int) -> tuple[str, tuple[list[float], ...]]:
    """Return the summand in KeOps' language (points at rows, at columns, shapes, weights, `rhs`), and constants."""
    from pykeops.torch import LazyTensor

    rows, columns_of, parameter, k = 0, 1, 2, len(form.dimensions)
    z = [LazyTensor((i, d, rows)) for i, d in enumerate(form.dimensions)]
    y = [LazyTensor((k + i, d, columns_of)) for i, d in enumerate(form.dimensions)]
    p = [LazyTensor((2 * k + i, 1, parameter)) for i in range(form.shapes + form.weights)]
    v = LazyTensor((2 * k + len(p), columns, columns_of))
    pairs = zip(families_of(form.node), z, y, strict=True)
    us = (one.sqdist(other) if of.gamma > 0 else -one.sqdist(other) for of, one, other in pairs)
    result = by_formula(form.node, us, p[: form.shapes], p[form.shapes :]) * v
    result.fixvariables()
    return result.formula, result.variables


def _memory(problem: Problem) -> int:
    return in_tiles(usual(torch.device(problem.device)).tile)(problem) if problem.grad else of_outputs(problem)


@KERNEL_MATMUL.candidate(
    "keops",
    unsupported=lambda problem: needs_few(problem) or unsupported(problem.d * leaves(problem), problem.device),
    unavailable=keops_problem,
    memory=_memory,
    compiles=True,
)
def by_keops(kernel: Any, x1: torch.Tensor, x2: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """KeOps with the family's formula, compiled once per form, dimensions and dtype."""
    return matmul(*forms.both(kernel, x1, x2), rhs, usual(x1.device), product)
