"""The product of a kernel tree's matrix with few columns, and the matrix itself, as differentiable functions.

First derivatives evaluate tiles again and hold no matrix; second derivatives go through the plain formula and hold it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from autokern.core.autograd import each_cotangent, plain_gradients
from autokern.kernels import products
from autokern.kernels import tree as trees
from autokern.kernels.partition import Plan
from autokern.kernels.tree import Node, Tree
from autokern.system import pages

__all__ = ["Multiply", "gradients", "matmul", "matrix"]

_NONE = torch.Size()
Multiply = Callable[[Tree, list[torch.Tensor] | None, torch.Tensor, Plan], torch.Tensor]
"""A product as `products.product` has it: tree, points of the columns, right-hand sides, plan."""


def matmul(
    tree: Tree, others: list[torch.Tensor] | None, rhs: torch.Tensor, plan: Plan, by: Multiply = products.product
) -> torch.Tensor:
    """Return ``K rhs`` without ever holding K.

    Parameters
    ----------
    tree : Tree
        With the points of the rows, ``(..., n, d)``.
    others : list of Tensor or None
        Points of the columns, ``(..., m, d)`` for each leaf; None for the same points.
    rhs : Tensor
        Shape ``(..., m, t)``; batch shapes broadcast.
    plan : Plan
        How the product is cut; its backward pass, if the product itself is by something else.
    by : callable
        What multiplies, with arguments and result of `products.product`; it need not be differentiable.

    Returns
    -------
    Tensor
        Shape ``(..., n, t)``.
    """
    if _is_empty(tree, others, rhs.shape[:-2]):
        return trees.dense(tree, others) @ rhs
    return _over_batches(_Product, tree, others, (plan, by), [rhs])


def matrix(tree: Tree, others: list[torch.Tensor] | None, plan: Plan) -> torch.Tensor:
    """Return the matrix itself, shape ``(..., n, m)``, for arguments as `matmul` has them."""
    return trees.dense(tree, others) if _is_empty(tree, others) else _over_batches(_Matrix, tree, others, (plan,), [])


def _is_empty(tree: Tree, others: list[torch.Tensor] | None, batch: torch.Size = _NONE) -> bool:
    """Whether there are no points, or there is no batch, so that nothing can be cut."""
    matrices = (*tree.points, *(others or ()), *tree.shapes)
    batches = (batch, *(t.shape[:-2] for t in matrices), *(w.shape for w in tree.weights))
    return any(not z.shape[-2] for z in matrices) or any(0 in shape for shape in batches)


def gradients(
    tree: Tree, others: list[torch.Tensor] | None, left: torch.Tensor, right: torch.Tensor, plan: Plan
) -> tuple[Tree, list[torch.Tensor] | None]:
    """Return the gradients of ``sum(left * (K right))``, in the structure of the arguments.

    Parameters
    ----------
    tree, others, plan
        As `matmul` has them.
    left, right : Tensor
        Shapes ``(..., n, t)`` and ``(..., m, t)``; batch shapes broadcast.

    Returns
    -------
    tuple
        A tree of gradients with those of the points of the rows, and those of the columns, or None.
    """
    counts, tensors = _taken_apart(tree, others)
    tensors = [t.detach() for t in tensors]
    if _is_empty(tree, others, left.shape[:-2]):
        return _regrouped(tree.node, counts, [torch.zeros_like(t) for t in tensors])
    shape, (lefts, rights, *flat) = _flattened([left.detach(), right.detach(), *tensors], counts.dims(2))
    parts = []
    for index in range(shape.numel()):
        single, columns = _regrouped(tree.node, counts, [t[index] for t in flat])
        parts.append(products.gradients(single, columns, lefts[index], rights[index], plan)[0])
    sums = [
        torch.stack(found).view((*shape, *found[0].shape)).sum_to_size(t.shape)
        for found, t in zip(zip(*parts, strict=True), tensors, strict=True)
    ]
    return _regrouped(tree.node, counts, sums)


def _over_batches(
    function: Any, tree: Tree, others: list[torch.Tensor] | None, fixed: tuple[Any, ...], rhs: list[torch.Tensor]
) -> torch.Tensor:
    """Apply a function of what is fixed and plain tensors to each element of a batch that is not empty."""
    counts, own = _taken_apart(tree, others)
    tensors = [*rhs, *own]
    dims = counts.dims(len(rhs))
    if all(t.dim() == dim for t, dim in zip(tensors, dims, strict=True)):
        single: torch.Tensor = function.apply(tree.node, counts, *fixed, *tensors)
        return single
    shape, flat = _flattened(tensors, dims)
    parts = [function.apply(tree.node, counts, *fixed, *(t[index] for t in flat)) for index in range(shape.numel())]
    whole = torch.stack(parts)
    return whole.view(*shape, *whole.shape[1:])


def _flattened(tensors: list[torch.Tensor], dims: list[int]) -> tuple[torch.Size, list[torch.Tensor]]:
    """Return the common batch shape of tensors with so many dimensions of their own, and all with that batch in one."""
    shape = torch.broadcast_shapes(*(t.shape[: t.dim() - dim] for t, dim in zip(tensors, dims, strict=True)))
    own = [t.shape[t.dim() - dim :] for t, dim in zip(tensors, dims, strict=True)]
    return shape, [t.expand((*shape, *rest)).reshape(-1, *rest) for t, rest in zip(tensors, own, strict=True)]


class _Counts(NamedTuple):
    """Numbers of tensors in a tree; `columns` is None where both sides are the same points."""

    points: int
    columns: int | None
    shapes: int
    weights: int

    def dims(self, more: int) -> list[int]:
        """Return how many dimensions of their own tensors have behind so many matrices more: weights have none."""
        return [2] * (more + self.points + (self.columns or 0) + self.shapes) + [0] * self.weights


def _taken_apart(tree: Tree, others: list[torch.Tensor] | None) -> tuple[_Counts, list[torch.Tensor]]:
    counts = _Counts(len(tree.points), None if others is None else len(others), len(tree.shapes), len(tree.weights))
    return counts, [*tree.points, *(others or ()), *tree.shapes, *tree.weights]


def _regrouped(node: Node, counts: _Counts, tensors: Sequence[Any]) -> tuple[Tree, list[Any] | None]:
    """Put tensors back into a tree and the points of the columns."""
    left = iter(tensors)
    points, columns, shapes, weights = (list(itertools.islice(left, count or 0)) for count in counts)
    return Tree(node, points, shapes, weights), None if counts.columns is None else columns


class _Product(torch.autograd.Function):
    """``K rhs`` by any multiplication; the gradients tile by tile."""

    @staticmethod
    def forward(ctx, node, counts, plan, by, rhs, *tensors):  # type: ignore[no-untyped-def]
        ctx.fixed = node, counts, plan
        ctx.save_for_backward(rhs, *tensors)
        return by(*_regrouped(node, counts, tensors), rhs, plan)

    @staticmethod
    @each_cotangent
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (node, counts, plan), (rhs, *tensors) = ctx.fixed, ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():

            def times(rhs: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
                return trees.dense(*_regrouped(node, counts, own)) @ rhs

            return None, None, None, None, *plain_gradients(times, (rhs, *tensors), wanted, grad)
        tree, others = _regrouped(node, counts, tensors)
        found: list[Any] = [None] * len(tensors)
        by_rhs = None
        if any(wanted[1:]):
            found, by_rhs = products.gradients(tree, others, grad, rhs, plan, want_rhs=wanted[0])
        elif wanted[0]:
            turned = tree if others is None else tree._replace(points=others)
            by_rhs = products.product(turned, None if others is None else tree.points, grad, plan)
        return None, None, None, None, by_rhs, *_only(found, wanted[1:])


class _Matrix(torch.autograd.Function):
    """K itself."""

    @staticmethod
    def forward(ctx, node, counts, plan, *tensors):  # type: ignore[no-untyped-def]
        ctx.fixed = node, counts, plan
        ctx.save_for_backward(*tensors)
        tree, others = _regrouped(node, counts, tensors)
        first, second = tree.points[0], (others or tree.points)[0]
        return products.filled(tree, others, pages.empty((first.shape[0], second.shape[0]), first), plan)

    @staticmethod
    @each_cotangent
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (node, counts, plan), tensors = ctx.fixed, ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():

            def dense(*own: torch.Tensor) -> torch.Tensor:
                return trees.dense(*_regrouped(node, counts, own))

            return None, None, None, *plain_gradients(dense, tensors, wanted, grad)
        found = products.gradients_from(*_regrouped(node, counts, tensors), grad, plan)
        return None, None, None, *_only(found, wanted)


def _only(found: list[Any], wanted: Sequence[bool]) -> list[Any]:
    return [one if want else None for one, want in zip(found, wanted, strict=True)]
