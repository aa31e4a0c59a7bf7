"""Hooks into linear_operator: Cholesky, QR, inv_quad_logdet.

Each wrapper runs the library's own function where the dispatcher must stay out: in compiled, traced or transformed
code, under a library setting that the user changed, and for arguments that the op does not support.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from linear_operator import settings as library
from linear_operator import utils
from linear_operator.operators import LinearOperator
from linear_operator.utils import qr as qr_module

from autokern.hooks.bypass import stay_out
from autokern.hooks.install import hook, stock_of
from autokern.model import memoized
from autokern.model.library_orders import EXACT, regime
from autokern.model.marginal import is_unstructured
from autokern.model.relied import DENSITY, MEMORY
from autokern.runtime.dispatch import route
from autokern.runtime.memo import floor_of

_THRESHOLD = 128
"""linear_operator's own default of `stable_qr_cpu_threshold`; another value is the user's order."""
_TINY = 1e-6
_FACTORS = ("cholesky", "root_decomposition", "lanczos", "symeig", "diagonalization")

_cholesky_module = sys.modules.get("linear_operator.utils.cholesky")

_dispatch_cholesky = route("cholesky", looked=True)
_dispatch_inv_quad_logdet = route("inv_quad_logdet", looked=True)
_dispatch_qr = route("qr", looked=True)


_small_cholesky, _small_qr = (floor_of(op).covers for op in ("cholesky", "qr"))

_stock_cholesky = stock_of(_cholesky_module, "_psd_safe_cholesky")


@hook(_cholesky_module, "_psd_safe_cholesky", idle=lambda A, *_, **__: _small_cholesky(A))
def _psd_safe_cholesky(A: Any, out: Any = None, jitter: float | None = None, max_tries: int | None = None) -> Any:
    if out is not None or stay_out():
        return _stock_cholesky(A, out=out, jitter=jitter, max_tries=max_tries)
    return _dispatch_cholesky(A, jitter, max_tries)


_stock_qr = stock_of(qr_module, "stable_qr")


@hook(qr_module, "stable_qr", idle=lambda mat, *_, **__: _small_qr(mat))
def _stable_qr(mat: Any) -> Any:
    if stay_out() or library.stable_qr_cpu_threshold.value() != _THRESHOLD:
        return _stock_qr(mat)
    q, r = _dispatch_qr(mat)
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    tiny = diagonal.abs() < _TINY
    if not torch.any(tiny):
        return q, r
    away_from_zero = torch.where(diagonal < 0, -_TINY, _TINY)
    return q, r + torch.diag_embed(torch.where(tiny, away_from_zero, 0.0).to(r.dtype))


for _importing in (utils, sys.modules.get("linear_operator.utils.pinverse")):
    if stock_of(_importing, "stable_qr") is _stock_qr:
        hook(_importing, "stable_qr", relies=None)(_stable_qr)


_stock_inv_quad_logdet = stock_of(LinearOperator, "inv_quad_logdet")


def _is_not_dense(self: Any, inv_quad_rhs: Any = None, logdet: bool | None = False, *_: Any, **__: Any) -> bool:
    return inv_quad_rhs is None or not logdet or not is_unstructured(self, lazy=True)


@hook(LinearOperator, "inv_quad_logdet", relies=(*DENSITY, *MEMORY), idle=_is_not_dense)
def _inv_quad_logdet(
    self: Any, inv_quad_rhs: Any = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
) -> Any:
    if stay_out() or _factorised_already(self):
        return _stock_inv_quad_logdet(self, inv_quad_rhs, logdet, reduce_inv_quad)
    exact = regime(self.size(-1)) == EXACT
    evaluated = self.evaluate_kernel() if _holds_kernels(self) else self
    if _factorised_already(evaluated) or not is_unstructured(evaluated):
        return _stock_inv_quad_logdet(self, inv_quad_rhs, logdet, reduce_inv_quad)
    return _dispatch_inv_quad_logdet(evaluated, inv_quad_rhs, bool(reduce_inv_quad), exact)


def _factorised_already(operator: Any) -> bool:
    """Whether stock has cached a factor or root of this operator."""
    return any(name in _FACTORS for name in memoized.names(operator))


def _holds_kernels(operator: Any) -> bool:
    """Whether an operator or one of its terms is a kernel matrix that is not evaluated yet."""
    return any(p.__class__.__name__ == "LazyEvaluatedKernelTensor" for p in (operator, *operator._args))
