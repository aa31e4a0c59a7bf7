"""Partition of a product into tiles, and of the tiles among threads.

No two threads may add to the same numbers at a time, and every sum must have a fixed order. So pairs of shares follow a
round-robin schedule (the circle method, E. Lucas 1883): in each round every share belongs to one pair. Threads wait for
each other after each round; a share holds many tiles, so that rounds are few.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from autokern.system.threads import Member

Bounds = list[tuple[int, int]]
Pairs = list[tuple[tuple[int, int], tuple[int, int]]]
ALIGNED = 16
"""Blocks begin at multiples of this number of points."""


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
    precision: str = ""  # "float16" or "bfloat16" to round points (`tiles`), "" for no rounding


def usual(device: torch.device) -> Plan:
    """Return the default plan for a device, where none was measured."""
    return Plan(768 if device.type == "cpu" else 4096)


def bounds(n: int, tile: int, multiple: int) -> Bounds:
    """Cut n points into blocks of about `tile`; their number is about a multiple of `multiple`."""
    blocks = -(-n // tile)
    if blocks > 1:
        blocks = -(-blocks // multiple) * multiple
    each = -(-n // blocks // ALIGNED) * ALIGNED
    return [(start, min(n, start + each)) for start in range(0, n, each)]


def round_robin(blocks: Bounds) -> Iterator[Pairs]:
    """Yield rounds of pairs: every pair of blocks, equal ones too, once; a block occurs at most once in a round."""
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
