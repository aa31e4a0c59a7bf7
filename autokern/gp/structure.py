"""Structure found in points: those that occur several times, and grids. It holds by value, and is looked for once.

Points are one only where their rows are equal bit by bit. A grid has every combination of the values along its axes
exactly once, in any order.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from autokern.core.locks import Lock

__all__ = ["LEAST", "MOST_DISTINCT", "Grid", "Repeats", "Structure", "of"]

LEAST = 200
"""Points from which on structure is looked for: fewer take a millisecond in any way."""
MOST_DISTINCT = 0.9
"""Share of points that differ up to which merging pays."""
LONGEST = 0.25
"""Share of points along one axis up to which its eigenvectors take less time than a factor of all points."""
_KEPT, _KEPT_BYTES = 64, 2**24
"""Most sets of points that are kept, and most bytes of several; a larger set is kept for its tensor's life."""
_TYPES = {torch.float64: np.int64, torch.float32: np.int32}
_MIX = np.uint64(0x9E3779B97F4A7C15)

Axes = tuple[tuple[int, ...], ...]


class Repeats(NamedTuple):
    """Which of n points are the same."""

    first: torch.Tensor  # the row at which each point occurs first, ``(m,)``
    group: torch.Tensor  # the number of each row's point, ``(n,)``
    counts: torch.Tensor  # how often each point occurs, ``(m,)``, in the dtype of the points


class Grid(NamedTuple):
    """The rows of n points that are a grid."""

    shape: torch.Size  # values along each axis
    order: torch.Tensor  # the rows in the order of the grid, the last axis fastest, ``(n,)``
    lines: list[torch.Tensor]  # for each axis the rows along it through one point that all have in common


class Structure:
    """What was found in points ``(n, d)``, of which it keeps a copy.

    `may_be_grid` says whether the values of any column repeat as they do on a grid.
    """

    __slots__ = ("_grids", "may_be_grid", "points", "repeats")

    def __init__(self, x: torch.Tensor) -> None:
        self.points = x.detach().clone(memory_format=torch.contiguous_format)
        finite = bool(torch.isfinite(self.points).all())
        self.repeats = self._repeated() if finite else None  # None where few points repeat
        self.may_be_grid = finite and self.repeats is None and any(map(self._may_be_axis, self.points.numpy().T))
        self._grids: dict[Axes, Grid | None] = {}

    def _repeated(self) -> Repeats | None:
        n = len(self.points)
        first, group = _numbered(self.points.numpy(), MOST_DISTINCT * n)
        if len(first) > MOST_DISTINCT * n:
            return None
        counts = torch.from_numpy(np.bincount(group)).to(self.points.dtype)
        return Repeats(torch.from_numpy(first), torch.from_numpy(group), counts)

    @property
    def distinct(self) -> int:
        """How many points differ; all where merging does not pay."""
        return len(self.points if self.repeats is None else self.repeats.first)

    def grid(self, axes: Axes) -> Grid | None:
        """Return the grid whose axes are these groups of columns, None where the points are none.

        An axis of which the points have one value alone is left out; a grid has two at least, none of them too long.
        """
        if axes not in self._grids:
            self._grids[axes] = self._as_grid(axes) if self.may_be_grid and len(axes) > 1 else None
        return self._grids[axes]

    @staticmethod
    def _may_be_axis(column: npt.NDArray[np.floating]) -> bool:
        values = 1 + np.count_nonzero(np.diff(np.sort(column)))
        return bool(1 < values <= LONGEST * len(column) and len(column) % values == 0)

    def _as_grid(self, axes: Axes) -> Grid | None:
        rows = self.points.numpy()
        n, flat, shape = len(rows), np.zeros(len(rows), np.int64), []
        for columns in axes:
            first, place = _numbered(rows[:, columns], LONGEST * n)
            if n % len(first) or len(first) > LONGEST * n:
                return None
            if len(first) > 1:
                flat = flat * len(first) + place
                shape.append(len(first))
        if len(shape) < 2 or math.prod(shape) != n or np.bincount(flat, minlength=n).max() > 1:
            return None
        order = np.argsort(flat)
        places = order.reshape(shape)
        lines = [np.moveaxis(places, axis, 0).reshape(size, -1)[:, 0] for axis, size in enumerate(shape)]
        return Grid(torch.Size(shape), torch.from_numpy(order), [torch.from_numpy(line.copy()) for line in lines])


_Mark = tuple[torch.Size, torch.dtype, bytes]
_kept: dict[_Mark, tuple[Structure, weakref.ref[torch.Tensor] | None]] = {}
"""What was found, and the tensor with which a large set ends; that may be at any time, in any thread."""
_lock = Lock()


def of(x: torch.Tensor) -> Structure | None:
    """Return the structure of points; None where they are few, batched, not on the CPU, or want gradients.

    What was found is kept by shape and last row, and holds for points that equal its copy.
    """
    if x.dim() != 2 or len(x) < LEAST or x.requires_grad or not x.shape[1]:
        return None
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or not x.is_cpu or x.dtype not in _TYPES:
        return None
    mark = x.shape, x.dtype, x.detach()[-1].numpy().tobytes()
    known = _kept.get(mark)
    if known is not None and torch.equal(known[0].points, x):
        return known[0]
    found = Structure(x)
    large = found.points.nbytes > _KEPT_BYTES
    end = weakref.ref(x, functools.partial(_ended, mark)) if large else None
    with _lock.here():
        _kept.pop(mark, None)
        _kept[mark] = found, end
        for oldest in list(_kept)[:-1]:
            if len(_kept) <= _KEPT and _bytes() <= _KEPT_BYTES:
                break
            _kept.pop(oldest, None)
    return found


def _ended(mark: _Mark, end: weakref.ref[torch.Tensor]) -> None:
    """Drop a set whose tensor has ended, unless another has taken its place."""
    known = _kept.get(mark)
    if known is not None and known[1] is end:
        _kept.pop(mark, None)


def _bytes() -> int:
    return sum(known.points.nbytes for known, _ in list(_kept.values()))


def _numbered(rows: npt.NDArray[np.floating], most: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first place of each different row, and the number of each row; all differ where more than `most` do.

    Rows are compared by a hash, and rows with the same hash bit by bit.
    """
    bits = np.ascontiguousarray(rows).view(np.int64 if rows.dtype == np.float64 else np.int32)
    hashes = np.zeros(len(bits), np.uint64)
    for column in bits.T:
        hashes ^= column.astype(np.uint64)
        hashes *= _MIX
        hashes ^= hashes >> np.uint64(29)
    if np.count_nonzero(np.diff(np.sort(hashes))) < most:
        _, first, number = np.unique(hashes, return_index=True, return_inverse=True)
        if np.array_equal(bits, bits[first[number]]):
            return first, number
    every = np.arange(len(bits))
    return every, every
