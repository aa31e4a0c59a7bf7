"""A model read once: from raw parameters to the negative marginal likelihood per point and the gradient, by arrays.

`read` takes apart what `ExactMarginalLogLikelihood` would call: mean, kernel, noise, constraints, priors and data. It
knows parts by exact type and refuses the rest.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import AdditiveKernel, MaternKernel, ProductKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.likelihoods.noise_models import FixedGaussianNoise, HomoskedasticNoise
from gpytorch.means import ConstantMean, ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP

from autokern.gp import originals, small
from autokern.gp.forwards import modules_of
from autokern.gp.inspected import Inspected, Parameter, UnreadError
from autokern.gp.priors import term
from autokern.gp.small import Array
from autokern.kernels.family import family_of

__all__ = ["Reading", "forwarded", "read"]

_INHERITED = ("__call__", "__getattr__", "train_targets", "added_loss_terms", "named_added_loss_terms", "named_priors")
_TRANSFORM = ("botorch.models.model", "Model.transform_inputs")
_log = logging.getLogger("autokern")


def _called(seen: Inspected, kernel: Any, columns: Array | None, dims: int) -> small.Part:
    """Return the evaluation of a kernel that is called: on its active dimensions, of those chosen already."""
    if kernel is None:
        raise UnreadError("no kernel")
    chosen = seen.chosen(kernel)
    if chosen is not None:
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < dims:
            raise UnreadError("active dimensions that there are not")
        columns, dims = (chosen if columns is None else columns[chosen]), len(chosen)
    return forwarded(seen, kernel, columns, dims)


def forwarded(seen: Inspected, kernel: Any, columns: Array | None, dims: int) -> small.Part:
    """Return the evaluation of a kernel's `forward`, which chooses no dimensions."""
    kind = type(kernel)
    seen.attribute(kernel, "_batch_shape")
    if kernel.batch_shape != torch.Size():
        raise UnreadError("a batched kernel")
    if kind is ScaleKernel:
        inner = forwarded(seen, seen.module(kernel, "base_kernel"), columns, dims)
        return small.Scale(inner, seen.parameter(kernel, "raw_outputscale"))
    if kind in (AdditiveKernel, ProductKernel):
        several = seen.module(kernel, "kernels")
        names = list(several._modules)
        children = [_called(seen, seen.module(several, name), columns, dims) for name in names]
        return (small.Sum if kind is AdditiveKernel else small.Product)(children)
    found = family_of(kernel) if kind in (RBFKernel, MaternKernel) else None
    if found is None or found.name not in small.FAMILIES:
        raise UnreadError(f"a kernel {kind.__name__}")
    seen.attribute(kernel, "nu")
    seen.families.append(found.name)
    raw = kernel._parameters.get("raw_lengthscale")
    several = dims if raw is None or raw.shape != (1, 1) else 1
    return small.Leaf(small.FAMILIES[found.name], columns, seen.parameter(kernel, "raw_lengthscale", (1, several)))


def _named(function: Any) -> tuple[str, str]:
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", "")


