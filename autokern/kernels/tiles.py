"""Kernel matrices between two sets of points, tile by tile, their gradients, and the tiles of each thread.

The squared norms are appended to the points as columns, so that one GEMM with d + 2 columns yields
``u = gamma (|x|^2 + |x'|^2 - 2 x.x')``, and only the epilogue remains. With ``W = g k'(u)``, gradients need only
``W [x' 1]`` and ``W^T [x 1]``.

Tensor cores multiply numbers of 8 (bfloat16) or 11 bits (float16) and add in float32. Squared norms rounded to so few
bits would spoil u. Split into three numbers of that width (Dekker 1971, "A floating-point technique for extending the
available precision") they stay exact, so that only ``x.x'`` is rounded, and one GEMM with d + 6 columns yields u.

No two threads may add to the same numbers at a time, and every sum must have a fixed order. So pairs of shares follow a
round-robin schedule (the circle method, E. Lucas 1883): in each round every share belongs to one pair. Threads wait for
each other after each round; a share holds many tiles, so that rounds are few.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from autokern.kernels.family import Family, Reach
from autokern.kernels.tree import Tree, by_leaf, centre_of
from autokern.kernels.walk import Walk
from autokern.system.threads import Member

Bounds = list[tuple[int, int]]
Pairs = list[tuple[tuple[int, int], tuple[int, int]]]
_WORK = 2**20  # elements that keep a thread busy for some milliseconds
ALIGNED = 16  # blocks begin at multiples of this number of points


class Place(NamedTuple):
    """The bounds of a tile: rows from `top` to before `bottom`, columns from `left` to before `right`."""

    top: int
    bottom: int
    left: int
    right: int


class Plan(NamedTuple):
    """How a product is cut into tiles."""

    tile: int = 1024  # approximate rows, and columns, of a tile
    symmetric: bool = True  # each tile serves both halves of a symmetric matrix
    precision: str = ""  # "float16" or "bfloat16" to round points, "" for no rounding


def usual(device: torch.device) -> Plan:
    """Return the default plan for a device, for use without measurements."""
    return Plan(768 if device.type == "cpu" else 4096)


def bounds(n: int, tile: int, multiple: int) -> Bounds:
    """Cut n points into blocks of about `tile`; their number is about a multiple of `multiple`."""
    blocks = -(-n // tile)
    if blocks > 1:
        blocks = -(-blocks // multiple) * multiple
    each = -(-n // blocks // ALIGNED) * ALIGNED
    return [(start, min(n, start + each)) for start in range(0, n, each)]


def round_robin(blocks: Bounds) -> Iterator[Pairs]:
    """Yield rounds of pairs: each block with itself and with every other once; a round has a block at most once."""
    yield [(block, block) for block in blocks]
    places: list[tuple[int, int] | None] = [*blocks, *([None] if len(blocks) % 2 else [])]
    ring = len(places) - 1
    for turn in range(ring):
        order = [places[-1], *(places[(turn + step) % ring] for step in range(ring))]
        pairs = [(order[0], order[1]), *((order[1 + k], order[-k]) for k in range(1, (ring + 1) // 2))]
        yield [(max(a, b), min(a, b)) for a, b in pairs if a is not None and b is not None]


def latin(rows: Bounds, columns: Bounds) -> Iterator[Pairs]:
    """Yield rounds of pairs: every row block with every column block once; each block at most once a round."""
    most = max(len(rows), len(columns))
    for turn in range(most):
        chosen = [(i, (i + turn) % most) for i in range(len(rows))]
        yield [(rows[i], columns[j]) for i, j in chosen if j < len(columns)]


def members(available: int, n: int, m: int, same: bool, tile: int) -> int:
    """Return how many threads share ``(n, m)`` elements; 16 threads on tiles of 60 rows were 28 times slower than 1."""
    most = n * m // ((2 if same else 1) * _WORK)
    return max(1, min(available, most, n // tile if same else most))


def shares(n: int, tile: int, count: int) -> Bounds:
    """Cut n points into about `count` shares, or one share if they fit a tile."""
    return bounds(n, n if n <= tile else -(-n // count), 1) if n else []


def rounds(n: int, m: int, same: bool, tile: int, members: int) -> list[Pairs]:
    """Return rounds of pairs of shares that cover all tiles, only the lower half if both sides are the `same` points.

    Rounds are as few as the number of members allows, because members wait for each other after each.
    """
    if same:
        return list(round_robin(shares(n, tile, 2 * members)))
    return list(latin(shares(n, tile, members), shares(m, tile, members)))


def dealt(n: int, tile: int, members: int, processes: int, number: int) -> list[Pairs]:
    """Return the rounds of process `number` of several that together cover the lower half of a symmetric matrix.

    A process takes some pairs of each round, as many as it has `members`, its threads.
    """
    turns = enumerate(rounds(n, n, True, tile, members * processes))
    return [pairs[(number + turn) % processes :: processes] for turn, pairs in turns]


def tiles_of(turns: list[Pairs], tile: int, same: bool, member: Member) -> Iterator[Place]:
    """Yield the tiles of one member, waiting for the others after each round."""
    for pairs in turns:
        for rows, columns in pairs[member.number :: member.count]:
            half = same and rows == columns
            for top, bottom in _within(rows, tile):
                for left, right in _within(columns, tile):
                    if left <= top or not half:
                        member.check()
                        yield Place(top, bottom, left, right)
        member.wait()


def stripes_of(rows: Bounds, stripes: Bounds, member: Member) -> Iterator[Place]:
    """Yield the tiles of one member, which has columns of its own."""
    for (left, right), (top, bottom) in itertools.product(stripes[member.number :: member.count], rows):
        member.check()
        yield Place(top, bottom, left, right)


def _within(share: tuple[int, int], tile: int) -> Bounds:
    start, stop = share
    return [(start + a, start + b) for a, b in bounds(stop - start, tile, 1)]


class Side(NamedTuple):
    """The centred points of one leaf in rows and columns, with their squared norms.

    In a lower precision `rows` and `columns` have d + 6 columns; for points far apart they are float64.
    """

    rows: torch.Tensor  # ``[-2 gamma z, gamma |z|^2, 1]``, ``(n, d + 2)``
    columns: torch.Tensor  # ``[z, 1, gamma |z|^2]``, ``(m, d + 2)``
    turned: tuple[torch.Tensor, ...]  # ``[z, 1]^T`` of rows, and of other columns; empty if no gradient is wanted
    sums: tuple[torch.Tensor, ...]  # for the gradients, shaped like `turned`; all members add to them
    seen: Reach


class Sides(NamedTuple):
    """A tree and two sets of points, prepared for tiles."""

    tree: Tree  # with the rows' points
    leaves: list[Side]
    same: bool  # whether rows and columns are the same points

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        rows, columns, *_ = self.leaves[0]
        return rows.shape[0], columns.shape[0]

    def mirrored(self, at: Place) -> bool:
        """Whether a tile also stands for its mirror image across the diagonal."""
        return self.same and at.top != at.left


def sides(tree: Tree, others: list[torch.Tensor] | None, graph: bool = False, precision: str = "") -> Sides:
    """Prepare the points of a tree without a batch; `others` are the columns' points, None for the same."""
    found = []
    for index, (of, z, _) in enumerate(by_leaf(tree)):
        given = [z] if others is None else [z, others[index]]
        # the centre nearer to zero: points are centred already, and one far away moves the mean of its side
        *first, centre = map(centre_of, given)
        for other in first:
            near, far = (c.square().sum().nan_to_num(math.inf) for c in (other, centre))
            centre = torch.where(near <= far, other, centre)
        points = [p - centre for p in given]
        seen = of.reach(*(torch.linalg.vecdot(p, p) for p in points))
        if seen.far and not precision:
            points = [p.double() - centre for p in given]
        own = precision if precision and has_room(precision, of.gamma, *points) else ""
        rows = _extended(points[0], -2 * of.gamma, of.gamma, False, own)
        columns = _extended(points[-1], 1.0, of.gamma, True, own)
        turned = tuple(torch.cat((p, p.new_ones(p.shape[0], 1)), 1).mT.contiguous() for p in points if graph)
        found.append(Side(rows, columns, turned, tuple(map(torch.zeros_like, turned)), seen))
    return Sides(tree, found, others is None)


