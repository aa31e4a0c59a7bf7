"""The RBF (squared exponential) family: k = exp(-s / 2) (Rasmussen and Williams 2006, eq. 4.9)."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel, RBFKernel, keops

from autokern.kernels.elementary import exp_
from autokern.kernels.family import Family, of_unit_lengthscale


def exponential(u: Any) -> Any:
    """Return the exponential of u."""
    return u.exp()


def decay(u: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
    """Replace u by its exponential, which is also the slope."""
    k = exp_(u)
    if slope is not None:
        slope.copy_(k)
    return k


def plain(dtype: torch.dtype) -> Kernel:
    """Return gpytorch's kernel of embedded points."""
    return of_unit_lengthscale(RBFKernel(), dtype)


RBF = Family(
    "rbf",
    -0.5,
    exponential,
    decay,
    (exponential,) * 5,
    plain,
    slope_is_value=True,
    kernels=(RBFKernel, keops.RBFKernel),
    stock_passes=lambda d: 6.0,
    kept=lambda d: 3,
)
