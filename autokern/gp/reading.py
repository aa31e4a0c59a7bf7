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
from gpytorch.kernels import AdditiveKernel, ProductKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP

from autokern.gp import originals, small
from autokern.gp.forwards import modules_of
from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.leaves import leaf
from autokern.gp.means import mean_of
from autokern.gp.noises import noise_of
from autokern.gp.parts import arranged
from autokern.gp.priors import term
from autokern.gp.small import Array
from autokern.gp.tasks import mapped

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
    return leaf(seen, kernel, columns, dims)


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
        inputs = seen.attribute(model, "train_inputs")
        found = mapped(seen, model, inputs[0]) if type(inputs) is tuple and len(inputs) == 1 else None
        names = modules_of(self._forward) if found is None else ("mean_module", "covar_module", True)
        if names is None or any(hasattr(type(model), name) for name in names[:2]):
            raise UnreadError("a forward that is not the plain one")
        self._model, self._likelihood = weakref.ref(model), weakref.ref(likelihood)
        self._data(model, names[2])
        x, tasks = (self._seen_x, None) if found is None else found
        seen.dims = x.shape[1]
        self._mean = mean_of(seen, seen.module(model, names[0]), x, tasks)
        self._kernel = _called(seen, seen.module(model, names[1]), None, seen.dims)
        self._noise = noise_of(seen, likelihood, self._seen_x)
        self._x = arranged(x, seen.raw)
        self._terms = [term(seen, m, p, c) for _, m, p, c, _ in model.named_priors()]
        seen.close(mll)
        self._parameters = list(seen.parameters.values())
        self.n = len(self._x)
        self.key = (*x.shape, "+".join(sorted(seen.families)))

    def _data(self, model: Any, transformed: bool) -> None:
        seen = self._seen
        inputs, targets = model.train_inputs, seen.attribute(model, "_train_targets")
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
        residual = self._targets if self._mean is None else self._targets - self._mean.value()
        k = self._kernel.evaluate(self._x)
        k.flat[:: len(residual) + 1] += self._noise.value()
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
            self._noise.backward(found.by_matrix)
            if self._mean is not None:
                self._mean.backward(-found.by_residual)
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