def _extended(z: torch.Tensor, by: float, gamma: float, norm_last: bool, precision: str) -> torch.Tensor:
    """Return ``[by z, gamma |z|^2, 1]``, the last two swapped if `norm_last`; three of each in a lower precision."""
    norm, d, pieces = torch.linalg.vecdot(z, z).mul_(gamma), z.shape[1], []
    if not precision:
        out = z.new_empty(len(z), d + 2)
        torch.mul(z, by, out=out[:, :d])
        out[:, d + norm_last], out[:, d + 1 - norm_last] = norm, 1.0
        return out
    dtype = getattr(torch, precision)
    for _ in range(3):
        piece = norm.to(dtype)
        norm = norm - piece
        pieces.append(piece)
    norms = torch.stack(pieces, -1)
    ones = torch.ones_like(norms)
    return torch.cat(((z * by).to(dtype), *((ones, norms) if norm_last else (norms, ones))), -1)


def has_room(precision: str, gamma: float, *points: torch.Tensor) -> bool:
    """Whether points and their squared norms are in the range of a precision, 65504 for float16."""
    most = 0.5 * torch.finfo(getattr(torch, precision)).max
    largest = max((torch.linalg.vecdot(z, z).max().item() for z in points if z.numel()), default=0.0)
    return max(2 * abs(gamma), 1.0) * max(largest, 1.0) <= most


