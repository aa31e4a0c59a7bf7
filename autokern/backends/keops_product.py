"""The candidate `keops` of `kernel_matmul`: a kernel tree times vectors by KeOps, which never holds the matrix.

The families' own formulae are compiled, for seconds, once per form, dimensions, dtype and number of columns. Few
formulae suffice: columns come in few widths, and a scale of the whole tree stays outside. Since the formulae are
symmetric, one formula serves the product and its transpose, and one the gradients of both sets of points.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from autokern.core.autograd import each_cotangent
from autokern.kernels import embedded as forms
from autokern.kernels.family import Family
from autokern.kernels.tree import Node, Tree, by_leaf, evaluated, peeled
from autokern.ops._product_costs import leaves, of_outputs
from autokern.ops._shared import needs_few
from autokern.ops.kernel_matmul import KERNEL_MATMUL
from autokern.system.keops import at_work, keops_problem

_WIDTHS = (1, 4, 16, 64)
"""Compiled numbers of columns; others are padded with zeros, or split into groups of 64."""
_MOST_DIMENSIONS = {"cpu": 200, "cuda": 100}


def unsupported(d: int, device: str = "cpu") -> str | None:
    """Return why KeOps cannot serve points of `d` dimensions, all leaves together, on a kind of device.

    A thread keeps its point in registers. On a GPU they overflow at some 110 dimensions, where a product takes 50 times
    as long (gpytorch #2334). A CPU has no such limit, but KeOps computes distances one by one: as fast as a dense
    product up to 50 dimensions, 6 times slower at 200 (14 s to compile), 10 times at 400 (2 cores, n = 4000, float32).
    """
    most = _MOST_DIMENSIONS.get(device, 0)
    return None if d <= most else f"d too large for KeOps: {d} dimensions, {most} at most on {device}"


def product(first: Tree, second: Tree, rhs: torch.Tensor) -> torch.Tensor:
    """Return the product of a kernel matrix and vectors ``(..., m, t)``, differentiable to any order.

    Both trees are of one kernel; only the points of `second` are read. The transpose is ``product(second, first,
    rhs)``.
    """
    inner, scale = peeled(first)
    factors = [math.sqrt(abs(of.gamma)) for of, _, _ in by_leaf(inner)]
    points = [[z * c for z, c in zip(tree.points, factors, strict=True)] for tree in (first, second)]
    form = _Form(inner.node, tuple(z.shape[-1] for z in inner.points), len(inner.shapes), len(inner.weights))
    tensors = (*points[0], *points[1], *(s[..., 0] for s in inner.shapes), *(w[..., None] for w in inner.weights))
    parts = [_columns(form, part, tensors) for part in rhs.split(_WIDTHS[-1], dim=-1)]
    total = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    return total if scale is None else total * scale[..., None, None]


class _Form(NamedTuple):
    """The key of a compiled formula, apart from columns and dtype."""

    node: Node
    dimensions: tuple[int, ...]
    shapes: int
    weights: int

    def swapped(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the tensors with the two sets of points in each other's place."""
        k = len(self.dimensions)
        return (*tensors[k : 2 * k], *tensors[:k], *tensors[2 * k :])


def _columns(form: _Form, rhs: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    t = rhs.shape[-1]
    width = next(w for w in _WIDTHS if w >= t)
    filled = rhs if width == t else torch.nn.functional.pad(rhs, (0, width - t))
    found: torch.Tensor = _Product.apply(form, filled, *tensors)
    return found[..., :t]


class _Product(torch.autograd.Function):
    """The reduction; its gradients are reductions as well: the transposed product, and one formula for all the rest."""

    @staticmethod
    def forward(ctx, form, rhs, *tensors):  # type: ignore[no-untyped-def]
        ctx.form = form
        ctx.save_for_backward(rhs, *tensors)
        return _reduce(form, False, (*tensors, rhs))

    @staticmethod
    @each_cotangent
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        rhs, *rest = ctx.saved_tensors
        form, tensors, k = ctx.form, tuple(rest), len(ctx.form.dimensions)
        _, of_rhs, *wanted = ctx.needs_input_grad
        grads: list[torch.Tensor | None] = [None] * len(tensors)
        if of_rhs:
            by_rhs = _Product.apply(form, grad, *form.swapped(tensors)).sum_to_size(rhs.shape)
        if any(wanted[:k]) or any(wanted[2 * k :]):
            parts = _gradients(form, (*tensors, rhs, grad))
            grads[:k] = [p.sum_to_size(z.shape) for p, z in zip(parts, tensors[:k], strict=False)]
            summed = [p.sum(-2) for p in parts[k:]]
            grads[2 * k :] = [p.sum_to_size(w.shape) for p, w in zip(summed, tensors[2 * k :], strict=True)]
        if any(wanted[k : 2 * k]):
            parts = _gradients(form, (*form.swapped(tensors), grad, rhs))
            grads[k : 2 * k] = [p.sum_to_size(z.shape) for p, z in zip(parts, tensors[k : 2 * k], strict=False)]
        return None, by_rhs if of_rhs else None, *grads


def _gradients(form: _Form, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the gradients of each row: by the points of each leaf, then by shapes and weights."""
    found = _reduce(form, True, tensors)
    return list(found.split([*form.dimensions, *[1] * (form.shapes + form.weights)], dim=-1))


def _reduce(form: _Form, gradients: bool, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Sum a formula over the second set of points; KeOps itself differentiates it further."""
    k, parameters = len(form.dimensions), form.shapes + form.weights
    ends = [2] * (2 * k) + [1] * parameters + [2] * (1 + gradients)
    batch = torch.broadcast_shapes(*(t.shape[:-e] for t, e in zip(tensors, ends, strict=True)))
    n, m, t = tensors[0].shape[-2], tensors[k].shape[-2], tensors[2 * k + parameters].shape[-1]
    if not n or not m or 0 in batch:
        return tensors[0].new_zeros(*batch, n, sum(form.dimensions) + parameters if gradients else t)
    aligned = [
        u.reshape((1,) * (len(batch) + e - u.dim()) + u.shape).contiguous() for u, e in zip(tensors, ends, strict=True)
    ]
    device = aligned[0].device.type
    with at_work(device):
        from pykeops.torch import Genred

        formula, constants = _formula(form, t, gradients)
        given = [aligned[0].new_tensor(c).view((1,) * len(batch) + (-1,)) for c in constants]
        backend = "CPU" if device == "cpu" else "GPU"  # KeOps' own choice would copy points from the CPU to the GPU
        return Genred(formula, [], reduction_op="Sum", axis=1)(*aligned, *given, backend=backend)


@functools.lru_cache(maxsize=256)
def _formula(form: _Form, columns: int, gradients: bool) -> tuple[str, tuple[list[float], ...]]:
    """Return the summand in KeOps' language, and its constants.

    The order of variables is: points of the leaves at rows, at columns, shapes, weights, vectors at columns, and for
    gradients vectors at rows.
    """
    from pykeops.torch import LazyTensor

    rows, columns_of, parameter, k = 0, 1, 2, len(form.dimensions)
    z = [LazyTensor((i, d, rows)) for i, d in enumerate(form.dimensions)]
    y = [LazyTensor((k + i, d, columns_of)) for i, d in enumerate(form.dimensions)]
    p = [LazyTensor((2 * k + i, 1, parameter)) for i in range(form.shapes + form.weights)]
    v = LazyTensor((2 * k + len(p), columns, columns_of))
    pairs, shapes, weights = iter(zip(z, y, strict=True)), iter(p[: form.shapes]), iter(p[form.shapes :])

    def leaf(of: Family) -> Any:
        one, other = next(pairs)
        u = one.sqdist(other)
        u = u if of.gamma > 0 else -u
        return of.formula(u, next(shapes)) if of.shape is not None else of.formula(u)

    result = evaluated(form.node, leaf, lambda: next(weights))
    if gradients:
        g = LazyTensor((2 * k + len(p) + 1, columns, rows))
        slopes = [result.grad(of, LazyTensor(1)) for of in (*z, *p)]
        result = functools.reduce(lambda one, other: one.concat(other), slopes) * (g * v).sum(-1)
    else:
        result = result * v
    result.fixvariables()
    return result.formula, result.variables


@KERNEL_MATMUL.candidate(
    "keops",
    unsupported=lambda problem: needs_few(problem) or unsupported(problem.d * leaves(problem), problem.device),
    unavailable=keops_problem,
    memory=of_outputs,
    compiles=True,
)
def by_keops(kernel: Any, x1: torch.Tensor, x2: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """KeOps with the family's formula, compiled once per form, dimensions and dtype."""
    first, others = forms.both(kernel, x1, x2)
    return product(first, first if others is None else first._replace(points=others), rhs)
