"""A marginal likelihood as modules evaluate it, ``mll(model(x), y)``: noise, kernel and priors in one piece.

Mean and points come as the model gave them, so that it may compute them in any way. The gradients are there when the
value is. Second derivatives go through the plain formula.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from torch.func import functional_call

from autokern.core.autograd import computed, readable
from autokern.core.locks import Lock
from autokern.gp import likelihood, plain, prior_state
from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.mirrors import Mirrors, fetched, placed
from autokern.gp.noises import noise_of
from autokern.gp.parts import arranged
from autokern.gp.reading import DTYPES, Readings, forwarded
from autokern.gp.relied import DENSITY
from autokern.gp.single import Single, terms_of
from autokern.gp.small import Array

__all__ = ["Step", "loss", "step_of"]

_INHERITED = ("added_loss_terms", "named_added_loss_terms", "named_priors")


class StepReading:
    """Likelihood, kernel and priors of a marginal likelihood as arrays."""

    def __init__(
        self, mll: Any, kernel: Any, dims: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        if type(mll) is not ExactMarginalLogLikelihood:
            raise UnreadError("another marginal likelihood")
        self.batch = torch.Size(shape[:-1])
        seen = self._seen = Inspected(dtype, self.batch, None if device.type == "cpu" else Mirrors())
        seen.relies(*DENSITY)
        model, noisy = seen.module(mll, "model"), seen.module(mll, "likelihood")
        if not isinstance(model, ExactGP) or seen.module(model, "likelihood") is not noisy or dtype not in DTYPES:
            raise UnreadError("a likelihood that is not the model's")
        if type(noisy) not in (GaussianLikelihood, FixedNoiseGaussianLikelihood):
            raise UnreadError("noise that depends on the points")
        if any(getattr(type(model), name) is not getattr(ExactGP, name) for name in _INHERITED):
            raise UnreadError("a model that redefines what an exact one is")
        self._kernel, self.mll = weakref.ref(kernel), weakref.ref(mll)
        self._how = dims, shape[: None if type(noisy) is FixedNoiseGaussianLikelihood else -1], dtype, device
        self.ones, seen.dims = [], dims
        for at in np.ndindex(*shape[:-1]):
            seen.begin(at)
            part = forwarded(seen, kernel, None, dims)
            self.ones.append(Single(part, noise_of(seen, noisy, np.empty((shape[-1], 0))), terms_of(seen, model)))
        self.raw = seen.raw
        seen.close(mll, whole=False)
        self.parameters = list(seen.parameters.values())
        self.raws = [parameter.tensor for parameter in self.parameters]
        if any(raw.device != device for raw in self.raws):
            raise UnreadError("parameters on another device than the targets")
        names = {id(tensor): name for name, tensor in mll.named_parameters()}
        self.names = [f"mll.{names[id(raw)]}" for raw in self.raws]
        self.lock = Lock()
        self.families = "+".join(sorted(seen.families))

    def holds(self, kernel: Any, dims: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
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
        return (*x.shape[-2:], models, dtype, value.device.type, self.reading.families)


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
    reading, mean, x = step.reading, step.distribution.loc, step.distribution._covar.x1
    if not _fit(x, mean, step.value) or step.value.shape[:-1] != reading.batch:
        return None
    if reading.lock.entered() or not readable(x, mean, step.value):
        return None
    with reading.lock.here(), np.errstate(all="ignore"):
        found = _computed(reading, x.requires_grad, *fetched((x, mean, step.value)))
        raws = [parameter.raw.copy() for parameter in reading.parameters]
    if found is None:
        return None
    prior_state.remember(step.distribution._covar, reading.raws, raws)
    values, *gradients = cast("list[torch.Tensor]", placed([found[0], *found[1]], step.value.device))
    plainly = _plainly(reading.mll(), step.distribution._covar.kernel, reading.names)
    return computed(values, gradients, plainly, x, mean, step.value, saved=reading.raws)


def _computed(
    reading: StepReading, moving: bool, x: Array, mean: Array, value: Array
) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """Return the values, and their derivatives by points, if they are `moving`, mean, value and raw parameters."""
    for parameter in reading.parameters:
        parameter.refresh()
    dtype, points, residual = value.dtype, arranged(x.astype(np.float64), reading.raw), value.astype(np.float64) - mean
    batch, d = residual.shape[:-1], x.shape[-1]
    by_x = np.zeros((*batch, *points.shape[-2:])) if moving else None
    values, slopes = np.empty(batch, dtype), np.empty(residual.shape, dtype)
    for one, at in zip(reading.ones, np.ndindex(*batch), strict=True):
        one.on(points if points.ndim == 2 else points[at], residual[at])
        found = one.evaluate(1.0, None if by_x is None else by_x[at])
        if found is None:
            return None
        values[at], slopes[at] = found, one.by_residual
    if by_x is None:
        by_x = x  # of no use
    elif reading.raw:
        by_x = by_x[..., :d] + by_x[..., d:]
    raws = [parameter.gradient() for parameter in reading.parameters]
    arrays = by_x.astype(dtype, copy=False), -slopes, slopes
    return torch.from_numpy(values), [*map(torch.from_numpy, arrays), *raws]


class _Plain(torch.nn.Module):
    """The same by the plain formula, as a module, so that its parameters can be replaced for one call."""

    def __init__(self, mll: Any, kernel: Any) -> None:
        super().__init__()
        self.mll, self.kernel = mll, kernel

    def forward(self, x: torch.Tensor, mean: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the marginal log likelihood per point."""
        density = likelihood.of_matrix(plain.dense(self.kernel, x), self.mll.likelihood.noise, value - mean)
        found: torch.Tensor = self.mll._add_other_terms(density, ()) / value.shape[-1]
        return found


def _plainly(mll: Any, kernel: Any, names: list[str]) -> Callable[..., torch.Tensor]:
    def plainly(x: torch.Tensor, mean: torch.Tensor, value: torch.Tensor, *raws: torch.Tensor) -> torch.Tensor:
        replaced = dict(zip(names, raws, strict=True))
        # modules are shared here, and torch does not restore tied weights of those
        found: torch.Tensor = functional_call(_Plain(mll, kernel), replaced, (x, mean, value), tie_weights=False)
        return found

    return plainly
