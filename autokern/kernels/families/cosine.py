"""The cosine family: k = cos(pi r / p) with the Euclidean distance r and the period length p.

With ``u = (pi r / p)^2`` and ``a = sqrt(u)``: ``cos(a)``, slope ``-sin(a) / (2 a)``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.kernels import CosineKernel, Kernel, RBFKernel

from autokern.kernels.family import TINY, Family

_SMALL = 1e-3
"""Below this u the second derivative comes from its series, since the quotient loses digits."""


def _embed(kernel: Kernel, x: torch.Tensor) -> torch.Tensor:
    return x * math.pi / kernel.period_length


def _root(u: Any) -> Any:
    return (u + TINY).sqrt()


def _value(u: Any) -> Any:
    return _root(u).cos()


def _first(u: torch.Tensor) -> torch.Tensor:
    a = _root(u)
    return -0.5 * torch.sin(a) / a


def _second(u: torch.Tensor) -> torch.Tensor:
    a = _root(u.clamp_min(_SMALL))
    return torch.where(u < _SMALL, (1 - u / 10 + u * u / 280) / 12, (torch.sin(a) - a * torch.cos(a)) / (4 * a**3))


def _epilogue(u: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
    a = u.add_(TINY).sqrt_()
    if slope is not None:
        torch.sin(a, out=slope).div_(a).mul_(-0.5)
    return a.cos_()


def _plain(dtype: torch.dtype) -> Kernel:
    kernel = CosineKernel().to(dtype)
    kernel.period_length = torch.tensor(math.pi, dtype=dtype, device="cpu")  # a float would be rounded to float32
    return kernel


COSINE = Family(
    "cosine",
    1.0,
    _value,
    _epilogue,
    (_first, _second),
    _plain,
    kernels=(CosineKernel,),
    embed=_embed,
    differences=True,
    make=RBFKernel,  # samples use an RBF, as a cosine is positive definite in one dimension only
)
