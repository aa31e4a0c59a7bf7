"""Dispatched covariance matrices of gpytorch kernels for direct use, without hooks."""

from __future__ import annotations

from typing import cast

import gpytorch
import torch

from autokern import ops as _ops  # noqa: F401  (declares every op)
from autokern.core import registry
from autokern.core.errors import SettingsError
from autokern.core.registry import get
from autokern.kernels import tree as trees
from autokern.runtime.dispatch import route

__all__ = ["matmul", "matrix"]

_matrix = route(get("kernel_matrix"))
_matmul = route(get("kernel_matmul"))


def matrix(kernel: gpytorch.kernels.Kernel, x1: torch.Tensor, x2: torch.Tensor | None = None) -> torch.Tensor:
    """Return the dense covariance matrix of a gpytorch kernel, differentiable.

    Parameters
    ----------
    kernel : gpytorch.kernels.Kernel
        Any kernel; gpytorch evaluates kernels that autokern does not know.
    x1 : Tensor
        Points, shape ``(..., n, d)``, or ``(n)`` for one dimension; float32 or float64, as the kernel's parameters.
    x2 : Tensor, optional
        Points, shape ``(..., m, d)`` or ``(m)``; default `x1`.

    Returns
    -------
    Tensor
        Shape ``(..., n, m)``, of the points' dtype.

    Raises
    ------
    SettingsError
        If the points have different numbers of dimensions, or another number than the kernel has lengthscales.
    MemoryBudgetError
        If no candidate fits the memory limit.

    Notes
    -----
    Where that is faster than stock, one GEMM computes the squared distances and the formula is applied in place. The
    formulae are those of Rasmussen and Williams (2006), chapter 4.

    Examples
    --------
    >>> x = torch.linspace(0, 1, 5).unsqueeze(-1)
    >>> k = autokern.covariance.matrix(gpytorch.kernels.RBFKernel(), x)
    >>> k.shape, k.diagonal().tolist()
    (torch.Size([5, 5]), [1.0, 1.0, 1.0, 1.0, 1.0])
    """
    registry.load("")  # plugins may add the kernel's family
    x1, x2 = _points(x1, x2)
    node = trees.form(kernel)
    if node is None or not trees.leaves(node):
        return cast("torch.Tensor", kernel(x1, x2).to_dense())
    x1, x2 = _active(kernel, x1, x2)
    wanted = getattr(getattr(kernel, "base_kernel", kernel), "ard_num_dims", None)
    if wanted not in (None, x1.shape[-1]):
        raise SettingsError(
            f"the points have {x1.shape[-1]} input dimensions and the kernel has {wanted} lengthscales; "
            "the numbers must be the same"
        )
    return cast("torch.Tensor", _matrix(kernel, x1, x2))


def matmul(
    kernel: gpytorch.kernels.Kernel, x1: torch.Tensor, x2: torch.Tensor | None, rhs: torch.Tensor
) -> torch.Tensor:
    """Return the product of a gpytorch kernel's covariance matrix with few columns, for any number of points.

    Where tiles are faster, or the whole matrix does not fit the memory, neither the product nor its gradients by
    points, columns and hyperparameters form the matrix.

    Parameters
    ----------
    kernel : gpytorch.kernels.Kernel
        Any kernel; gpytorch evaluates kernels with parts that autokern does not know.
    x1 : Tensor
        Points of the rows, shape ``(..., n, d)``; float32 or float64, as the kernel's parameters.
    x2 : Tensor or None
        Points of the columns, shape ``(..., m, d)``; None for `x1`.
    rhs : Tensor
        Shape ``(..., m, t)``, or ``(m)`` for a single vector, of the points' dtype.

    Returns
    -------
    Tensor
        Shape ``(..., n, t)``, or ``(n)``, of the points' dtype.

    Raises
    ------
    SettingsError
        If the points have different numbers of dimensions, or the number of rows of `rhs` is not m.
    MemoryBudgetError
        If no candidate fits the memory limit.

    Notes
    -----
    The product is computed tile by tile, as in Wang et al. (2019), "Exact Gaussian processes on a million data points",
    and KeOps (Charlier et al. 2021), with one GEMM for the distances of a tile and one for its product.

    Examples
    --------
    >>> x, rhs = torch.linspace(0, 1, 2000).unsqueeze(-1), torch.ones(2000, 3)
    >>> product = autokern.covariance.matmul(gpytorch.kernels.MaternKernel(), x, None, rhs)
    >>> product.shape
    torch.Size([2000, 3])
    """
    x1, x2 = _points(x1, x2)
    columns = rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs
    if columns.shape[-2] != x2.shape[-2]:
        raise SettingsError(
            f"rhs has {columns.shape[-2]} rows and x2 has {x2.shape[-2]} points; rhs needs one row for each point"
        )
    x1, x2 = _active(kernel, x1, x2)
    out = cast("torch.Tensor", _matmul(kernel, x1, x2, columns))
    return out.squeeze(-1) if rhs.dim() == 1 else out


def _points(x1: torch.Tensor, x2: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both sets of points as matrices; x2 is x1 itself if None."""
    x1 = x1.unsqueeze(-1) if x1.dim() == 1 else x1
    x2 = x1 if x2 is None else x2.unsqueeze(-1) if x2.dim() == 1 else x2
    if x1.shape[-1] != x2.shape[-1]:
        raise SettingsError(
            f"x1 and x2 have {x1.shape[-1]} and {x2.shape[-1]} input dimensions; the numbers must be the same"
        )
    return x1, x2


def _active(kernel: gpytorch.kernels.Kernel, x1: torch.Tensor, x2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Select a kernel's active dimensions, as gpytorch does before `forward`."""
    if kernel.active_dims is None:
        return x1, x2
    first = x1.index_select(-1, kernel.active_dims)
    return first, first if x1 is x2 else x2.index_select(-1, kernel.active_dims)
