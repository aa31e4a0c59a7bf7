"""Readings of models, which compute negative log marginal likelihood per point and gradient in NumPy.

A `Reading` of an `ExactMarginalLogLikelihood` converts its mean, kernel, noise, constraints, priors and data once.
Parts are recognised by exact type; any other part makes the model unsupported.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from gpytorch.models import ExactGP

from autokern.core.errors import caught, left
from autokern.core.state import Lock, Weak
from autokern.density.matrices import density, leave_one_out, leave_one_out_density, log_density
from autokern.kernels.array_distances import arranged
from autokern.kernels.array_parts import Array, Part
from autokern.model.arrays import Inspected, UnreadError
from autokern.model.forward import kernel_at, parts_of
from autokern.model.kernel_parts import called
from autokern.model.libraries import DENSITY
from autokern.model.other_parts import Values, mean_of, noise_of, numbered, transformed
from autokern.model.parameters import Mirrored, Mirrors, sent
from autokern.model.priors import Term, term

DTYPES = (torch.float32, torch.float64)  # supported dtypes of models
TOGETHER, LEAST = 2**16, 4
"""Most elements of covariances that are computed at once, since more leave the cache, and fewest models for which a
call for all takes less time than a call for each."""
LEAVE_ONE_OUT = "leave-one-out"
OBJECTIVES: Any = {
    ExactMarginalLogLikelihood: (density, log_density, ""),
    LeaveOneOutPseudoLikelihood: (leave_one_out, leave_one_out_density, f"/{LEAVE_ONE_OUT}"),
}
"""Supported marginal likelihoods: their functions of matrix and residual in NumPy and in torch, and their words."""
_TRANSFORM = ["botorch.models.model", "Model.transform_inputs"]
_NEW: Any = object()


@functools.lru_cache(64)
def places(batch: torch.Size, n: int) -> list[tuple[Any, ...]]:
    """Return the indices of the models of a batch; small ones of one axis are evaluated together, as a slice of it."""
    most = min(TOGETHER // max(1, n**2), batch.numel())
    if len(batch) != 1 or most < LEAST:
        return [*np.ndindex(*batch)]
    bounds = np.linspace(0, batch[0], math.ceil(batch[0] / most) + 1).astype(int).tolist()
    return [(slice(*pair),) for pair in itertools.pairwise(bounds)]


class Single:
    """A model, or some of a batch; a mean of None is zero, a noise of None is `given`.

    `by_residual` and `by_noise` are gradients of the last evaluation.
    """

    given: Array  # variances, ``(1,)`` or one for each point

    def __init__(
        self, kernel: Part, noise: Values | None, terms: Sequence[Term], mean: Values | None, density: Any
    ) -> None:
        self._kernel, self._noise, self._terms, self._mean, self._density = kernel, noise, terms, mean, density

    def on(self, x: Array, targets: Array) -> Single:
        """Set the points, laid out by `arranged`, and the targets; returns itself."""
        self._several = targets.ndim > 1
        self._x, self._targets = np.broadcast_to(x, (*targets.shape, x.shape[-1])) if self._several else x, targets
        return self

    def evaluate(self, scale: float, by_x: Array | None = None, graded: bool = True) -> Any:
        """Return log densities times `scale`, None if one fails; `graded` adds gradients to parameters and `by_x`."""
        total = self._density_of(scale, by_x, graded)
        if total is None:
            return None
        for parameter, at in self._terms:
            value, slope = at(parameter.value)
            if self._several:
                total = total + value.reshape(len(self._targets), -1).sum(1)
            else:
                total += value.item() if value.size == 1 else float(np.add.reduce(value, None))
            parameter.accumulate(slope * scale)
        return total * scale if math.isfinite(total.sum() if self._several else total) else None

    def _density_of(self, scale: float, by_x: Array | None, graded: bool) -> Any:
        """Return log densities without priors, None if one fails; adds gradients, which are times `scale`."""
        targets, (k, kept) = self._targets.astype(np.float64, copy=False), self._kernel.evaluate(self._x)
        noise = self.given if self._noise is None else self._noise.value()
        if self._several:
            np.einsum("...ii->...i", k)[...] += noise
        else:
            k.flat[:: len(k) + 1] += noise
        residual = targets if self._mean is None else targets - self._mean.value()
        found = self._density(k, residual, scale, graded)
        if found is None:
            return None
        self.by_residual = found.by_residual
        if graded:
            self.by_noise = found.by_matrix.diagonal(0, -2, -1).copy()  # since the kernel overwrites `by_matrix`
            self._kernel.backward(kept, found.by_matrix, by_x)
            if self._noise is not None:
                self._noise.backward(self.by_noise)
            if self._mean is not None:
                self._mean.backward(-found.by_residual)
        return found.value


def terms_of(seen: Inspected, model: Any) -> list[Term]:
    """Return the terms of a model's priors; reads a constant mean that was not read yet."""
    found = []
    for _, module, prior, closure, _ in model.named_priors():
        if type(module) is ConstantMean and seen.present(module._parameters.get("raw_constant")) is None:
            seen.parameter(module, "raw_constant")
        found.append(term(seen, module, prior, closure))
    return found


