"""Products of kernel matrices with few columns that never hold the matrix, and what to pull back through them.

A tile is evaluated, multiplied and forgotten, so that memory grows with the points and not with their square. The
backward pass evaluates the tiles again. Where rows and columns are the same points, a tile serves both halves of the
matrix. Tiles are shared out so that no two threads ever add to the same numbers and every sum is taken in one order: in
the rounds of a tournament each block of points plays once (the circle method, E. Lucas 1883). Floor 2: may import
`tiles` and `crew`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from autokern import crew
from autokern.crew import Member
from autokern.kernels.tiles import Place, Sides, Tiles, prepare, sides
from autokern.kernels.tree import Tree

__all__ = ["Plan", "filled", "product", "pulled", "pulled_from"]

_Bounds = list[tuple[int, int]]
_Pairs = list[tuple[tuple[int, int], tuple[int, int]]]
_ALIGNED = 16


class Plan(NamedTuple):
    """How a product is cut.

    Parameters
    ----------
    tile : int
        Rows and columns of a tile, about.
    symmetric : bool
        Whether a tile serves both halves of the matrix where both sides are the same points.
    columns : bool
        Whether right-hand sides are laid out as columns, padded to a multiple of 16, and not as rows.
    compiled : bool
        Whether a tile's epilogue is one compiled pass over it.
    """

    tile: int = 1024
    symmetric: bool = True
    columns: bool = False
    compiled: bool = False


def _bounds(n: int, tile: int, multiple: int) -> _Bounds:
    """Cut n points into blocks of about `tile`, as many as a multiple says unless they get too small."""
    blocks = -(-n // tile)
    if blocks > 1:
        blocks = -(-blocks // multiple) * multiple
    each = -(-n // blocks // _ALIGNED) * _ALIGNED
    return [(start, min(n, start + each)) for start in range(0, n, each)]


def _tournament(blocks: _Bounds) -> Iterator[_Pairs]:
    """Yield rounds of pairs, every pair of blocks and every block with itself once, each block once in a round."""
    yield [(block, block) for block in blocks]
    players: list[tuple[int, int] | None] = [*blocks, *([None] if len(blocks) % 2 else [])]
    ring = len(players) - 1
    for turn in range(ring):
        order = [players[-1], *(players[(turn + step) % ring] for step in range(ring))]
        meetings = [(order[0], order[1]), *((order[1 + k], order[-k]) for k in range(1, (ring + 1) // 2))]
        yield [(max(a, b), min(a, b)) for a, b in meetings if a is not None and b is not None]


def _latin(rows: _Bounds, columns: _Bounds) -> Iterator[_Pairs]:
    """Yield rounds of pairs of a row block with a column block, each block once in a round at most."""
    most = max(len(rows), len(columns))
    for turn in range(most):
        chosen = [(i, (i + turn) % most) for i in range(len(rows))]
        yield [(rows[i], columns[j]) for i, j in chosen if j < len(columns)]


def _rounds(known: Sides, tile: int, members: int) -> list[_Pairs]:
    n, m = (side.shape[0] for side in known.leaves[0][:2])
    if known.same:
        return list(_tournament(_bounds(n, tile, 2 * members)))
    return list(_latin(_bounds(n, tile, members), _bounds(m, tile, members)))


def _buffer(like: torch.Tensor, tile: int) -> torch.Tensor:
    return like.new_empty((tile + _ALIGNED) ** 2)


def _tile(memory: torch.Tensor, at: Place) -> torch.Tensor:
    rows, columns = at.bottom - at.top, at.right - at.left
    return memory[: rows * columns].view(rows, columns)


def _from_left(known: Sides, vt: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return ``vt K`` for ``vt`` of shape ``(t, n)``: shape ``(t, m)``; every member has columns of its own."""
    n, m = (side.shape[0] for side in known.leaves[0][:2])
    members = crew.size(vt.device)
    rows, columns = _bounds(n, plan.tile, 1), _bounds(m, plan.tile, members)
    out = vt.new_zeros(vt.shape[0], m)

    def work(member: Member) -> None:
        tiles, memory = Tiles(known, compiled=plan.compiled), _buffer(vt, plan.tile)
        for left, right in columns[member.number :: member.count]:
            total = out[:, left:right]
            for top, bottom in rows:
                member.check()
                at = Place(top, bottom, left, right)
                k = _tile(memory, at)
                tiles.fill(at, k)
                total.addmm_(vt[:, top:bottom], k)

    crew.run(work, min(members, len(columns)))
    return out


