"""The RBF (squared exponential) family: k = exp(-s / 2) (Rasmussen and Williams 2006, eq. 4.9)."""

from __future__ import annotations

import torch
from gpytorch.kernels import RBFKernel

from autokern.kernels.family import Family

__all__ = ["RBF", "decay"]


def decay(u: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
    """Turn u into its exponential in place, which is its own slope."""
    k = u.exp_()
    if slope is not None:
        slope.copy_(k)
    return k


RBF = Family("rbf", -0.5, decay, (torch.exp,) * 6, slope_is_value=True, passes=2, kernel=RBFKernel)
