"""The product of a kernel tree's matrix with few columns, as a differentiable function.

First derivatives evaluate the tiles again and hold no matrix; second derivatives differentiate the plain formula, which
holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autokern.core.autograd import each_cotangent, plain_gradients
from autokern.kernels import over_ranks, products
from autokern.kernels import tree as trees
from autokern.kernels.partition import Plan
from autokern.kernels.tree import Tree, apart, flattened

_NONE = torch.Size()
Multiply = Callable[[Tree, list[torch.Tensor] | None, torch.Tensor, Plan], torch.Tensor]
"""A product with the arguments of `products.product`: tree, points of the columns, right-hand sides, plan."""


def matmul(
    tree: Tree, others: list[torch.Tensor] | None, rhs: torch.Tensor, plan: Plan, by: Multiply = products.product
) -> torch.Tensor:
    """Return ``K rhs`` without holding K.

    The tree has the rows' points; `others` are the columns', None for the same. `rhs` is ``(..., m, t)``; batch shapes
    broadcast. `by` need not be differentiable, nor use the plan, which the backward pass follows in any case.
    """
    if _is_empty(tree, others, rhs.shape[:-2]):
        return trees.dense(tree, others) @ rhs
    parts, own = apart(tree, others)
    shape, flat = flattened([rhs, *own], [2, *parts.dims])
    if not shape:
        single: torch.Tensor = _Product.apply(parts, plan, by, *flat)
        return single
    whole = torch.stack([_Product.apply(parts, plan, by, *each) for each in zip(*flat, strict=True)])
    return whole.view(*shape, *whole.shape[1:])


def _is_empty(tree: Tree, others: list[torch.Tensor] | None, batch: torch.Size = _NONE) -> bool:
    """Whether there are no points, or a batch dimension is zero."""
    matrices = (*tree.points, *(others or ()), *tree.shapes)
    batches = (batch, *(t.shape[:-2] for t in matrices), *(w.shape for w in tree.weights))
    return any(not z.shape[-2] for z in matrices) or any(0 in shape for shape in batches)


def gradients(
    tree: Tree, others: list[torch.Tensor] | None, left: torch.Tensor, right: torch.Tensor, plan: Plan
) -> tuple[Tree, list[torch.Tensor] | None]:
    """Return the gradients of ``sum(left * (K right))`` by the tree and `others`, in the same structure.

    `left` is ``(..., n, t)``, `right` ``(..., m, t)``; batch shapes broadcast.
    """
    parts, tensors = apart(tree, others)
    tensors = [t.detach() for t in tensors]
    if _is_empty(tree, others, left.shape[:-2]):
        return parts.pair([torch.zeros_like(t) for t in tensors])
    shape, flat = flattened([left.detach(), right.detach(), *tensors], [2, 2, *parts.dims])
    each = []
    for one, other, *own in zip(*flat, strict=True) if shape else [flat]:
        each.append(over_ranks.gradients(*parts.pair(own), one, other, plan)[0])
    sums = [
        torch.stack(found).view((*shape, *found[0].shape)).sum_to_size(t.shape)
        for found, t in zip(zip(*each, strict=True), tensors, strict=True)
    ]
    return parts.pair(sums)


class _Product(torch.autograd.Function):
    """``K rhs`` by any product; the gradients are computed tile by tile."""

    @staticmethod
    def forward(ctx, parts, plan, by, rhs, *tensors):  # type: ignore[no-untyped-def]
        ctx.fixed = parts, plan, by is over_ranks.product
        ctx.save_for_backward(rhs, *tensors)
        return by(*parts.pair(tensors), rhs, plan)

    @staticmethod
    @each_cotangent
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (parts, plan, shared), (rhs, *tensors) = ctx.fixed, ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            plain = plain_gradients(lambda rhs, *own: parts.dense(*own) @ rhs, (rhs, *tensors), wanted, grad)
            return None, None, None, *plain
        tree, others = parts.pair(tensors)
        found: list[Any] = [None] * len(tensors)
        by_rhs = None
        if any(wanted[1:]):
            by = over_ranks.gradients if shared else products.gradients
            found, by_rhs = by(tree, others, grad, rhs, plan, want_rhs=wanted[0])
        elif wanted[0]:
            turned = tree if others is None else tree._replace(points=others)
            again = over_ranks.product if shared else products.product
            by_rhs = again(turned, None if others is None else tree.points, grad, plan)
        return None, None, None, by_rhs, *(one if want else None for one, want in zip(found, wanted[1:], strict=True))
