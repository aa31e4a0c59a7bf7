"""Hooks into BoTorch's closures, which return loss and gradients of a model to the optimiser of a fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gpytorch
import numpy as np
import torch

from autokern.core.recovery import unless_it_fails
from autokern.core.releases.recorded import is_within
from autokern.density.exact_objective import Reading, Readings
from autokern.hooks.bypass import stay_out_of_models
from autokern.hooks.install import hook, stock_of
from autokern.hooks.later import fits
from autokern.model.arrays import UnreadError
from autokern.model.solver_choice import EXACT, regime
from autokern.runtime.dispatch import route

_CORE = "botorch.optim.closures.core"
_CLOSURES = "botorch.optim.closures.model_closures"
_RELIES = (
    f"{_CORE}:ForwardBackwardClosure", f"{_CORE}:NdarrayOptimizationClosure",
    "botorch.optim.utils.common:_handle_numerical_errors", "botorch.optim.utils.numpy_utils:as_ndarray",
    "botorch.utils.context_managers:zero_grad_ctx",
)  # fmt: skip
_dispatch = route("objective", looked=True)


def declare(core: Any) -> bool:
    """Declare the hooks of `botorch.optim.closures.core`, and return True."""
    kind, flat = getattr(core, "ForwardBackwardClosure", None), getattr(core, "NdarrayOptimizationClosure", None)
    stock, stock_flat = stock_of(kind, "__call__"), stock_of(flat, "__call__")

    @hook(kind, "__call__", relies=_RELIES)
    def call(self: Any, **kwargs: Any) -> Any:
        reading = None if kwargs or type(self) is not kind or stay_out_of_models() else _reading_of(self)
        if reading is None:
            return stock(self, **kwargs) if kwargs or type(self) is not kind else fits.evaluate(self, stock)
        loss, *gradients = _dispatch(reading, self.forward, self.parameters)
        return loss.sum() if loss.dim() else loss, tuple(gradients)

    @hook(flat, "__call__", relies=_RELIES)
    def call_flat(self: Any, state: Any = None, **kwargs: Any) -> Any:
        """Compute loss and gradient of an optimiser's flat vector by arrays, without tensors in between."""
        ours = type(self) is flat and type(self.closure) is kind and self.closure.parameters is self.parameters
        reading = _reading_of(self.closure) if ours and not kwargs and not stay_out_of_models() else None
        if reading is None or not (state is None or _fits(state, self.parameters)):
            return stock_flat(self, state, **kwargs)
        if state is not None:
            reading.put(self.parameters, state)
        try:
            loss, *gradients = _dispatch(reading, self.closure.forward, self.parameters)
        except RuntimeError as error:
            value, slopes = core._handle_numerical_errors(error, x=self.state, dtype=np.float64)
            return value, slopes
        slopes = self._get_gradient_ndarray()
        reading.slopes(self.parameters, gradients, slopes)
        return np.array(loss.item() if loss.dim() == 0 else loss.sum().item()), slopes

    several = getattr(core, "BatchedNDarrayOptimizationClosure", None)
    if several is not None:
        _declare_batched(core, several)
    return True


def _declare_batched(core: Any, kind: Any) -> None:
    stock = stock_of(kind, "__call__")

    @hook(kind, "__call__", relies=(*_RELIES, f"{_CORE}:{kind.__name__}"))
    def call(self: Any, state: Any = None, batch_indices: Any = None, **kwargs: Any) -> Any:
        """Compute losses and gradients of independent outputs, one row of parameters for each output."""
        reading = _reading_of(self) if type(self) is kind and not kwargs and not stay_out_of_models() else None
        if reading is None or reading.batch != self.batch_shape or not _rows_fit(self, state, batch_indices):
            return stock(self, state, batch_indices, **kwargs)
        if state is not None:
            reading.put(self.parameters, state, batch_indices)
        slopes, start = np.zeros((self.batch_size, self._per_element_size)), 0
        try:
            losses, *gradients = _dispatch(reading, self.forward, self.parameters)
            values = losses.detach().cpu().numpy().astype(np.float64).reshape(self.batch_size)
        except RuntimeError as error:
            value, _ = core._handle_numerical_errors(error, x=self.state.ravel(), dtype=np.float64)
            values, gradients = np.full(self.batch_size, value / self.batch_size), []
        for tensor, gradient in zip(self.parameters.values(), gradients, strict=False):  # empty after an error
            size = gradient.numel() // self.batch_size
            slopes[:, start : start + size] = reading.written(tensor, gradient).reshape(self.batch_size, size)
            start += size
        return (values, slopes) if batch_indices is None else (values[batch_indices], slopes[batch_indices])


def _rows_fit(closure: Any, state: Any, rows: Any) -> bool:
    """Whether a state has one row for each output, or for each output listed in `rows`."""
    if state is None:
        return True
    count = closure.batch_size if rows is None else len(rows) if type(rows) is list else -1
    return type(state) is np.ndarray and state.dtype == np.float64 and state.shape == (count, closure._per_element_size)


def _fits(state: Any, parameters: Mapping[str, torch.Tensor]) -> bool:
    size = sum(parameter.numel() for parameter in parameters.values())
    return type(state) is np.ndarray and state.dtype == np.float64 and state.shape == (size,)


@unless_it_fails
def _reading_of(closure: Any) -> Reading | None:
    """Return the arrays read of a closure's model, as it is now; None where stock must run."""
    if not torch.is_grad_enabled():
        return None
    known = _readings.of(closure.forward)
    if known is None:
        return None
    if not known.covers(closure.parameters) or regime(known.n) != EXACT:
        return None
    return known if gpytorch.settings.observation_nan_policy.value() == "ignore" else None


def _read(forward: Any) -> Reading:
    """Read the marginal likelihood from BoTorch's loss closure of an exact model, its only free variable."""
    cells = {}
    if forward.__module__ == _CLOSURES and is_within(forward):
        cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    mll = cells["mll"].cell_contents if cells.keys() == {"mll"} else None
    if not hasattr(getattr(mll, "model", None), "transform_inputs"):  # only a BoTorch model has it
        raise UnreadError("a closure of another kind")
    return Reading(mll)


_readings = Readings(_read)
