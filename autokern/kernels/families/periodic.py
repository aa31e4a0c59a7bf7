"""The periodic family: k = exp(-2 sum_i sin^2(pi (x_i - x'_i) / p_i) / lengthscale_i), as gpytorch defines it.

``4 sin^2((a - b) / 2)`` is the squared distance of two points on the unit circle at the angles a and b (MacKay 1998,
"Introduction to Gaussian processes", eq. 47): a periodic kernel is an RBF of points laid on circles.
"""

from __future__ import annotations

import math

import torch
from gpytorch.kernels import Kernel, PeriodicKernel, keops

from autokern.kernels.families.rbf import decay, exponential, plain
from autokern.kernels.family import Family


def _embed(kernel: Kernel, x: torch.Tensor) -> torch.Tensor:
    angle = x * (2 * math.pi) / kernel.period_length
    circle = torch.cat(((angle / 2).sin().square() * -2, angle.sin()), -1)  # touches the origin: small norms nearby
    return circle / _both(kernel.lengthscale.sqrt().expand_as(angle[..., :1, :]))


def _both(scale: torch.Tensor) -> torch.Tensor:
    return torch.cat((scale, scale), -1)


PERIODIC = Family(
    "periodic",
    -0.5,
    exponential,
    decay,
    (exponential,) * 5,
    plain,
    slope_is_value=True,
    kernels=(PeriodicKernel, keops.PeriodicKernel),
    embed=_embed,
    differences=True,
    stock_passes=lambda d: 60.0 * d,  # gpytorch forms all differences of points
    kept=lambda d: 5 * d + 2,
)
