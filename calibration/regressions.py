"""The data sets and exact models of `baselines.py`: elevations, simulated roads, the CO₂ series.

Inputs and targets are standardised; errors are told in the unit of the targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import gpytorch
import torch
from elevation import terrain
from large_models import waves
from torch import Tensor
from workloads import co2_data, scaled, standardise

ROADS, HELD = 434_874, 4000
SEGMENT, CORNER = 400, 0.05
"""Points along a road, and the standard deviation of its turns, in radians."""
LENGTHS = (0.4, 0.08, 0.08)
"""Lengthscales of the heights along the number of a road and both directions, in units of the region."""
FORECAST = 10
"""Every tenth week of the CO₂ series is held out."""


class Data(NamedTuple):
    """Points to learn in random order, points held out, and what a unit of the targets is."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor
    scale: float
    unit: str
    kernel: Callable[[], gpytorch.kernels.Kernel]


def heights() -> Data:
    """Return the elevation model of `elevation.py`, places in kilometres."""
    land = terrain()
    mean, scale = land.y.mean(), land.y.std()
    y, held = (land.y - mean) / scale, (land.held_y - mean) / scale
    return Data(land.x, y, land.held_x, held, scale.item(), "m", lambda: scaled("matern52", 2))


def roads(n: int = ROADS) -> Data:
    """Return simulated heights along roads, as many and as wide as 3D Road Network (Kaul et al. 2013).

    A road starts anywhere in the unit square and goes on in steps of 0.0005 that turn a little. Inputs are the number
    of the road, scaled to the unit interval, and both coordinates. Heights are a random function of a Matérn 3/2
    spectrum, and noise with a hundredth of its variance.
    """
    generator = torch.Generator().manual_seed(0)
    many = math.ceil((n + HELD) / SEGMENT)
    places = torch.rand(many, 1, 2, generator=generator, dtype=torch.float64)
    turns = CORNER * torch.randn(many, SEGMENT, generator=generator, dtype=torch.float64)
    angles = 2 * math.pi * torch.rand(many, 1, generator=generator, dtype=torch.float64) + turns.cumsum(-1)
    along = places + 0.0005 * torch.stack([angles.cos(), angles.sin()], -1).cumsum(1)
    number = torch.linspace(0, 1, many, dtype=torch.float64).view(-1, 1, 1).expand(many, SEGMENT, 1)
    x = torch.cat([number, along], -1).flatten(0, 1)
    x = x[torch.randperm(len(x), generator=generator)[: n + HELD]]
    y = torch.cat([waves(some, (1.0, 3.0, LENGTHS), torch.Generator().manual_seed(1)) for some in x.split(4096)])
    y = standardise(y + 0.1 * torch.randn(len(y), generator=generator, dtype=torch.float64))
    return Data(x[:n], y[:n], x[n:], y[n:], 1.0, "σ", lambda: scaled_three_halves(3))


def scaled_three_halves(d: int) -> gpytorch.kernels.Kernel:
    return gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5, ard_num_dims=d))


def co2() -> Data:
    """Return the CO₂ series, for a sum of three Matérn processes: trend, season and what is rough."""
    x, y = co2_data()
    out = torch.arange(len(x)) % FORECAST == FORECAST // 2
    from statsmodels.datasets import co2 as recorded

    scale = float(recorded.load_pandas().data["co2"].interpolate().std())
    return Data(x[~out], y[~out], x[out], y[out], scale, "ppm", three_processes)


def three_processes() -> gpytorch.kernels.Kernel:
    parts = []
    for smoothness, size, lengthscale in ((2.5, 1.0, 1.0), (2.5, 0.05, 0.05), (0.5, 0.01, 0.02)):
        part = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(smoothness))
        part.outputscale, part.base_kernel.lengthscale = size, lengthscale
        parts.append(part)
    return parts[0] + parts[1] + parts[2]


DATA: dict[str, Callable[[], Data]] = {"heights": heights, "roads": roads, "co2": co2}