class Reading:
    """A model as arrays.

    Attributes
    ----------
    key : tuple
        Points, dimensions, and the names of the kernel's families, sorted, joined by ``+``.
    n : int
        Points.
    """

    def __init__(self, mll: ExactMarginalLogLikelihood) -> None:
        seen = self._seen = Inspected()
        model, likelihood = seen.module(mll, "model"), seen.module(mll, "likelihood")
        if type(mll) is not ExactMarginalLogLikelihood or not isinstance(model, ExactGP):
            raise UnreadError("another likelihood or model class")
        if seen.module(model, "likelihood") is not likelihood:
            raise UnreadError("a likelihood that is not the model's")
        if any(getattr(type(model), name) is not getattr(ExactGP, name) for name in _INHERITED):
            raise UnreadError("a model that redefines what an exact one is")
        self._forward, self._lock = type(model).forward, threading.Lock()
        names = modules_of(self._forward)
        if names is None or any(hasattr(type(model), name) for name in names[:2]):
            raise UnreadError("a forward that is not the plain one")
        self._model, self._likelihood = weakref.ref(model), weakref.ref(likelihood)
        self._data(model, names[2])
        self._mean = self._mean_of(seen.module(model, names[0]))
        self._kernel = _called(seen, seen.module(model, names[1]), None, self._x.shape[1])
        self._noise, self._fixed = self._noise_of(likelihood)
        self._terms = [term(seen, m, p, c) for _, m, p, c, _ in model.named_priors()]
        seen.close(mll)
        self._parameters = list(seen.parameters.values())
        self.n = len(self._x)
        self.key = (*self._x.shape, "+".join(sorted(seen.families)))

    def _data(self, model: Any, transformed: bool) -> None:
        seen = self._seen
        inputs, targets = seen.attribute(model, "train_inputs"), seen.attribute(model, "_train_targets")
        if transformed:
            of_botorch = getattr(type(model), "transform_inputs", None)
            if _named(of_botorch) != _TRANSFORM or seen.module(model, "input_transform") is not None:
                raise UnreadError("an input transform")
        if type(inputs) is not tuple or len(inputs) != 1 or inputs[0].dim() != 2 or targets.dim() != 1:
            raise UnreadError("several inputs, or a batch")
        self._raw_x, self._targets = seen.data(inputs[0]), seen.data(targets)
        if len(targets) != len(inputs[0]) or not len(targets):
            raise UnreadError("targets of another number")
        self._seen_x = self._raw_x.copy()
        self._x = self._seen_x - self._seen_x.mean(0)

    def _mean_of(self, mean: Any) -> Parameter | None:
        if type(mean) not in (ConstantMean, ZeroMean) or mean.batch_shape != torch.Size():
            raise UnreadError(f"a mean {type(mean).__name__}, or a batched one")
        return self._seen.parameter(mean, "raw_constant") if type(mean) is ConstantMean else None

    def _noise_of(self, likelihood: Any) -> tuple[Parameter | None, Array | None]:
        seen = self._seen
        covariance = seen.module(likelihood, "noise_covar")
        if type(likelihood) is GaussianLikelihood and type(covariance) is HomoskedasticNoise:
            return seen.parameter(covariance, "raw_noise", (1,)), None
        if type(likelihood) is FixedNoiseGaussianLikelihood and type(covariance) is FixedGaussianNoise:
            seen.module(likelihood, "second_noise_covar")
            noise = seen.attribute(covariance, "noise")
            if getattr(likelihood, "second_noise_covar", None) is not None or noise.shape != self._targets.shape:
                raise UnreadError("further noise")
            return None, seen.data(noise)
        raise UnreadError(f"a likelihood {type(likelihood).__name__}")

    def holds(self) -> bool:
        """Whether the model still consists of the objects that were read, and is in training mode."""
        model, likelihood = self._model(), self._likelihood()
        if model is None or likelihood is None or not (model.training and likelihood.training):
            return False
        same = type(model).forward is self._forward and originals.in_place() and self._seen.holds()
        return same and np.array_equal(self._raw_x, self._seen_x)

    def covers(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are all the parameters whose gradients stock computes, each one of the model's."""
        wanted = {id(p.tensor) for p in self._parameters if p.tensor.requires_grad}
        return wanted == {id(tensor) for tensor in parameters.values()}

    def covariance(self) -> tuple[Array, Array]:
        """Return the present covariance with noise, and the residual."""
        for parameter in self._parameters:
            parameter.refresh()
        residual = self._targets if self._mean is None else self._targets - self._mean.value
        k = self._kernel.evaluate(self._x)
        k.flat[:: len(residual) + 1] += self._fixed if self._noise is None else self._noise.value
        return k, residual

    def size(self) -> float:
        """Return the largest scaled squared norm of the points of the last covariance."""
        return self._kernel.size()

    def evaluate(self, parameters: Mapping[str, torch.Tensor]) -> tuple[float, tuple[torch.Tensor, ...]] | None:
        """Return the loss and the gradients, which are in the ``grad`` of the parameters then; None means stock.

        None is returned where there is no factor or no number: what to do about that is the library's matter.
        """
        with self._lock:
            loss = self._loss()
            return None if loss is None else (loss, self._gradients(parameters))

    def _loss(self) -> float | None:
        with np.errstate(all="ignore"):
            k, residual = self.covariance()
            n = len(residual)
            found = small.density(k, residual, -1.0 / n)
            if found is None:
                return None
            total = found.value
            if self._noise is not None:
                self._noise.accumulate(found.by_matrix.trace())
            if self._mean is not None:
                self._mean.accumulate(-found.by_residual.sum())
            self._kernel.backward(found.by_matrix)
            for parameter, at in self._terms:
                value, slope = at(parameter.value)
                total += value
                parameter.accumulate(slope * (-1.0 / n))
        return -total / n if math.isfinite(total) else None

    def put(self, parameters: Mapping[str, torch.Tensor], state: Array) -> None:
        """Write a flat vector into parameters, in their order."""
        start = 0
        for tensor in parameters.values():
            raw = self._seen.parameters[id(tensor)].raw
            raw[...] = state[start : start + raw.size].reshape(raw.shape)
            start += raw.size
        torch.autograd.graph.increment_version(list(parameters.values()))

    def _gradients(self, parameters: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        found = []
        for tensor in parameters.values():
            ours = self._seen.parameters[id(tensor)].grad
            if tensor.grad is None:
                tensor.grad = torch.from_numpy(ours.copy())
            else:
                tensor.grad.copy_(torch.from_numpy(ours))
            found.append(tensor.grad)
        return tuple(found)


def read(mll: Any) -> Reading | None:
    """Return a reading of a marginal likelihood, or None if any part of its model is not exactly known."""
    try:
        made = Reading(mll)
        return made if made.holds() else None
    except UnreadError as reason:
        _log.debug("%s is not evaluated in one piece: %s", type(getattr(mll, "model", mll)).__name__, reason)
        return None
