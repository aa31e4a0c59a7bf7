"""A lower triangular matrix in blocks of rows, each as wide as its last row, to which rows are appended in place.

In online learning, the inverse factor of n points becomes that of n + q points by q new rows. They are written into
spare rows of the last block, or into a new block. Older rows are neither copied nor overwritten, so the old and the new
matrix share memory.
"""

from __future__ import annotations

import torch

from autokern.core.state import Lock

_ROWS = 256
"""Rows of a block: products are as fast per element as with the whole matrix, and skip half of the elements."""
_SPARE = 16
"""Fewest rows that a new block has space for."""
_claiming = Lock()


class _Block:
    """Rows from `start` on, in a storage ``(..., capacity, width)``; rows before `claimed` are in use."""

    __slots__ = ("claimed", "start", "storage")

    def __init__(self, start: int, storage: torch.Tensor, claimed: int) -> None:
        self.start, self.storage, self.claimed = start, storage, claimed

    def claims(self, stop: int, new: int) -> bool:
        """Claim the rows from `stop` to `new`; returns False if they are in use or do not fit."""
        if new > self.start + self.storage.shape[-2] or new > self.storage.shape[-1]:
            return False
        if self.storage.is_inference() and not torch.is_inference_mode_enabled():
            return False
        with _claiming.here():
            free = self.claimed == stop
            if free:
                self.claimed = new
        return free


class RowBlocks:
    """Blocks that share the memory of a lower triangular matrix ``(..., n, n)``; one block if it requires gradients."""

    def __init__(self, matrix: torch.Tensor) -> None:
        n = matrix.shape[-1]
        rows = n if matrix.requires_grad else _ROWS
        steps = [(start, min(n, start + rows)) for start in range(0, n, max(1, rows))]
        self._blocks = tuple(_Block(start, matrix[..., start:stop, :stop], stop) for start, stop in steps)
        self.n = n
        self.batch = matrix.shape[:-2]
        self.requires_grad = matrix.requires_grad

    def _pieces(self) -> list[tuple[int, int, torch.Tensor]]:
        """Return for each block its first row, the row after its last, and its values."""
        found = []
        for block, following in zip(self._blocks, (*self._blocks[1:], None), strict=True):
            stop = self.n if following is None else following.start
            found.append((block.start, stop, block.storage[..., : stop - block.start, :stop]))
        return found

    def right_transposed(self, b: torch.Tensor) -> torch.Tensor:
        """Return ``b @ matrix.mT`` for b ``(..., m, n)``."""
        return torch.cat([b[..., :stop] @ piece.mT for _, stop, piece in self._pieces()], dim=-1)

    def right(self, c: torch.Tensor) -> torch.Tensor:
        """Return ``c @ matrix`` for c ``(..., m, n)``."""
        (start, stop, last), *others = reversed(self._pieces())
        out = c[..., start:stop] @ last
        for start, stop, piece in others:
            out[..., :stop] += c[..., start:stop] @ piece
        return out

    def appended(self, rows: torch.Tensor) -> RowBlocks:
        """Return the matrix with q lower triangular rows ``(..., q, n + q)`` appended, without gradients."""
        n, new = self.n, rows.shape[-1]
        last = self._blocks[-1]
        blocks = self._blocks
        if not last.claims(n, new):
            spare = max(new - n, min(_ROWS, max(_SPARE, n // 8)))
            last = _Block(n, rows.new_zeros((*self.batch, spare, n + spare)), new)
            blocks = (*blocks, last)
        place = last.storage.data  # has its own version counter, so that graphs that hold earlier rows stay valid
        place[..., n - last.start : new - last.start, :new] = rows.detach()
        made = RowBlocks.__new__(RowBlocks)
        made._blocks, made.n, made.batch, made.requires_grad = blocks, new, self.batch, False
        return made

    def dense(self) -> torch.Tensor:
        """Return the matrix in one piece."""
        pieces = self._pieces()
        if len(pieces) == 1 and pieces[0][2].shape[-1] == self.n:
            return pieces[0][2]
        whole = pieces[0][2].new_zeros((*self.batch, self.n, self.n))
        for start, stop, piece in pieces:
            whole[..., start:stop, :stop] = piece
        return whole
