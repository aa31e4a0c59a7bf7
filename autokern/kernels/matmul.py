"""The product of a kernel tree's matrix with few columns: differentiable, and shared by the ranks of a job.

First derivatives evaluate the tiles again and hold no matrix; second derivatives differentiate the plain formula, which
holds it. Points and vectors are the same on all ranks. Each rank computes its share of the tiles, or of the points, and
one all-reduce sums the results. Without joined ranks, or if communication would cost more than it saves, each rank
computes everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autokern.core.autograd import each_cotangent, plain_gradients
from autokern.kernels import products, tiles
from autokern.kernels import tree as trees
from autokern.kernels.tiles import Plan
from autokern.kernels.tree import Node, Tree, apart, flattened
from autokern.system import ranks, threads
from autokern.system.ranks import Ranks

LEAST = 2**24  # elements of a matrix below which ranks share nothing, as a product takes a few milliseconds
_MOST = 2.0  # least ratio of the time saved to the time of communication
_SAMPLE = 2048
Multiply = Callable[[Tree, list[torch.Tensor] | None, torch.Tensor, Plan], torch.Tensor]
"""A product with the arguments of `products.product`: tree, points of the columns, right-hand sides, plan."""

_rate = 1e8  # elements of a symmetric matrix that the slowest rank multiplies in a second
_members = 1  # the least number of threads of any rank, by which all ranks deal the tiles alike


def measure(here: Ranks) -> None:
    """Measure each rank's elements per second, count its threads, and keep the minima over all ranks."""
    global _rate, _members
    x = torch.rand(_SAMPLE, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    tree, plan, best = Tree(Node("leaf", "matern52"), [x], [], []), tiles.usual(x.device), float("inf")
    for _ in range(3):
        here.barrier()
        began = time.perf_counter()
        products.product(tree, None, x.repeat(1, 4)[:, :11].contiguous(), plan)
        best = min(best, time.perf_counter() - began)
    _rate, _members = map(min, zip(*here.objects((_SAMPLE**2 / best, threads.members(x.device))), strict=True))


def pays(here: Ranks, elements: float, count: int) -> bool:
    """Whether sharing a product over this many matrix elements, with a result of `count` bytes, is faster."""
    links = here.link.seconds(count) + 2 * here.link.latency
    return elements >= LEAST and _MOST * links < elements / _rate * (1 - 1 / here.size)


def _sharing(elements: float, count: int, like: torch.Tensor) -> Ranks | None:
    """Return the ranks that share this work, or None; `elements` are of the matrix, `count` those of the result."""
    here = ranks.active()
    if here is None or like.device.type != "cpu" or not pays(here, elements, count * like.element_size()):
        return None
    return here


def agreed(
    tree: Tree, others: list[torch.Tensor] | None, plan: Plan | None, *more: torch.Tensor
) -> dict[str, Sequence[torch.Tensor | str]]:
    """Return the inputs that ranks must agree on, by the names that the error about a difference uses."""
    return {
        "kernels": [repr((tree.node, plan))],
        "points": [*tree.points, *(others or ())],
        "hyperparameters": [*tree.shapes, *tree.weights],
        "vectors": more,
    }


def _own(n: int, here: Ranks) -> slice:
    """Return this rank's range of n points; the ranges of all ranks cover the points."""
    edges = [round(n * k / (here.size * tiles.ALIGNED)) * tiles.ALIGNED for k in (here.rank, here.rank + 1)]
    return slice(min(n, edges[0]), n if here.rank + 1 == here.size else min(n, edges[1]))


def product(tree: Tree, others: list[torch.Tensor] | None, rhs: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return ``K rhs``, with arguments and result of `products.product`."""
    n, (m, t) = tree.points[0].shape[-2], rhs.shape
    here = _sharing(n * m, n * t, rhs)
    if here is None:
        return products.product(tree, others, rhs, plan)
    plan = plan._replace(symmetric=True)

    def work(out: torch.Tensor) -> None:
        whole = out.view(n, t)
        if others is None:
            only = tiles.dealt(n, plan.tile, tiles.members(_members, n, n, True, plan.tile), here.size, here.rank)
            whole.copy_(products.product(tree, None, rhs, plan, only))
            return
        rows, columns = (_own(n, here), slice(0, m)) if n >= m else (slice(0, n), _own(m, here))
        if rows.start < rows.stop and columns.start < columns.stop:
            whole[rows] = products.product(tree.at(rows), [z[columns] for z in others], rhs[columns], plan)

    out = here.summed("product", (n, m, t, len(tree.points)), agreed(tree, others, plan, rhs), rhs, n * t, work)
    return out.view(n, t)


def gradients(
    tree: Tree, others: list[torch.Tensor] | None, left: torch.Tensor, right: torch.Tensor, plan: Plan,
    want_rhs: bool = False,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:  # fmt: skip
    """Return the result of `products.gradients`; ranks share the work if rows and columns are the same points."""
    tensors = apart(tree, others)[1]
    sizes = [t.numel() for t in tensors] + [right.numel() * want_rhs]
    here = _sharing(len(left) * len(right), sum(sizes), right) if others is None else None
    if here is None or any(t.dtype is not right.dtype for t in tensors):
        return products.gradients(tree, others, left, right, plan, want_rhs)
    n, t = left.shape

    def work(out: torch.Tensor) -> None:
        only = tiles.dealt(n, plan.tile, tiles.members(_members, n, n, True, plan.tile), here.size, here.rank)
        if any(only):
            found, by_rhs = products.gradients(tree, None, left, right, plan, want_rhs, only)
            for total, one in zip(out.split(sizes), [*found, by_rhs], strict=True):
                if one is not None:
                    total.copy_(one.reshape(-1))

    data = agreed(tree, None, plan, left, right)
    *found, by_rhs = here.summed("gradients", (n, n, t, int(want_rhs)), data, right, sum(sizes), work).split(sizes)
    views = [part.view(like.shape) for part, like in zip(found, tensors, strict=True)]
    return views, by_rhs.view_as(right) if want_rhs else None


def by_points(
    n: int, elements: float, count: int, like: torch.Tensor, data: dict[str, Sequence[torch.Tensor | str]],
    work: Callable[[torch.Tensor, int, int], None],
) -> torch.Tensor:  # fmt: skip
    """Return the sum over ranks of the results of `work`, each for its range of n points.

    ``work(out, first, end)`` writes into `out`, `count` zeros with the dtype and device of `like`; it must not raise on
    some ranks only. The work on all points takes as long as evaluating `elements` of a kernel matrix. `data` are its
    inputs, which all ranks must agree on.
    """
    here = _sharing(elements, count, like)
    if here is None:
        out = like.new_zeros(count)
        work(out, 0, n)
        return out

    def own(out: torch.Tensor) -> None:
        part = _own(n, here)
        if part.stop > part.start:
            work(out, part.start, part.stop)

    return here.summed("points", (n, count), data, like, count, own)


def matmul(
    tree: Tree, others: list[torch.Tensor] | None, rhs: torch.Tensor, plan: Plan, by: Multiply = products.product
) -> torch.Tensor:
    """Return ``K rhs`` without holding K.

    The tree has the rows' points, `others` the columns' (None if the same). `rhs` is ``(..., m, t)``; batch shapes
    broadcast. `by` need not be differentiable, nor use the plan, which the backward pass follows in any case.
    """
    if _is_empty(tree, others, rhs.shape[:-2]):
        return trees.dense(tree, others) @ rhs
    parts, own = apart(tree, others)
    shape, flat = flattened([rhs, *own], [2, *parts.dims])
    if not shape:
        return _Product.apply(parts, plan, by, *flat)
    whole = torch.stack([_Product.apply(parts, plan, by, *each) for each in zip(*flat, strict=True)])
    return whole.view(*shape, *whole.shape[1:])


def _is_empty(tree: Tree, others: list[torch.Tensor] | None, batch: torch.Size) -> bool:
    """Whether there are no points, or a batch dimension is zero."""
    matrices = (*tree.points, *(others or ()), *tree.shapes)
    batches = (batch, *(t.shape[:-2] for t in matrices), *(w.shape for w in tree.weights))
    return any(not z.shape[-2] for z in matrices) or any(0 in shape for shape in batches)


def matmul_gradients(
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
    models = zip(*flat, strict=True) if shape else [flat]
    each = [gradients(*parts.pair(own), one, other, plan)[0] for one, other, *own in models]
    sums = [
        torch.stack(found).view((*shape, *found[0].shape)).sum_to_size(t.shape)
        for found, t in zip(zip(*each, strict=True), tensors, strict=True)
    ]
    return parts.pair(sums)


class _Product(torch.autograd.Function):
    """``K rhs`` by any product; the gradients are computed tile by tile."""

    @staticmethod
    def forward(ctx, parts, plan, by, rhs, *tensors):  # type: ignore[no-untyped-def]
        ctx.fixed = parts, plan, by is product
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
            by = gradients if shared else products.gradients
            found, by_rhs = by(tree, others, grad, rhs, plan, want_rhs=wanted[0])
        elif wanted[0]:
            turned = tree if others is None else tree._replace(points=others)
            again = product if shared else products.product
            by_rhs = again(turned, None if others is None else tree.points, grad, plan)
        return None, None, None, by_rhs, *(one if want else None for one, want in zip(found, wanted[1:], strict=True))
