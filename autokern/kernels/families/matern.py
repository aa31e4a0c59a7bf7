"""The Matérn families of smoothness 1/2, 3/2 and 5/2 (Rasmussen and Williams 2006, eq. 4.17).

With ``u = 2 nu s`` and ``a = sqrt(u)``: ``exp(-a)``, ``(1 + a) exp(-a)`` and ``(1 + a + u / 3) exp(-a)``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from gpytorch.kernels import Kernel, MaternKernel, keops

from autokern.kernels.elementary import decay, root_
from autokern.kernels.family import TINY, Family, Spare, of_unit_lengthscale

_ZERO = 2e-15
"""Distances up to this count as zero, where the infinite slope of the Matérn 1/2 is replaced by zero."""


def _root(u: Any) -> Any:
    return (u + TINY).sqrt()


def _decay(u: Any) -> Any:
    return (-_root(u)).exp()


def _value32(u: Any) -> Any:
    a = _root(u)
    return (a + 1) * (-a).exp()


def _value52(u: Any) -> Any:
    a = _root(u)
    return (a + 1 + u * (1 / 3)) * (-a).exp()


def _epilogue12(u: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
    a = u.add_(TINY).sqrt_()
    if slope is None:
        return decay(a, a)
    decay(a, slope)
    slope.div_(a).mul_(-0.5).masked_fill_(a <= _ZERO, 0.0)
    return decay(a, a)


def _epilogue32(u: torch.Tensor, slope: torch.Tensor | None, spare: Spare = torch.empty_like) -> torch.Tensor:
    e = spare(u) if slope is None else slope
    a = root_(u, e)
    decay(a, e)
    k = torch.addcmul(e, a, e, out=a)
    if slope is not None:
        slope.mul_(-0.5)
    return k


def _epilogue52(u: torch.Tensor, slope: torch.Tensor | None, spare: Spare = torch.empty_like) -> torch.Tensor:
    e = spare(u) if slope is None else slope
    a = root_(u, e)
    decay(a, e)
    if slope is None:
        a.addcmul_(a, a, value=1 / 3)
        return torch.addcmul(e, a, e, out=a)
    k = torch.addcmul(a, a, a, value=1 / 3, out=spare(u))
    torch.addcmul(e, k, e, out=k)
    slope.addcmul_(a, e).mul_(-1 / 6)
    return k


def _first12(u: torch.Tensor) -> torch.Tensor:
    a = _root(u)
    return torch.where(a > _ZERO, -0.5 * _decay(u) / a, 0.0)


def _second12(u: torch.Tensor) -> torch.Tensor:
    a = _root(u)
    return torch.where(a > _ZERO, _decay(u) * (1 + a) / (4 * a) / u.clamp_min(TINY), 0.0)


def _of(nu: float) -> dict[str, Any]:
    def matches(kernel: Kernel) -> bool:
        return bool(kernel.nu == nu)

    def plain(dtype: torch.dtype) -> Kernel:
        return of_unit_lengthscale(MaternKernel(nu), dtype)

    made = functools.partial(MaternKernel, nu)
    return {"kernels": (MaternKernel, keops.MaternKernel), "matches": matches, "plain": plain, "make": made}


MATERN12 = Family(
    "matern12",
    1.0,
    _decay,
    _epilogue12,
    (_first12, _second12),
    kinked=True,
    stock_passes=lambda d: 8.0,
    **_of(0.5),
)
MATERN32 = Family(
    "matern32",
    3.0,
    _value32,
    _epilogue32,
    (lambda u: -0.5 * _decay(u), lambda u: 0.25 * _decay(u) / _root(u)),
    wants_spare=True,
    stock_passes=lambda d: 13.0,
    kept=lambda d: 7,
    **_of(1.5),
)
MATERN52 = Family(
    "matern52",
    5.0,
    _value52,
    _epilogue52,
    (
        lambda u: -(1 + _root(u)) * _decay(u) / 6,
        lambda u: _decay(u) / 12,
        lambda u: -_decay(u) / (24 * _root(u)),
    ),
    wants_spare=True,
    stock_passes=lambda d: 20.0,
    kept=lambda d: 7,
    **_of(2.5),
)
