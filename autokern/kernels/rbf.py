"""The RBF (squared exponential) family: k = exp(-s / 2) (Rasmussen and Williams 2006, eq. 4.9)."""

from __future__ import annotations

import torch

from autokern.kernels.family import Family

__all__ = ["RBF"]


def _epilogue(u: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
    k = u.exp_()
    if slope is not None:
        slope.copy_(k)
    return k


RBF = Family("rbf", -0.5, _epilogue, (torch.exp,) * 6, slope_is_value=True, passes=2)
