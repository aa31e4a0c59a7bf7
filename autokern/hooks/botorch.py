"""Hooks into BoTorch: the closure that a fit evaluates.

BoTorch may be imported after `enable`, or never. Its hooks are therefore declared when it is there, at the latest by
the first likelihood that one of its closures asks for.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any

import gpytorch
import numpy as np
import torch

from autokern.gp.reading import Reading, read
from autokern.hooks.bypass import stay_out_of_models
from autokern.hooks.install import hook, put_declared
from autokern.hooks.reading import unless_it_fails
from autokern.hooks.solver_choice import EXACT, regime
from autokern.runtime.dispatch import route

__all__ = ["look"]

_CORE, _CLOSURES = "botorch.optim.closures.core", "botorch.optim.closures.model_closures"
_dispatch = route("objective", looked=True)
_readings: weakref.WeakKeyDictionary[Any, Reading] = weakref.WeakKeyDictionary()
_left_alone: weakref.WeakSet[Any] = weakref.WeakSet()
_declared = False


def look() -> None:
    """Declare the hooks if BoTorch has been imported by now, and install them."""
    global _declared
    if not _declared and _CORE in sys.modules:
        _declared = True
        _declare(sys.modules[_CORE])
        put_declared()


def _declare(core: Any) -> None:
    kind, flat = core.ForwardBackwardClosure, core.NdarrayOptimizationClosure
    stock, stock_flat = kind.__call__, flat.__call__

    @hook(kind, "__call__")
    def call(self: Any, **kwargs: Any) -> Any:
        reading = None if kwargs or type(self) is not kind or stay_out_of_models() else _reading_of(self)
        if reading is None:
            return stock(self, **kwargs)
        loss, *gradients = _dispatch(reading, self.forward, self.parameters)
        return loss, tuple(gradients)

    @hook(flat, "__call__")
    def call_flat(self: Any, state: Any = None, **kwargs: Any) -> Any:
        """Take the vector of an optimiser to loss and gradient without a tensor between."""
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
        slopes, start = self._get_gradient_ndarray(), 0
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            size = parameter.numel()
            if gradient is not None:
                slopes[start : start + size] = gradient.numpy().reshape(-1)
            start += size
        return np.array(loss.item()), slopes


def _fits(state: Any, parameters: Mapping[str, torch.Tensor]) -> bool:
    size = sum(parameter.numel() for parameter in parameters.values())
    return type(state) is np.ndarray and state.dtype == np.float64 and state.shape == (size,)


@unless_it_fails
def _reading_of(closure: Any) -> Reading | None:
    """Return the reading of a closure's model as it is now, None where stock must run."""
    if not torch.is_grad_enabled() or torch._C._len_torch_function_stack():
        return None
    forward = closure.forward
    if forward in _left_alone:
        return None
    known = _readings.get(forward)
    if known is None or not known.holds():
        known = None if forward.__module__ != _CLOSURES else read(_mll_of(forward))
        if known is None:  # reading takes as long as some evaluations
            _left_alone.add(forward)
            return None
        _readings[forward] = known
    if not known.covers(closure.parameters) or regime(known.n) != EXACT:
        return None
    return known if gpytorch.settings.observation_nan_policy.value() == "ignore" else None


def _mll_of(forward: Any) -> Any:
    """Return the likelihood that BoTorch's loss closure of an exact model refers to, and to nothing else."""
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    mll = cells["mll"].cell_contents if cells.keys() == {"mll"} else None
    return mll if hasattr(getattr(mll, "model", None), "transform_inputs") else None  # the closure calls it


look()
