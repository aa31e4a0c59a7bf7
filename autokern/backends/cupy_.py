"""The candidate `cupy` of `qr`: cuSOLVER through CuPy, for tensors on a CUDA device.

CuPy chooses other cuSOLVER routines than torch, batched ones for batches. DLPack passes matrices both ways without a
copy, on torch's current stream. CuPy's memory pool keeps its memory for the next call. The first call imports CuPy.
Its Cholesky factorisation took 1.3 to 9 times as long as torch's on an H100, on every problem.
"""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack

from autokern.backends import installed
from autokern.ops._candidates import every, only
from autokern.ops.decompositions import QR, Pair, differentiable_qr

_unsupported = every(
    only("with more columns than rows QR has no gradient", lambda p: not p.grad or p.m >= p.n),
    only("CuPy needs data on a CUDA device", lambda p: p.device == "cuda"),
)


def _unavailable(device: str) -> str | None:
    if torch.version.hip is not None:
        return "this torch is built for ROCm, and autokern uses CuPy with CUDA only"
    return None if installed("cupy") else "CuPy is not installed: `pip install 'autokern[cupy]'`"


def _qr(a: torch.Tensor) -> Pair:
    """Return CuPy's QR on torch's current stream, or stock's if cuSOLVER fails."""
    import cupy
    import cupyx

    stream, device = torch.cuda.current_stream(a.device), a.device.index
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14, where the other way is deprecated
        theirs = cupy.cuda.Stream.from_external(stream)
    else:
        theirs = cupy.cuda.ExternalStream(stream.cuda_stream, device)
    with cupy.cuda.Device(device), theirs, cupyx.errstate(linalg="raise"):
        try:
            q, r = map(from_dlpack, cupy.linalg.qr(cupy.from_dlpack(a.detach())))
        except cupy.linalg.LinAlgError:
            return QR.stock.run(a)
    return q, r


@QR.candidate("cupy", unsupported=_unsupported, unavailable=_unavailable)
def qr_by_cupy(a: torch.Tensor) -> Pair:
    """CuPy's Householder QR (cuSOLVER's geqrf and orgqr, batched for a batch)."""
    return differentiable_qr(_qr, a)
