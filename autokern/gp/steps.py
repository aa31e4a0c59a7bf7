"""A marginal likelihood as modules evaluate it, ``mll(model(x), y)``: noise, kernel and priors in one piece.

Mean and points come as the model gave them, so that it may compute them in any way. The gradients are there when the
value is. Second derivatives go through the plain formula.
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

from autokern.gp import likelihood
from autokern.gp.array_density import KernelReading, dense, evaluated, replacing
from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.means_and_noise import noise_of
from autokern.gp.mirrors import Mirrors
from autokern.gp.reading import DTYPES, Readings
from autokern.gp.single import terms_of

__all__ = ["Step", "loss", "step_of"]

_INHERITED = ("added_loss_terms", "named_added_loss_terms", "named_priors")


class StepReading(KernelReading):
    """Likelihood, kernel and priors of a marginal likelihood as arrays."""

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
        """Whether all still consists of the objects that were read, for a prior with this kernel."""
        if self.mll() is None or self._kernel() is not kernel:
            return False
        same = self._how == (dims, shape[: len(self._how[1])], dtype, device) and len(shape) == len(self.batch) + 1
        return same and self._seen.holds()


class Step(NamedTuple):
    """One evaluation."""

    reading: StepReading
    forward: Callable[[Any, torch.Tensor], torch.Tensor]  # computes the same with modules, from the next two
    distribution: Any  # the prior of the training points
    value: torch.Tensor  # their targets

    @property
    def key(self) -> tuple[Any, ...]:
        """As that of a `Reading`."""
        x, value = self.distribution._covar.x1, self.value
        models = value[..., 0].numel() if value.dim() > 1 else 1
        dtype = str(value.dtype).removeprefix("torch.")
        return (*x.shape[-2:], models, dtype, value.device.type, self.reading.kernels)


_readings = Readings(StepReading)


def step_of(mll: Any, forward: Any, distribution: Any, value: Any) -> Step | None:
    """Return the evaluation of a likelihood at a prior whose covariance is one plain lazy kernel matrix, if known."""
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
    """Return the marginal log likelihood per point, None where stock must run: no factor or number, say."""
    reading, mean, value, lazy = step.reading, step.distribution.loc, step.value, step.distribution._covar
    if not _fit(lazy.x1, mean, value) or value.shape[:-1] != reading.batch:
        return None
    mll: Any = reading.mll()
    kernel = lazy.kernel

    def plain(x: torch.Tensor, mean: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        density = likelihood.of_matrix(dense(kernel, x), mll.likelihood.noise, value - mean)
        found: torch.Tensor = mll._add_other_terms(density, ()) / value.shape[-1]
        return found

    plainly = replacing(mll, reading.names, plain)
    return evaluated(reading, lazy, 1.0 / value.shape[-1], plainly, lazy.x1, mean, value)
