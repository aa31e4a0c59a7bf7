"""Covariance: the family, lengthscale and scale of a gpytorch kernel, and the plain differentiable way to evaluate it.

A Covariance is one family, one lengthscale, one scale: what the op `kernel_matrix` serves. Kernels are recognised by
exact type: a subclass may have changed the formula.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import gpytorch
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

from autokern.kernels.family import Family, family_of

__all__ = ["Covariance", "are_numbers", "family_name", "recognise", "reference", "same_points"]

_SERVED = (RBFKernel, MaternKernel)
"""Classes whose formula is one of the distance in units of the lengthscale alone."""


class Covariance(NamedTuple):
    """A stationary covariance with its hyperparameters.

    Parameters
    ----------
    family : Family
        The formula.
    lengthscale : Tensor
        Shape ``(..., 1, d)`` (ARD) or ``(..., 1, 1)``.
    outputscale : Tensor or None
        Shape ``(...)``; None means one.
    """

    family: Family
    lengthscale: torch.Tensor
    outputscale: torch.Tensor | None


def family_name(kernel: gpytorch.kernels.Kernel) -> str | None:
    """Return the family of a kernel (one scale around it allowed), or None if autokern does not know it."""
    found = _family(kernel.base_kernel if type(kernel) is ScaleKernel else kernel)
    return None if found is None else found.name


def _family(kernel: gpytorch.kernels.Kernel) -> Family | None:
    return family_of(kernel) if type(kernel) in _SERVED else None


def recognise(kernel: gpytorch.kernels.Kernel) -> Covariance:
    """Read family and hyperparameters off a gpytorch kernel for which `family_name` is not None."""
    outputscale = None
    if type(kernel) is ScaleKernel:
        outputscale, kernel = kernel.outputscale, kernel.base_kernel
    found = _family(kernel)
    if found is None:
        raise TypeError(f"{type(kernel).__name__} is not a kernel that autokern serves")
    return Covariance(found, kernel.lengthscale, outputscale)


def same_points(x1: torch.Tensor, x2: torch.Tensor) -> bool:
    """Whether two sets of points are equal by value; the same memory is equal without looking."""
    if x1 is x2:
        return True
    if x1.shape != x2.shape:
        return False
    if x1.data_ptr() == x2.data_ptr() and x1.stride() == x2.stride():
        return True
    return torch.equal(x1, x2)


def are_numbers(*points: torch.Tensor) -> bool:
    """Whether no coordinate is NaN or infinite."""
    return all(math.isfinite(x.detach().sum().item()) for x in points)


def reference(covariance: Covariance, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """Evaluate by explicit differences: the truth in float64, exact to rounding, differentiable twice and more.

    Parameters
    ----------
    covariance : Covariance
        Formula and hyperparameters.
    x1, x2 : Tensor
        Shapes ``(..., n, d)`` and ``(..., m, d)``.

    Returns
    -------
    Tensor
        Shape ``(..., n, m)``; takes ``n * m * d`` elements of memory.
    """
    difference = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    scaled = difference / covariance.lengthscale.unsqueeze(-2)
    k = covariance.family(scaled.square().sum(-1) * covariance.family.gamma)
    return k if covariance.outputscale is None else k * covariance.outputscale[..., None, None]
