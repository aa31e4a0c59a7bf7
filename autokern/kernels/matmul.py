"""The product of a kernel tree's matrix with few columns, and the matrix itself, as differentiable functions.

First derivatives evaluate tiles again and hold no matrix; second ones go through the plain formula and do. Floor 2: may
import `products`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autokern import pages
from autokern.factors import plain_gradients
from autokern.kernels import products
from autokern.kernels import tree as trees
from autokern.kernels.products import Plan
from autokern.kernels.tree import Tree

__all__ = ["in_order", "matmul", "matrix"]

_NONE = torch.Size()


def matmul(tree: Tree, others: list[torch.Tensor] | None, rhs: torch.Tensor, plan: Plan) -> torch.Tensor:
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
        How the product is cut.

    Returns
    -------
    Tensor
        Shape ``(..., n, t)``.
    """
    if _is_empty(tree, others, rhs.shape[:-2]):
        return trees.dense(tree, others) @ rhs
    return _over_batches(_Product, tree, others, plan, [rhs])


def matrix(tree: Tree, others: list[torch.Tensor] | None, plan: Plan) -> torch.Tensor:
    """Return the matrix itself, shape ``(..., n, m)``, for arguments as `matmul` has them."""
    return trees.dense(tree, others) if _is_empty(tree, others) else _over_batches(_Matrix, tree, others, plan, [])


def _is_empty(tree: Tree, others: list[torch.Tensor] | None, batch: torch.Size = _NONE) -> bool:
    """Whether there are no points, or there is no batch, so that nothing can be cut."""
    matrices = (*tree.points, *(others or ()), *tree.shapes)
    batches = (batch, *(t.shape[:-2] for t in matrices), *(w.shape for w in tree.weights))
    return any(not z.shape[-2] for z in matrices) or any(0 in shape for shape in batches)


def _over_batches(
    function: Any, tree: Tree, others: list[torch.Tensor] | None, plan: Plan, rhs: list[torch.Tensor]
) -> torch.Tensor:
    """Apply a function of plain tensors to each element of a batch that is not empty."""
    counts = (len(tree.points), len(tree.shapes), len(tree.weights), -1 if others is None else len(others))
    matrices = [*rhs, *tree.points, *(others or ()), *tree.shapes]
    shape = torch.broadcast_shapes(*(t.shape[:-2] for t in matrices), *(w.shape for w in tree.weights))
    if not shape and all(t.dim() == 2 for t in matrices):
        single: torch.Tensor = function.apply(tree.node, counts, plan, *matrices, *tree.weights)
        return single

    def flat(t: torch.Tensor, own: int) -> torch.Tensor:
        rest = t.shape[t.dim() - own :]
        return t.expand(*shape, *rest).reshape(-1, *rest)

    tensors = [*(flat(t, 2) for t in matrices), *(flat(w, 0) for w in tree.weights)]
    parts = [function.apply(tree.node, counts, plan, *(t[index] for t in tensors)) for index in range(shape.numel())]
    whole = torch.stack(parts)
    return whole.view(*shape, *whole.shape[1:])


def _regrouped(node: Any, counts: tuple[int, ...], tensors: Sequence[torch.Tensor]) -> tuple[Tree, list[Any] | None]:
    """Put tensors back into a tree and the points of the columns."""
    points, shapes, _, columns = counts
    cuts = [points, points + max(0, columns), points + max(0, columns) + shapes]
    tree = Tree(node, list(tensors[: cuts[0]]), list(tensors[cuts[1] : cuts[2]]), list(tensors[cuts[2] :]))
    return tree, None if columns < 0 else list(tensors[cuts[0] : cuts[1]])


def in_order(found: list[torch.Tensor], leaves: int, columns: bool) -> list[torch.Tensor]:
    """Turn gradients whose points stand as rows and columns of each leaf in turn into all rows, then all columns."""
    cut = 2 * leaves
    return [*found[0:cut:2], *found[1:cut:2], *found[cut:]] if columns else found


class _Product(torch.autograd.Function):
    """``K rhs``."""

    @staticmethod
    def forward(ctx, node, counts, plan, rhs, *tensors):  # type: ignore[no-untyped-def]
        ctx.fixed = node, counts, plan
        ctx.save_for_backward(rhs, *tensors)
        return products.product(*_regrouped(node, counts, tensors), rhs, plan)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (node, counts, plan), (rhs, *tensors) = ctx.fixed, ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            value = trees.dense(*_regrouped(node, counts, tensors)) @ rhs
            return None, None, None, *plain_gradients(value, (rhs, *tensors), wanted, grad)
        tree, others = _regrouped(node, counts, tensors)
        found: list[Any] = [None] * len(tensors)
        by_rhs = None
        if any(wanted[1:]):
            found, by_rhs = products.pulled(tree, others, grad, rhs, plan, want_rhs=wanted[0])
            found = in_order(found, counts[0], counts[3] >= 0)
        elif wanted[0]:
            turned = tree if others is None else tree._replace(points=others)
            by_rhs = products.product(turned, None if others is None else tree.points, grad, plan)
        return None, None, None, by_rhs, *_only(found, wanted[1:])


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
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (node, counts, plan), tensors = ctx.fixed, ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            value = trees.dense(*_regrouped(node, counts, tensors))
            return None, None, None, *plain_gradients(value, tensors, wanted, grad)
        found = products.pulled_from(*_regrouped(node, counts, tensors), grad, plan)
        found = in_order(found, counts[0], counts[3] >= 0)
        return None, None, None, *_only(found, wanted)


def _only(found: list[Any], wanted: Sequence[bool]) -> list[Any]:
    return [one if want else None for one, want in zip(found, wanted, strict=True)]