def _by_columns(known: Sides, v: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return ``K v`` for ``v`` of shape ``(m, t)``, laid out in columns and padded: shape ``(n, t)``."""
    n, m = (side.shape[0] for side in known.leaves[0][:2])
    members = crew.size(v.device)
    rows, columns = _bounds(n, plan.tile, members), _bounds(m, plan.tile, 1)
    t = v.shape[1]
    wide = v.new_zeros(m, -(-t // _ALIGNED) * _ALIGNED)
    wide[:, :t] = v
    out = v.new_zeros(n, wide.shape[1])

    def work(member: Member) -> None:
        tiles, memory = Tiles(known, compiled=plan.compiled), _buffer(v, plan.tile)
        for top, bottom in rows[member.number :: member.count]:
            total = out[top:bottom]
            for left, right in columns:
                member.check()
                at = Place(top, bottom, left, right)
                k = _tile(memory, at)
                tiles.fill(at, k)
                total.addmm_(k, wide[left:right])

    crew.run(work, min(members, len(rows)))
    return out[:, :t]


def _symmetric(known: Sides, vt: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return ``vt K`` of a symmetric matrix, each tile below the diagonal serving both halves."""
    members = crew.size(vt.device)
    rounds, out = _rounds(known, plan.tile, members), torch.zeros_like(vt)

    def work(member: Member) -> None:
        tiles, memory = Tiles(known, compiled=plan.compiled), _buffer(vt, plan.tile)
        for pairs in rounds:
            for (top, bottom), (left, right) in pairs[member.number :: member.count]:
                member.check()
                at = Place(top, bottom, left, right)
                k = _tile(memory, at)
                tiles.fill(at, k)
                out[:, left:right].addmm_(vt[:, top:bottom], k)
                if top != left:
                    out[:, top:bottom].addmm_(vt[:, left:right], k.mT)
            member.meet()

    crew.run(work, members)
    return out


def _peeled(tree: Tree) -> tuple[Tree, torch.Tensor | None]:
    """Take the scales off the root of a tree: they may as well be applied to the product."""
    node, weights, scale = tree.node, list(tree.weights), None
    while node.kind == "scale":
        first = weights.pop(0)
        scale, node = first if scale is None else scale * first, node.children[0]
    return Tree(node, tree.points, tree.shapes, weights), scale


def product(tree: Tree, others: list[torch.Tensor] | None, rhs: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return ``K rhs``.

    Parameters
    ----------
    tree : Tree
        Plain tensors without a batch, with the points of the rows.
    others : list of Tensor or None
        Points of the columns, for each leaf; None for the same points.
    rhs : Tensor
        Shape ``(m, t)``.
    plan : Plan
        How to cut it.

    Returns
    -------
    Tensor
        Shape ``(n, t)``, contiguous.
    """
    inner, scale = _peeled(tree)
    if plan.compiled:
        prepare(inner)
    if plan.columns:
        out = _by_columns(sides(inner, others), rhs, plan)
    elif others is None:
        known, vt = sides(inner, None), rhs.mT.contiguous()
        out = (_symmetric(known, vt, plan) if plan.symmetric else _from_left(known, vt, plan)).mT
    else:  # a tile with the sums along its rows is multiplied faster, so that the sides change places
        swapped = sides(inner._replace(points=others), inner.points)
        out = _from_left(swapped, rhs.mT.contiguous(), plan).mT
    return (out if scale is None else out * scale).contiguous()


_OnTile = Callable[[Place, torch.Tensor], None]


def _pull(known: Sides, tile: int, cotangent: _OnTile, seen: _OnTile | None) -> list[torch.Tensor]:
    """Return the gradients of everything in a tree, tile by tile.

    `cotangent` writes ``dL/dK`` on a tile; where both sides are the same points, that of the mirrored tile is added to
    it. `seen` gets each tile's value before.
    """
    like = known.leaves[0].rows
    members = crew.size(like.device)
    rounds, sums = _rounds(known, tile, members), Tiles.sums(known)
    crew_tiles = [Tiles(known, sums) for _ in range(members)]

    def work(member: Member) -> None:
        tiles, memory = crew_tiles[member.number], _buffer(like, tile)
        values = memory if seen is None else _buffer(like, tile)
        for pairs in rounds:
            for (top, bottom), (left, right) in pairs[member.number :: member.count]:
                member.check()
                at = Place(top, bottom, left, right)
                if seen is not None:
                    k = _tile(values, at)
                    tiles.fill(at, k, keep=True)
                    seen(at, k)
                g = _tile(memory, at)
                cotangent(at, g)
                tiles.pull(at, g)
            member.meet()

    crew.run(work, members)
    first, *rest = [tiles for tiles in crew_tiles if tiles.has_pulled]
    points, shapes, weights = first.gradients()
    totals = [*shapes, *weights]
    for tiles in rest:
        more = tiles.totals()
        totals = [a + b for a, b in zip(totals, [*more[0], *more[1]], strict=True)]
    return [*points, *totals]


def _outer(known: Sides, left_t: torch.Tensor, right_t: torch.Tensor) -> _OnTile:
    def write(at: Place, out: torch.Tensor) -> None:
        top, bottom, left, right = at
        torch.mm(left_t[:, top:bottom].mT, right_t[:, left:right], out=out)
        if known.same and top != left:
            out.addmm_(right_t[:, top:bottom].mT, left_t[:, left:right])

    return write


def pulled(
    tree: Tree, others: list[torch.Tensor] | None, left: torch.Tensor, right: torch.Tensor, plan: Plan,
    want_rhs: bool = False,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:  # fmt: skip
    """Return the gradients of ``sum(left * (K right))`` by points, shapes and weights, and by `right`.

    Parameters
    ----------
    tree : Tree
        Plain tensors without a batch.
    others : list of Tensor or None
        Points of the columns; None for the same points.
    left, right : Tensor
        Shapes ``(n, t)`` and ``(m, t)``.
    plan : Plan
        Size of the tiles.
    want_rhs : bool
        Whether the gradient by `right`, ``K^T left``, is wanted.

    Returns
    -------
    tuple
        Gradients in the order points (for each leaf rows, then columns), shapes, weights; and ``(m, t)`` or None.
    """
    known = sides(tree, others, graph=True)
    left_t, right_t = left.mT.contiguous(), right.mT.contiguous()
    out = torch.zeros_like(right_t) if want_rhs else None

    def multiply(at: Place, k: torch.Tensor) -> None:
        assert out is not None
        top, bottom, start, stop = at
        out[:, start:stop].addmm_(left_t[:, top:bottom], k)
        if known.same and top != start:
            out[:, top:bottom].addmm_(left_t[:, start:stop], k.mT)

    found = _pull(known, plan.tile, _outer(known, left_t, right_t), multiply if want_rhs else None)
    return found, None if out is None else out.mT


def filled(tree: Tree, others: list[torch.Tensor] | None, out: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Write the kernel matrix into `out`, shape ``(n, m)``, and return it."""
    known = sides(tree, others)
    members = crew.size(out.device)
    rounds = _rounds(known, plan.tile, members)

    def work(member: Member) -> None:
        tiles = Tiles(known)
        for pairs in rounds:
            for (top, bottom), (left, right) in pairs[member.number :: member.count]:
                member.check()
                k = out[top:bottom, left:right]
                tiles.fill(Place(top, bottom, left, right), k)
                if known.same and top != left:
                    out[left:right, top:bottom].copy_(k.mT)

    crew.run(work, members)
    return out


def pulled_from(tree: Tree, others: list[torch.Tensor] | None, grad: torch.Tensor, plan: Plan) -> list[torch.Tensor]:
    """Return the gradients by points, shapes and weights for a given ``dL/dK``, as `pulled` orders them."""
    known = sides(tree, others, graph=True)

    def write(at: Place, out: torch.Tensor) -> None:
        top, bottom, left, right = at
        out.copy_(grad[top:bottom, left:right])
        if known.same and top != left:
            out.add_(grad[left:right, top:bottom].mT)

    return _pull(known, plan.tile, write, None)
