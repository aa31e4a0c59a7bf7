"""The rational quadratic family: k = (1 + s / (2 alpha))^-alpha (Rasmussen and Williams 2006, eq. 4.19).

The factor ``1 / (2 alpha)`` is folded into the points, so that ``k = (1 + u)^-alpha``.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel, RQKernel

from autokern.kernels.elementary import exp_
from autokern.kernels.family import Family, Shape


def _read(kernel: Kernel) -> torch.Tensor:
    alpha: torch.Tensor = kernel.alpha
    return alpha.unsqueeze(-1)


def _embed(kernel: Kernel, x: torch.Tensor) -> torch.Tensor:
    return x / (kernel.lengthscale * (2 * _read(kernel)).sqrt())


def _value(u: Any, alpha: Any) -> Any:
    """Return ``(1 + u)^-alpha``, with the rounding of ``1 + u`` corrected to first order, as in log1p."""
    w = u + 1
    return (-alpha * (w.log() + (u - (w - 1)) / w)).exp()


def _first(u: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    return -alpha * (-(alpha + 1) * u.log1p()).exp()


def _epilogue(u: torch.Tensor, slope: torch.Tensor | None, alpha: torch.Tensor) -> torch.Tensor:
    if slope is None:
        return exp_(u.log1p_().mul_(-alpha))
    torch.add(u, 1, out=slope)
    k = exp_(u.log1p_().mul_(-alpha))
    torch.div(k, slope, out=slope).mul_(-alpha)
    return k


def _shape_slope(k: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    return torch.xlogy(k, k) / alpha


def _plain(dtype: torch.dtype, alpha: torch.Tensor) -> Kernel:
    kernel = RQKernel(batch_shape=alpha.shape[:-2]).to(dtype)
    kernel.alpha = alpha.squeeze(-1)
    kernel.lengthscale = (2 * alpha).rsqrt()
    return kernel


RQ = Family(
    "rq",
    1.0,
    _value,
    _epilogue,
    (_first,),
    _plain,
    kernels=(RQKernel,),
    embed=_embed,
    stock_passes=lambda d: 11.0,
    kept=lambda d: 5,
    shape=Shape(_read, _shape_slope),
)
