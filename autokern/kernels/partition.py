"""Partition of a product into tiles, and of the tiles among threads.

No two threads may ever add to the same numbers, and every sum must be taken in one order. So pairs of shares follow a
round-robin schedule (the circle method, E. Lucas 1883): in each round every share belongs to one pair. A share holds
many tiles, so that rounds are few: threads wait for each other at the end of each round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from autokern.system.thread_pool import Member

Bounds = list[tuple[int, int]]
Pairs = list[tuple[tuple[int, int], tuple[int, int]]]
_SHARES = 16
"""Shares of the points at least, where several processes compute: one finds its part to a hundredth."""
ALIGNED = 16
"""Blocks begin at multiples of this."""


class Place(NamedTuple):
    """First row of a tile, the row after its last, and the same for its columns."""

    top: int
    bottom: int
    left: int
    right: int


class Plan(NamedTuple):
    """How a product is cut into tiles."""

    tile: int = 1024  # rows, and columns, of a tile, about
    symmetric: bool = True  # a tile serves both halves of the matrix where both sides are the same points
    columns: bool = False  # right-hand sides are laid out as columns, padded to a multiple of 16, not as rows
    precision: str = ""  # "float16", "bfloat16" or "tf32", what points are rounded to (`precision`); "" for no rounding


def usual(device: torch.device) -> Plan:
    """Return the default plan, for sizes without a measurement."""
    return Plan(768 if device.type == "cpu" else 4096)


def bounds(n: int, tile: int, multiple: int) -> Bounds:
    """Cut n points into blocks of about `tile`; their number is a multiple of `multiple` unless blocks get small."""
    blocks = -(-n // tile)
    if blocks > 1:
        blocks = -(-blocks // multiple) * multiple
    each = -(-n // blocks // ALIGNED) * ALIGNED
    return [(start, min(n, start + each)) for start in range(0, n, each)]


def round_robin(blocks: Bounds) -> Iterator[Pairs]:
    """Yield rounds of pairs, every pair of blocks and every block with itself once, each block once in a round."""
    yield [(block, block) for block in blocks]
    places: list[tuple[int, int] | None] = [*blocks, *([None] if len(blocks) % 2 else [])]
    ring = len(places) - 1
    for turn in range(ring):
        order = [places[-1], *(places[(turn + step) % ring] for step in range(ring))]
        pairs = [(order[0], order[1]), *((order[1 + k], order[-k]) for k in range(1, (ring + 1) // 2))]
        yield [(max(a, b), min(a, b)) for a, b in pairs if a is not None and b is not None]


def latin(rows: Bounds, columns: Bounds) -> Iterator[Pairs]:
    """Yield rounds of pairs of a row block with a column block, each block once in a round at most."""
    most = max(len(rows), len(columns))
    for turn in range(most):
        chosen = [(i, (i + turn) % most) for i in range(len(rows))]
        yield [(rows[i], columns[j]) for i, j in chosen if j < len(columns)]


def shares(n: int, tile: int, count: int) -> Bounds:
    """Cut n points into `count` shares of many tiles each; points that fit one tile are one share."""
    return bounds(n, n if n <= tile else -(-n // count), 1) if n else []


def rounds(n: int, m: int, same: bool, tile: int, members: int) -> list[Pairs]:
    """Return rounds that cover all tiles, as pairs of shares; only one half where both sides are the same points.

    There are as few rounds as the number of members allows, because members wait for each other after each.
    """
    if same:
        return list(round_robin(shares(n, tile, 2 * members)))
    return list(latin(shares(n, tile, members), shares(m, tile, members)))


def dealt(n: int, tile: int, members: int, processes: int, number: int) -> list[Pairs]:
    """Return the rounds of one of several processes that cover all tiles of a symmetric matrix together.

    Pairs of shares stand in one order, row by row; each process gets a stretch of them. Its threads share a pair.
    `members` are the threads of this process, the one of that `number`.
    """
    count = max(2 * processes, min(max(_SHARES, 4 * processes), n // tile))
    blocks = bounds(n, -(-n // count), 1)
    each = len(blocks) ** 2 / 2 / processes
    low, high = each * number, math.inf if number + 1 == processes else each * (number + 1)
    own: Pairs = []
    for i, rows in enumerate(blocks):
        if (i + 1) ** 2 / 2 > low and i**2 / 2 < high:
            middles = ((j, i**2 / 2 + j + (0.5 if j < i else 0.25)) for j in range(i + 1))
            own += [(rows, blocks[j]) for j, at in middles if low <= at < high]
    if members == 1:
        return [own]
    return [pairs for rows, columns in own for pairs in _among(rows, columns, tile, members)]


def _among(rows: tuple[int, int], columns: tuple[int, int], tile: int, members: int) -> Iterator[Pairs]:
    """Yield the rounds in which threads share a pair of shares."""
    top, left = rows[0], columns[0]
    for pairs in rounds(rows[1] - top, columns[1] - left, rows == columns, tile, members):
        yield [((top + a, top + b), (left + c, left + d)) for (a, b), (c, d) in pairs]


def tiles_of(turns: list[Pairs], tile: int, same: bool, member: Member) -> Iterator[Place]:
    """Yield the tiles of one member, which waits for the others at the end of each round."""
    for pairs in turns:
        for rows, columns in pairs[member.number :: member.count]:
            half = same and rows == columns
            for top, bottom in _within(rows, tile):
                for left, right in _within(columns, tile):
                    if left <= top or not half:
                        member.check()
                        yield Place(top, bottom, left, right)
        member.wait()


def _within(share: tuple[int, int], tile: int) -> Bounds:
    start, stop = share
    return [(start + a, start + b) for a, b in bounds(stop - start, tile, 1)]
