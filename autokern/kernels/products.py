"""Products of kernel matrices with few columns that never hold the matrix, and their gradients.

A tile is evaluated, multiplied and dropped, so memory is linear in the points. The backward pass evaluates the tiles
again. If rows and columns are the same points, a tile serves both halves of the matrix. No two threads add to the same
numbers at a time, and every sum has a fixed order (`tiles`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from autokern.kernels import tiles as tiling
from autokern.kernels.tiles import Pairs, Place, Plan, Sides, Tiles, sides
from autokern.kernels.tree import Tree, peeled
from autokern.system import threads
from autokern.system.threads import Member

_OnTile = Callable[[Place, torch.Tensor], None]


def _buffer(like: torch.Tensor, tile: int) -> torch.Tensor:
    return like.new_empty((tile + tiling.ALIGNED) ** 2)


def _tile(memory: torch.Tensor, at: Place) -> torch.Tensor:
    rows, columns = at.bottom - at.top, at.right - at.left
    return memory[: rows * columns].view(rows, columns)


def _multiply(at: Place, vt: torch.Tensor, k: torch.Tensor, out: torch.Tensor, mirrored: bool) -> None:
    """Add a tile's part of ``vt K``, and that of the mirrored tile if it has one."""
    top, bottom, left, right = at
    out[:, left:right].addmm_(vt[:, top:bottom], k)
    if mirrored:
        out[:, top:bottom].addmm_(vt[:, left:right], k.mT)


def product(
    tree: Tree, others: list[torch.Tensor] | None, rhs: torch.Tensor, plan: Plan, only: list[Pairs] | None = None
) -> torch.Tensor:
    """Return ``K rhs``, contiguous; the tree has detached tensors without a batch.

    `others` are the columns' points of each leaf, None for the same. `only`, for a symmetric plan and the same points,
    limits the sum to some tiles.
    """
    inner, scale = peeled(tree)
    half = plan.symmetric and others is None
    if others is not None:  # a product from the left of a tile is faster, so the sides are swapped
        inner, others = inner._replace(points=others), inner.points
    known, vt = sides(inner, others, precision=plan.precision), rhs.mT.contiguous()
    n, m = known.shape
    members = tiling.members(threads.members(vt.device), n, m, half, plan.tile)
    out = vt.new_zeros(vt.shape[0], m)
    if half:
        rounds = tiling.rounds(n, n, True, plan.tile, members) if only is None else only
        places = functools.partial(tiling.tiles_of, rounds, plan.tile, True)
    else:
        stripes = tiling.bounds(m, plan.tile, members)
        places = functools.partial(tiling.stripes_of, tiling.bounds(n, plan.tile, 1), stripes)
        members = min(members, len(stripes))
    # allocated before the threads start: within them, each allocation would wait for the interpreter lock
    workspaces = [(Tiles(known), _buffer(vt, plan.tile)) for _ in range(members)]

    def work(member: Member) -> None:
        tiles, memory = workspaces[member.number]
        for at in places(member):
            k = _tile(memory, at)
            tiles.fill(at, k)
            _multiply(at, vt, k, out, half and known.mirrored(at))

    threads.together(work, members)
    return (out.mT if scale is None else out.mT * scale).contiguous()


def _gradients(
    known: Sides, tile: int, cotangent: _OnTile, seen: _OnTile | None, only: list[Pairs] | None = None
) -> list[torch.Tensor]:
    """Return the gradients of a tree; `cotangent` writes ``dL/dK`` of a tile and its mirror, `seen` reads each tile."""
    like = known.tree.points[0]
    members = tiling.members(threads.members(like.device), *known.shape, known.same, tile)
    rounds = tiling.rounds(*known.shape, known.same, tile, members) if only is None else only
    own_tiles = [Tiles(known) for _ in range(members)]

    def work(member: Member) -> None:
        tiles, memory = own_tiles[member.number], _buffer(like, tile)
        values = memory if seen is None else _buffer(like, tile)
        for at in tiling.tiles_of(rounds, tile, known.same, member):
            if seen is not None:
                k = _tile(values, at)
                tiles.fill(at, k, keep=True)
                seen(at, k)
            g = _tile(memory, at)
            cotangent(at, g)
            tiles.backward(at, g)

    threads.together(work, members)
    some = [tiles for tiles in own_tiles if tiles.has_gradients]
    totals = [sum(each[1:], each[0]) for each in zip(*(tiles.totals() for tiles in some), strict=True)]
    found = some[0].gradients()  # all members have added to the gradients by points
    return [*found[: len(found) - len(totals)], *totals]


def gradients(
    tree: Tree, others: list[torch.Tensor] | None, left: torch.Tensor, right: torch.Tensor, plan: Plan,
    want_rhs: bool = False, only: list[Pairs] | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:  # fmt: skip
    """Return the gradients of ``sum(left * (K right))`` by the tree's tensors, and by `right`, None if not wanted.

    The tree's tensors are in this order: rows' points, columns' points if they are others, shapes, weights. `only`, for
    the same points, limits the sums to some tiles.
    """
    known = sides(tree, others, graph=True, precision=plan.precision)
    left_t, right_t = left.mT.contiguous(), right.mT.contiguous()
    out = torch.zeros_like(right_t) if want_rhs else None

    def multiply(at: Place, k: torch.Tensor) -> None:
        assert out is not None
        _multiply(at, left_t, k, out, known.mirrored(at))

    def write(at: Place, g: torch.Tensor) -> None:
        top, bottom, first, end = at
        torch.mm(left_t[:, top:bottom].mT, right_t[:, first:end], out=g)
        if known.mirrored(at):
            g.addmm_(right_t[:, top:bottom].mT, left_t[:, first:end])

    found = _gradients(known, plan.tile, write, multiply if want_rhs else None, only)
    return found, None if out is None else out.mT


def filled(tree: Tree, others: list[torch.Tensor] | None, out: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Write the kernel matrix into `out`, shape ``(n, m)``, and return it.

    Blocks are of whole rows: even for a symmetric matrix, that is faster than writing each tile of one half twice.
    """
    known = sides(tree, others)
    n, m = known.shape
    members = tiling.members(threads.members(out.device), n, m, False, plan.tile)
    blocks = tiling.bounds(n, max(1, plan.tile**2 // m), members)

    def work(member: Member) -> None:
        tiles = Tiles(known)
        for top, bottom in blocks[member.number :: member.count]:
            member.check()
            tiles.fill(Place(top, bottom, 0, m), out[top:bottom])

    threads.together(work, min(members, len(blocks)))
    return out


def gradients_from(tree: Tree, others: list[torch.Tensor] | None, grad: torch.Tensor, plan: Plan) -> list[torch.Tensor]:
    """Return the gradients by points, shapes and weights for a given ``dL/dK``, in the order of `gradients`."""

    def write(at: Place, out: torch.Tensor) -> None:
        top, bottom, left, right = at
        out.copy_(grad[top:bottom, left:right])
        if others is None and top != left:
            out.add_(grad[left:right, top:bottom].mT)

    return _gradients(sides(tree, others, graph=True), plan.tile, write, None)
