"""Dispatched covariance matrices of gpytorch kernels for direct use, without hooks. Floor 4."""

from __future__ import annotations

from typing import cast

import gpytorch
import torch

from autokern import kernels
from autokern.dispatch import route
from autokern.errors import SettingsError
from autokern.op import get

__all__ = ["matrix"]

_matrix = route(get("kernel_matrix"))


def matrix(kernel: gpytorch.kernels.Kernel, x1: torch.Tensor, x2: torch.Tensor | None = None) -> torch.Tensor:
    """Return the dense covariance matrix of a gpytorch kernel.

    Parameters
    ----------
    kernel : gpytorch.kernels.Kernel
        Any kernel; those that autokern does not know are evaluated by gpytorch.
    x1 : Tensor
        Points, shape ``(..., n, d)``.
    x2 : Tensor, optional
        Points, shape ``(..., m, d)``; `x1` if left out.

    Returns
    -------
    Tensor
        Shape ``(..., n, m)``.

    Raises
    ------
    SettingsError
        If the points have different numbers of dimensions, or others than the kernel has lengthscales.

    Examples
    --------
    >>> k = autokern.covariance.matrix(gpytorch.kernels.RBFKernel(), torch.rand(5, 2))  # doctest: +SKIP
    """
    x1 = x1.unsqueeze(-1) if x1.dim() == 1 else x1
    x2 = x1 if x2 is None else x2.unsqueeze(-1) if x2.dim() == 1 else x2
    if x1.shape[-1] != x2.shape[-1]:
        raise SettingsError(
            f"covariance of points with {x1.shape[-1]} and {x2.shape[-1]} input dimensions was asked for; "
            "x1 and x2 need the same number"
        )
    if kernels.family_name(kernel) is None:
        return cast("torch.Tensor", kernel(x1, x2).to_dense())
    if kernel.active_dims is not None:
        same = x1 is x2
        x1 = x1.index_select(-1, kernel.active_dims)
        x2 = x1 if same else x2.index_select(-1, kernel.active_dims)
    wanted = getattr(kernel, "base_kernel", kernel).ard_num_dims
    if wanted not in (None, x1.shape[-1]):
        raise SettingsError(
            f"covariance of points with {x1.shape[-1]} input dimensions was asked for, of a kernel with {wanted} "
            "lengthscales; give it as many dimensions"
        )
    return cast("torch.Tensor", _matrix(kernel, x1, x2))
