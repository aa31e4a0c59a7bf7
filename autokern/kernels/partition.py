"""Partition of a product into tiles, and of the tiles among threads.

No two threads may ever add to the same numbers, and every sum must be taken in one order. So pairs of shares follow a
round-robin schedule (the circle method, E. Lucas 1883): in each round every share belongs to one pair. A share holds
many tiles, so that rounds are few: threads wait for each other at the end of each round.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from autokern.system.thread_pool import Member

__all__ = [
    "ALIGNED",
    "Bounds",
    "Pairs",
    "Place",
    "Plan",
    "bounds",
    "dealt",
    "latin",
    "rounds",
    "shares",
    "tournament",
    "usual",
]

Bounds = list[tuple[int, int]]
Pairs = list[tuple[tuple[int, int], tuple[int, int]]]
ALIGNED = 16
"""Blocks begin at multiples of this."""


class Place(NamedTuple):
    """First row and column of a tile, and those behind its last."""

    top: int
    bottom: int
    left: int
    right: int


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
    precision : {"", "float16", "bfloat16", "tf32"}
        What points are rounded to before they are multiplied (`narrow`); empty for their own dtype.
    """

    tile: int = 1024
    symmetric: bool = True
    columns: bool = False
    compiled: bool = False
    precision: str = ""


def usual(device: torch.device) -> Plan:
    """Return the plan to go by where none is measured."""
    return Plan(768 if device.type == "cpu" else 4096)


def bounds(n: int, tile: int, multiple: int) -> Bounds:
    """Cut n points into blocks of about `tile`, as many as a multiple says unless they get too small."""
    blocks = -(-n // tile)
    if blocks > 1:
        blocks = -(-blocks // multiple) * multiple
    each = -(-n // blocks // ALIGNED) * ALIGNED
    return [(start, min(n, start + each)) for start in range(0, n, each)]


def tournament(blocks: Bounds) -> Iterator[Pairs]:
    """Yield rounds of pairs, every pair of blocks and every block with itself once, each block once in a round."""
    yield [(block, block) for block in blocks]
    players: list[tuple[int, int] | None] = [*blocks, *([None] if len(blocks) % 2 else [])]
    ring = len(players) - 1
    for turn in range(ring):
        order = [players[-1], *(players[(turn + step) % ring] for step in range(ring))]
        meetings = [(order[0], order[1]), *((order[1 + k], order[-k]) for k in range(1, (ring + 1) // 2))]
        yield [(max(a, b), min(a, b)) for a, b in meetings if a is not None and b is not None]


def latin(rows: Bounds, columns: Bounds) -> Iterator[Pairs]:
    """Yield rounds of pairs of a row block with a column block, each block once in a round at most."""
    most = max(len(rows), len(columns))
    for turn in range(most):
        chosen = [(i, (i + turn) % most) for i in range(len(rows))]
        yield [(rows[i], columns[j]) for i, j in chosen if j < len(columns)]


def shares(n: int, tile: int, count: int) -> Bounds:
    """Cut n points into so many shares, each of them many tiles long; what fits a tile is one share."""
    return bounds(n, n if n <= tile else -(-n // count), 1) if n else []


def rounds(n: int, m: int, same: bool, tile: int, members: int) -> list[Pairs]:
    """Return the rounds in which all tiles are met, as pairs of shares: one half where both sides are the same points.

    There are as few rounds as so many members can have, for at the end of each they wait for each other.
    """
    if same:
        return list(tournament(shares(n, tile, 2 * members)))
    return list(latin(shares(n, tile, members), shares(m, tile, members)))


def dealt(turns: list[Pairs], tile: int, same: bool, member: Member) -> Iterator[Place]:
    """Yield the tiles of one member, who waits for the others at the end of each round."""
    for pairs in turns:
        for rows, columns in pairs[member.number :: member.count]:
            half = same and rows == columns
            for top, bottom in _within(rows, tile):
                for left, right in _within(columns, tile):
                    if left <= top or not half:
                        member.check()
                        yield Place(top, bottom, left, right)
        member.meet()


def _within(share: tuple[int, int], tile: int) -> Bounds:
    start, stop = share
    return [(start + a, start + b) for a, b in bounds(stop - start, tile, 1)]