def distances(rows: torch.Tensor, columns: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` with ``rows @ columns^T``: sums of 16-bit products are in float32, float64 results are rounded."""
    if rows.dtype is out.dtype:
        return torch.mm(rows, columns.mT, out=out)
    if rows.dtype is torch.float64:
        return out.copy_(rows @ columns.mT)
    return torch.mm(rows, columns.mT, out_dtype=torch.float32, out=out)


class _Leaf:
    """One leaf on the tiles of one member."""

    def __init__(self, leaf: tuple[Family, torch.Tensor, torch.Tensor | None], side: Side, same: bool) -> None:
        self.family, points, self.shape = leaf
        self._dtype, self._side, self._same = points.dtype, side, same

    def distances(self, at: Place, out: torch.Tensor) -> torch.Tensor:
        top, bottom, left, right = at
        rows, columns = self._side.rows[top:bottom], self._side.columns[left:right]
        distances(rows, columns, out)
        diagonal = None
        if self._same and top < right and left < bottom:
            first = max(top, left)
            diagonal = out[first - top :, first - left :].diagonal()
        k = 3 if rows.element_size() == 2 else 1  # columns of a norm, by `_extended`

        def norms() -> torch.Tensor:
            return (rows[:, -2 * k : -k].sum(-1, keepdim=True) + columns[:, -k:].sum(-1)).to(out.dtype)

        return self.family.settled(out, self._side.seen, norms, diagonal)

    def accumulate(self, at: Place, w: torch.Tensor) -> None:
        """Add ``[x' 1]^T W^T`` to the rows' sums and ``[x 1]^T W`` to the columns'."""
        top, bottom, left, right = at
        first, second = self._side.turned[0], self._side.turned[-1]
        w = w.to(first.dtype)
        of_rows, of_columns = self._side.sums[0], self._side.sums[-1]
        of_rows[:, top:bottom].addmm_(second[:, left:right], w.mT)
        of_columns[:, left:right].addmm_(first[:, top:bottom], w)

    def gradients(self, factor: torch.Tensor | float) -> list[torch.Tensor]:
        found = []
        for sums, turned in zip(self._side.sums, self._side.turned, strict=True):
            found.append((turned[:-1] * sums[-1] - sums[:-1]).mT.mul(2 * self.family.gamma * factor).to(self._dtype))
        return found


class Tiles(Walk):
    """The tiles of one member of the thread pool; `has_gradients` says whether `backward` was called."""

    def __init__(self, sides: Sides) -> None:
        tree, pairs = sides.tree, zip(by_leaf(sides.tree), sides.leaves, strict=True)
        found = [_Leaf(leaf, side, sides.same) for leaf, side in pairs]
        super().__init__(tree.node, found, [w.view(1, 1) for w in tree.weights])
        self._memory: list[torch.Tensor] = []
        self._used = 0
        self.has_gradients = False

    def _spare(self, like: torch.Tensor) -> torch.Tensor:
        if self._used == len(self._memory):
            self._memory.append(like.new_empty(like.shape[0] * like.shape[1]))
        flat = self._memory[self._used]
        if flat.numel() < like.numel():
            flat = self._memory[self._used] = like.new_empty(like.shape[0] * like.shape[1])
        self._used += 1
        return flat[: like.numel()].view(like.shape)

    def fill(self, at: Place, out: torch.Tensor, keep: bool = False) -> None:
        """Write a tile into `out`, reusing the scratch memory of the tile before."""
        self._used = 0
        super().fill(at, out, keep)

    def backward(self, at: Place, g: torch.Tensor, factor: torch.Tensor | float = 1.0) -> None:
        """Accumulate gradients from ``g``, the derivative by a tile, which is overwritten."""
        if self._kept is None:
            self._used = 0
        self.has_gradients = True
        super().backward(at, g, factor)
