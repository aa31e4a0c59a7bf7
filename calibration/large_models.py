"""Ten exact models for `large.py`: kernels, dimensions and noise as models have them that were trained on real data.

Everything here is plain GPyTorch, as a user would write it; nothing imports autokern.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from elevation import terrain
from gpytorch.kernels import Kernel, MaternKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel
from torch import Tensor
from workloads import Regression, standardise, uniform

WAVES = 300
PERIOD = 0.04
Part = tuple[float, float, tuple[float, ...]]
"""A term of the truth: amplitude, twice the smoothness ν of its Matérn spectrum, lengthscales."""


class Case(NamedTuple):
    """A model: what it is, variance of the noise, the truth behind the targets, a function that makes its kernel."""

    what: str
    noise: float
    truth: tuple[Part, ...]
    kernel: Callable[[], Kernel]

    @property
    def d(self) -> int:
        """Dimensions of the inputs."""
        return len(self.truth[0][2])


def _scaled(base: Kernel, *lengthscales: float, outputscale: float = 1.0, **others: float) -> Kernel:
    base.double().lengthscale = torch.tensor(lengthscales, dtype=torch.float64)
    for name, value in others.items():
        setattr(base, name, value)
    scaled = ScaleKernel(base).double()
    scaled.outputscale = outputscale
    return scaled


def _single(what: str, noise: float, twice: float, *lengthscales: float) -> Case:
    """Return a model of one scaled RBF kernel, for an infinite smoothness, or Matérn kernel."""
    ard = len(lengthscales) if len(lengthscales) > 1 else None

    def kernel() -> Kernel:
        base = RBFKernel(ard_num_dims=ard) if math.isinf(twice) else MaternKernel(nu=twice / 2, ard_num_dims=ard)
        return _scaled(base, *lengthscales)

    return Case(what, noise, ((1.0, twice, lengthscales),), kernel)


RESPONSE, NOISY = ([start + step * k for k in range(8)] for start, step in ((0.5, 0.3), (0.8, 0.2)))
MODELS = {
    "series": _single("Matérn 5/2, d = 1", 1e-2, 5.0, 0.05),
    "rough": _single("Matérn 1/2, d = 1", 1e-1, 1.0, 0.2),
    "seasons": Case(
        "RBF + RBF × periodic, d = 1", 1e-2, ((1.0, math.inf, (0.3,)),),
        lambda: _scaled(RBFKernel(), 0.3)
        + _scaled(RBFKernel(), 0.6) * _scaled(PeriodicKernel(), 0.8, period_length=PERIOD),
    ),
    "heights": Case(
        "Matérn 5/2, d = 2, elevations", 1e-2, ((1.0, 5.0, (2.0, 2.0)),), lambda: _scaled(MaternKernel(), 2.0)
    ),
    "smooth": _single("RBF ARD, d = 2", 1e-3, math.inf, 0.15, 0.3),
    "scales": Case("RQ, d = 2", 1e-1, ((1.0, 3.0, (0.3, 0.3)),), lambda: _scaled(RQKernel(), 0.3, alpha=0.7)),
    "surface": _single("Matérn 3/2 ARD, d = 3", 1e-2, 3.0, 0.3, 0.6, 1.2),
    "additive": Case(
        "RBF + Matérn 5/2, d = 4", 1e-3, ((1.0, math.inf, (1.0,) * 4), (0.4, 5.0, (0.4,) * 4)),
        lambda: _scaled(RBFKernel(), 1.0) + _scaled(MaternKernel(), 0.4, outputscale=0.16),
    ),
    "response": _single("RBF ARD, d = 8", 1e-2, math.inf, *RESPONSE),
    "noisy": _single("Matérn 5/2 ARD, d = 8", 1.0, 5.0, *NOISY),
}  # fmt: skip


def waves(x: Tensor, part: Part, generator: torch.Generator) -> Tensor:
    """Return a random function of a Matérn spectrum at some points, as a sum of waves (Rahimi and Recht 2007)."""
    amplitude, twice, lengthscales = part
    d = len(lengthscales)
    frequencies = torch.randn(WAVES, d, generator=generator, dtype=x.dtype)
    if math.isfinite(twice):
        squares = torch.randn(WAVES, round(twice), generator=generator, dtype=x.dtype).square().sum(-1, keepdim=True)
        frequencies *= (twice / squares).sqrt()
    phases = 2 * math.pi * torch.rand(WAVES, generator=generator, dtype=x.dtype)
    scaled = x / torch.tensor(lengthscales, dtype=x.dtype)
    return amplitude * (2 / WAVES) ** 0.5 * (scaled @ frequencies.T + phases).cos().sum(-1)


def model_of(name: str, n: int) -> Regression:
    """Return a model of n points in training mode, at hyperparameters near those that a fit finds."""
    case = MODELS[name]
    if name == "heights":
        land = terrain()
        x, y = land.x[:n], standardise(land.y[:n])
    else:
        generator = torch.Generator().manual_seed(n)
        x = uniform(n, case.d, seed=n)
        y = torch.stack([waves(x, part, generator) for part in case.truth]).sum(0)
        if name == "seasons":
            y += 0.5 * (2 * math.pi * x[:, 0] / PERIOD).sin() * (3 * x[:, 0]).cos()
        y += case.noise**0.5 * torch.randn(n, generator=generator, dtype=x.dtype)
    model = Regression(x, y, case.kernel())
    model.likelihood.noise = case.noise
    return model.train()