def modules_of(seen: Inspected, mll: Any, *inherited: str) -> tuple[Any, Any]:
    """Return model and likelihood; UnreadError if the model has another one or overrides an attribute of ExactGP."""
    model, likelihood = seen.module(mll, "model"), seen.module(mll, "likelihood")
    if not isinstance(model, ExactGP) or seen.module(model, "likelihood") is not likelihood:
        raise UnreadError("a likelihood that is not the model's")
    names = (*inherited, "added_loss_terms", "named_added_loss_terms", "named_priors")
    if any(getattr(type(model), name) is not getattr(ExactGP, name) for name in names):
        raise UnreadError("a model that overrides attributes of ExactGP")
    return model, likelihood


class Reading:
    """A model, or a batch of independent models, in NumPy; raises UnreadError if any part is unsupported."""

    def __init__(self, mll: ExactMarginalLogLikelihood) -> None:
        model = getattr(mll, "model", None)
        if type(mll) not in OBJECTIVES or not isinstance(model, ExactGP):
            raise UnreadError("another likelihood or model class")
        inputs, targets = model.__dict__.get("train_inputs"), model.__dict__.get("_train_targets")
        if type(inputs) is not tuple or len(inputs) != 1 or type(targets) is not torch.Tensor or not targets.dim():
            raise UnreadError("training data other than one tensor of inputs and its targets")
        self.dtype, self.device, self.batch = inputs[0].dtype, targets.device, targets.shape[:-1]
        if self.dtype not in DTYPES or not targets.numel():
            raise UnreadError(f"inputs of {self.dtype}, or no targets")
        seen = self._seen = Inspected(self.dtype, self.batch, None if targets.is_cpu else Mirrors())
        seen.relies(*DENSITY)
        model, likelihood = modules_of(seen, mll, "__call__", "__getattr__", "train_targets")
        kind, self._lock = type(model), Lock()
        names = parts_of(kind)
        seen.stays(lambda: (kind.__call__ is ExactGP.__call__, getattr(kind, "transform_inputs", None)))
        seen.stays(lambda: (kind.forward, getattr(kind.forward, "__code__", None)))
        self._model, self._likelihood = weakref.ref(model), weakref.ref(likelihood)
        x: Array = self._points(model, names[2]).cpu().numpy().astype(np.float64)
        tasks, points = numbered(seen, model, x)
        if tasks is not None and x.ndim != 2:
            raise UnreadError("a batch of multitask models")
        seen.dims = x.shape[-1]
        targets = seen.view(seen.attribute(model, "_train_targets"), fixed=True)
        self._dtype = targets.dtype
        self._ones, (density, _, word) = [], OBJECTIVES[type(mll)]
        self.n = x.shape[-2]
        for at in places(self.batch, self.n):
            seen.begin(at)
            own = np.broadcast_to(x, (*targets[at].shape, x.shape[-1])) if x.ndim == 2 else x[at]
            mapped_x = own if tasks is None else points
            mean = mean_of(seen, seen.module(model, names[0]), mapped_x, None if tasks is None else tasks.column)
            kernel = called(seen, kernel_at(seen, model, names[1]), np.arange(seen.dims))
            one = Single(kernel, noise_of(seen, likelihood, own), terms_of(seen, model), mean, density)
            with np.errstate(all="ignore"):
                self._ones.append(one.on(arranged(mapped_x, seen.raw), targets[at]))
        seen.close(mll)
        self._parameters = list(seen.parameters.values())
        if any(p.tensor.device != self.device for p in self._parameters):
            raise UnreadError("parameters on another device than the data")
        dtype, variant = str(self.dtype).removeprefix("torch."), "+".join(sorted(seen.families)) + word
        # points twice, dimensions, models, dtype, device type, and the variant of a problem
        self.key = (self.n, *x.shape[-2:], self.batch.numel(), dtype, self.device.type, variant)

    def _points(self, model: Any, transforms: bool) -> torch.Tensor:
        """Return the training inputs after the model's input transform."""
        seen = self._seen
        (x,) = seen.attribute(model, "train_inputs")
        seen.view(x, fixed=True)
        seen.unchanging(x)
        if transforms:
            transform = seen.module(model, "input_transform")
            found = getattr(type(model), "transform_inputs", None)
            named = [getattr(found, name, "") for name in ("__module__", "__qualname__")]
            if named != _TRANSFORM or not model.training:
                raise UnreadError("another input transform")
            x = x if transform is None else transformed(seen, transform, x)
        batches = (torch.Size(), self.batch)
        if x.dtype is not self.dtype or x.requires_grad or x.dim() < 2 or x.shape[:-2] not in batches:
            raise UnreadError("points of another dtype or batch shape, or with gradients")
        if x.shape[-2] != model._train_targets.shape[-1]:
            raise UnreadError("another number of targets than of points")
        return cast("torch.Tensor", x)

    @property
    def model(self) -> Any:
        """The model, None once it is freed."""
        return self._model()

    def holds(self) -> bool:
        """Whether the model is in training mode and still consists of the objects that were read."""
        model, likelihood = self._model(), self._likelihood()
        if model is None or likelihood is None or not (model.training and likelihood.training):
            return False
        return self._seen.holds()

    def covers(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are exactly the model's parameters that require gradients."""
        wanted = {id(p.tensor) for p in self._parameters if p.tensor.requires_grad}
        return wanted == {id(tensor) for tensor in parameters.values()}

    def evaluate(self, parameters: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the losses and the gradients of their sum, also written to each ``grad``; None if stock must run."""
        if self._lock.entered():
            return None
        with self._lock.here(), np.errstate(all="ignore"):
            for parameter in self._parameters:
                parameter.refresh()
            losses = []
            for one in self._ones:
                if (loss := one.evaluate(-1.0 / self.n)) is None:
                    return None
                losses.append(loss)
            together = np.array if len(losses) == self.batch.numel() else np.hstack
            found = torch.from_numpy(np.asarray(together(losses), self._dtype).reshape(self.batch)).to(self.device)
            known = [self._seen.parameters[id(tensor)] for tensor in parameters.values()]
            mirrored = [parameter for parameter in known if isinstance(parameter, Mirrored)]
            if mirrored:  # `sent` has incremented the versions
                return found, Mirrored.write_all(mirrored)
            gradients = tuple([one.write() for one in known])
            torch.autograd.graph.increment_version(gradients)
            return found, gradients

    def written(self, tensor: torch.Tensor, gradient: torch.Tensor) -> Array:
        """Return the content of a parameter's ``grad``."""
        return self._seen.parameters[id(tensor)].written(gradient)

    def slopes(
        self, parameters: Mapping[str, torch.Tensor], gradients: Sequence[torch.Tensor | None], out: Array
    ) -> None:
        """Write the gradients of all parameters into a vector of zeros; missing ones stay zero."""
        start = 0
        for tensor, gradient in zip(parameters.values(), gradients, strict=True):
            known = self._seen.parameters[id(tensor)]
            stop = start + known.raw.size
            if gradient is not None:
                out[start:stop] = known.written(gradient).ravel()
            start = stop

    def put(self, parameters: Mapping[str, torch.Tensor], state: Array, rows: Any = None) -> None:
        """Write a vector into parameters, in their order, or an array with a row for each model, or for `rows`."""
        start, models = 0, self.batch.numel() if state.ndim == 2 else 1
        for tensor in parameters.values():
            raw = self._seen.parameters[id(tensor)].raw
            size = raw.size // models
            found = state[..., start : start + size]
            if rows is not None:
                changed = raw.reshape(models, size)
                changed[rows] = found
                found = changed
            raw[...] = found.reshape(raw.shape)
            start += size
        if self.device.type != "cpu":
            tensors = list(parameters.values())
            sent([self._seen.parameters[id(tensor)].raw for tensor in tensors], tensors)
        torch.autograd.graph.increment_version(list(parameters.values()))


class Readings:
    """A cache of readings by object, which it does not keep alive; an unsupported object is not read again."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._known: Weak[Any] = Weak()

    def of(self, owner: Any, *how: Any) -> Any:
        """Return a valid reading of an object, None if the object is unsupported."""
        known = self._known.get(owner, _NEW)
        if known is None or (known is not _NEW and known.holds(*how)):
            return known
        try:
            made = self._make(owner, *how)
            if made.holds(*how):
                return self._known.put(owner, made)
            reason = "it is not in training mode, or is hooked"
        except caught(Exception) as error:  # the library raises or serves it
            reason = str(error) or repr(error)
        left(f"the parts of {type(owner).__name__}", reason)
        return self._known.put(owner, None)
