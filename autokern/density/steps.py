"""The marginal likelihood ``mll(model(x), y)`` with noise, kernel and priors in NumPy, as one autograd function.

Mean and points are taken from the model's prior, so that any `forward` may compute them. The forward pass computes the
gradients. Second derivatives differentiate the plain torch formula.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP

from autokern.density import gaussian
from autokern.density.array_density import KernelReading, dense, evaluated, replacing
from autokern.density.exact_objective import DTYPES, Readings, terms_of
from autokern.model.arrays import Inspected, UnreadError
from autokern.model.means_and_noise import noise_of
from autokern.model.mirrors import Mirrors

_INHERITED = ("added_loss_terms", "named_added_loss_terms", "named_priors")


class StepReading(KernelReading):
    """Noise, kernel and priors of an `ExactMarginalLogLikelihood` in NumPy."""

    def __init__(
        self, mll: Any, kernel: Any, dims: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        if type(mll) is not ExactMarginalLogLikelihood:
            raise UnreadError("another marginal likelihood")
        seen = Inspected(dtype, torch.Size(shape[:-1]), None if device.type == "cpu" else Mirrors())
        model, noisy = seen.module(mll, "model"), seen.module(mll, "likelihood")
        if not isinstance(model, ExactGP) or seen.module(model, "likelihood") is not noisy or dtype not in DTYPES:
            raise UnreadError("a likelihood that is not the model's")
        if type(noisy) not in (GaussianLikelihood, FixedNoiseGaussianLikelihood):
            raise UnreadError("noise that depends on the points")
        if any(getattr(type(model), name) is not getattr(ExactGP, name) for name in _INHERITED):
            raise UnreadError("a model that redefines what an exact one is")
        self._kernel, self.mll = weakref.ref(kernel), weakref.ref(mll)
        self._how = dims, shape[: None if type(noisy) is FixedNoiseGaussianLikelihood else -1], dtype, device
        points = np.empty((shape[-1], 0))
        self._read(seen, mll, kernel, dims, lambda: (noise_of(seen, noisy, points), terms_of(seen, model)))
        if any(raw.device != device for raw in self.raws):
            raise UnreadError("parameters on another device than the targets")
        self.kernels = "+".join(self.families)

    def holds(  # type: ignore[override]
        self, kernel: Any, dims: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> bool:
        """Whether the reading is valid for a prior with this kernel, and for these shapes, dtype and device."""
        if self.mll() is None or self._kernel() is not kernel:
            return False
        same = self._how == (dims, shape[: len(self._how[1])], dtype, device) and len(shape) == len(self.batch) + 1
        return same and self._seen.holds()


class Step(NamedTuple):
    """One evaluation of a marginal likelihood."""

    reading: StepReading
    forward: Callable[[Any, torch.Tensor], torch.Tensor]  # stock's: maps distribution and value to the loss
    distribution: Any  # the prior at the training points
    value: torch.Tensor  # the targets

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of a `Reading` with these shapes."""
        x, value = self.distribution._covar.x1, self.value
        models = value[..., 0].numel() if value.dim() > 1 else 1
        dtype = str(value.dtype).removeprefix("torch.")
        return (*x.shape[-2:], models, dtype, value.device.type, self.reading.kernels)


_readings = Readings(StepReading)


def step_of(mll: Any, forward: Any, distribution: Any, value: Any) -> Step | None:
    """Return the step of `mll` at a prior with one plain lazy kernel matrix, None if any part is unsupported."""
    lazy, mean = distribution._covar, distribution.loc
    x = lazy.x1
    usual = type(value) is torch.Tensor is type(mean) is type(x) and value.device == mean.device == x.device
    if not usual or not (value.dtype is mean.dtype is x.dtype) or not value.numel() or not _fit(x, mean, value):
        return None
    reading = _readings.of(mll, lazy.kernel, x.shape[-1], value.shape, value.dtype, value.device)
    return None if reading is None else Step(reading, forward, distribution, value)


def _fit(x: torch.Tensor, mean: torch.Tensor, value: torch.Tensor) -> bool:
    same = mean.shape == value.shape and x.shape[-2:-1] == value.shape[-1:]
    return same and (x.dim() == 2 or x.shape[:-1] == value.shape)


def loss(step: Step) -> torch.Tensor | None:
    """Return the log marginal likelihood per point; None, for a fallback to stock, if it cannot be computed."""
    reading, mean, value, lazy = step.reading, step.distribution.loc, step.value, step.distribution._covar
    if not _fit(lazy.x1, mean, value) or value.shape[:-1] != reading.batch:
        return None
    mll: Any = reading.mll()
    kernel = lazy.kernel

    def plain(x: torch.Tensor, mean: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        density = gaussian.of_matrix(dense(kernel, x), mll.likelihood.noise, value - mean)
        found: torch.Tensor = mll._add_other_terms(density, ()) / value.shape[-1]
        return found

    plainly = replacing(mll, reading.names, plain)
    return evaluated(reading, lazy, 1.0 / value.shape[-1], plainly, lazy.x1, mean, value)
