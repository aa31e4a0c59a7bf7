"""Squared distances by half-precision or TF32 products of points, with exact squared norms.

Tensor cores multiply numbers of 8 (bfloat16) or 11 bits (float16, TF32) and add in float32. Squared norms rounded to so
few bits would spoil ``u = gamma (|x|^2 + |x'|^2 - 2 x.x')``. Split into three numbers of that width (Dekker 1971, "A
floating-point technique for extending the available precision") they stay exact, so that only ``x.x'`` is rounded, and
one GEMM with d + 6 columns yields u.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from autokern.core.locks import Lock

EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "tf32": 2.0**-11}
"""Relative rounding of the factors, by precision."""
_STORED = {"float16": torch.float16, "bfloat16": torch.bfloat16, "tf32": torch.float32}
_PIECE = {"float16": torch.float16, "bfloat16": torch.bfloat16, "tf32": torch.bfloat16}
"""Dtype of a piece of a norm; every bfloat16 is representable in TF32."""
_PIECES = 3

_scopes = Lock()
_open, _before = 0, "none"


def extended(z: torch.Tensor, by: float, gamma: float, norm_last: bool, precision: str) -> torch.Tensor:
    """Return ``[by z, pieces of gamma |z|^2, ones]``, with the last two swapped if `norm_last`.

    Points ``(n, d)`` are centred and float32; the result is ``(n, d + 6)``, float32 for "tf32", and else of the dtype
    that `precision` names.
    """
    left, pieces = torch.linalg.vecdot(z, z).mul_(gamma), []
    for _ in range(_PIECES):
        piece = left.to(_PIECE[precision])
        left = left - piece
        pieces.append(piece)
    norms = torch.stack(pieces, -1).to(_STORED[precision])
    ones = torch.ones_like(norms)
    both = (ones, norms) if norm_last else (norms, ones)
    return torch.cat(((z * by).to(_STORED[precision]), *both), -1)


def holds(precision: str, gamma: float, *points: torch.Tensor) -> bool:
    """Whether points and their squared norms are in the range of a precision, 65504 for float16."""
    most = 0.5 * torch.finfo(_STORED[precision]).max
    largest = max((torch.linalg.vecdot(z, z).max().item() for z in points if z.numel()), default=0.0)
    return max(2 * abs(gamma), 1.0) * max(largest, 1.0) <= most


def distances(rows: torch.Tensor, columns: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` with ``rows @ columns^T``: sums of 16-bit products are in float32, float64 results are rounded."""
    if rows.dtype is out.dtype:
        return torch.mm(rows, columns.mT, out=out)
    if rows.dtype is torch.float64:
        return out.copy_(rows @ columns.mT)
    return torch.mm(rows, columns.mT, out_dtype=torch.float32, out=out)


@contextlib.contextmanager
def at_precision(precision: str) -> Iterator[None]:
    """Run float32 products on CUDA devices in TF32 if that is the precision.

    torch has this only as a setting of the process, so float32 products of other threads are rounded too meanwhile.
    """
    global _open, _before
    if precision != "tf32" or _scopes.entered():
        yield
        return
    with _scopes.here():
        if not _open:
            _before = torch.backends.cuda.matmul.fp32_precision
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        _open += 1
    try:
        yield
    finally:
        with _scopes.here():
            _open -= 1
            if not _open:
                torch.backends.cuda.matmul.fp32_precision = _before
