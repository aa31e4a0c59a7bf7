"""The candidates `cupy` of `cholesky` and `qr`: cuSOLVER through CuPy, for tensors on a CUDA device.

CuPy chooses other cuSOLVER routines than torch, batched ones for batches. DLPack passes matrices both ways without a
copy, on torch's current stream. CuPy's memory pool keeps its memory for the next call. The first call imports CuPy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from autokern.backends import installed
from autokern.core.problem import Problem
from autokern.ops._shared.problems import only
from autokern.ops.cholesky import CHOLESKY, with_ladder
from autokern.ops.qr import QR, Pair, differentiable_qr

_unsupported = only("CuPy needs data on a CUDA device", lambda p: p.device == "cuda")


def _unavailable(device: str) -> str | None:
    if torch.version.hip is not None:
        return "this torch is built for ROCm, and autokern uses CuPy with CUDA only"
    return None if installed("cupy") else "CuPy is not installed: `pip install 'autokern[cupy]'`"


@contextlib.contextmanager
def _on_stream_of(a: torch.Tensor) -> Iterator[Any]:
    """Yield CuPy on torch's current stream of a tensor's device; errors of cuSOLVER raise."""
    import cupy
    import cupyx

    stream, device = torch.cuda.current_stream(a.device), a.device.index
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14, which has deprecated the other way
        theirs = cupy.cuda.Stream.from_external(stream)
    else:
        theirs = cupy.cuda.ExternalStream(stream.cuda_stream, device)
    with cupy.cuda.Device(device), theirs, cupyx.errstate(linalg="raise"):
        yield cupy


def _decomposed(name: str, a: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Return the result of a function of `cupy.linalg`, or None if cuSOLVER fails or returns NaN."""
    with _on_stream_of(a) as cupy:
        try:
            found = getattr(cupy.linalg, name)(cupy.from_dlpack(a.detach()))
        except cupy.linalg.LinAlgError:
            return None
        parts = tuple(from_dlpack(part) for part in (found if isinstance(found, tuple) else (found,)))
    return parts if name == "qr" or bool(parts[0].diagonal(dim1=-2, dim2=-1).isfinite().all()) else None


def _cholesky_unsupported(problem: Problem) -> str | None:
    return "for calls that want no gradients" if problem.grad else _unsupported(problem)


@CHOLESKY.candidate("cupy", unsupported=_cholesky_unsupported, unavailable=_unavailable)
@with_ladder
def cholesky_by_cupy(a: torch.Tensor) -> Pair:
    """CuPy's Cholesky factorisation (cuSOLVER's potrf, batched for a batch)."""
    found = _decomposed("cholesky", a)
    return (a, a.new_ones(())) if found is None else (found[0], a.new_zeros(()))


def _qr_unsupported(problem: Problem) -> str | None:
    if problem.grad and problem.m < problem.n:
        return "with more columns than rows QR has no gradient"
    return _unsupported(problem)


def _qr(a: torch.Tensor) -> Pair:
    found = _decomposed("qr", a)
    return QR.stock.run(a) if found is None else (found[0], found[1])


@QR.candidate("cupy", unsupported=_qr_unsupported, unavailable=_unavailable)
def qr_by_cupy(a: torch.Tensor) -> Pair:
    """CuPy's Householder QR (cuSOLVER's geqrf and orgqr, batched for a batch)."""
    return differentiable_qr(_qr, a)
