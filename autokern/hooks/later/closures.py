"""Hooks into BoTorch's closures, which return loss and gradients of a model to the optimiser of a fit.

Models that can be read are computed by arrays; loss and gradients of other models are replayed (`repeated`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import gpytorch
import numpy as np
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from autokern.core.errors import caught, unless_it_fails
from autokern.core.releases.recorded import is_within
from autokern.core.replay import Held, held
from autokern.core.replay.left import Left
from autokern.core.replay.operations import UnrecordedError
from autokern.core.state import Beside
from autokern.density.exact_objective import Reading, Readings
from autokern.hooks.bypass import stay_out_of_models
from autokern.hooks.install import hook, stock_of
from autokern.hooks.later.repeated import Repeated
from autokern.model.arrays import UnreadError
from autokern.model.libraries import EXACT, regime
from autokern.runtime.dispatch import route

_CORE = "botorch.optim.closures.core"
_CLOSURES = "botorch.optim.closures.model_closures"
_RELIES = (
    f"{_CORE}:ForwardBackwardClosure", f"{_CORE}:NdarrayOptimizationClosure",
    "botorch.optim.utils.common:_handle_numerical_errors", "botorch.optim.utils.numpy_utils:as_ndarray",
    "botorch.utils.context_managers:zero_grad_ctx",
)  # fmt: skip
_dispatch = route("objective", looked=True)
_closures: Beside[_Closure] = Beside()


def declare(core: Any) -> bool:
    """Declare the hooks of `botorch.optim.closures.core`, and return True."""
    kind, flat = getattr(core, "ForwardBackwardClosure", None), getattr(core, "NdarrayOptimizationClosure", None)
    stock, stock_flat = stock_of(kind, "__call__"), stock_of(flat, "__call__")

    @hook(kind, "__call__", relies=_RELIES)
    def call(self: Any, **kwargs: Any) -> Any:
        reading = None if kwargs or type(self) is not kind or stay_out_of_models() else _reading_of(self)
        if reading is None:
            if kwargs or type(self) is not kind:
                return stock(self, **kwargs)
            known = _closures.get(self)
            if known is None or not known.is_of(self):
                known = _closures.put(self, _Closure(self.forward, self.parameters))
            return known.call(lambda: stock(self))
        loss, *gradients = _dispatch(reading, self.forward, self.parameters)
        return loss.sum() if loss.dim() else loss, tuple(gradients)

    @hook(flat, "__call__", relies=_RELIES)
    def call_flat(self: Any, state: Any = None, **kwargs: Any) -> Any:
        """Compute loss and gradient of an optimiser's flat vector by arrays, without tensors in between."""
        ours = type(self) is flat and type(self.closure) is kind and self.closure.parameters is self.parameters
        reading = _reading_of(self.closure) if ours and not kwargs and not stay_out_of_models() else None
        if reading is None or not (state is None or _fits(state, sum(map(torch.numel, self.parameters.values())))):
            return stock_flat(self, state, **kwargs)
        if state is not None:
            reading.put(self.parameters, state)
        try:
            loss, *gradients = _dispatch(reading, self.closure.forward, self.parameters)
        except RuntimeError as error:
            return core._handle_numerical_errors(error, x=self.state, dtype=np.float64)
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
    return _fits(state, count, closure._per_element_size)


def _fits(state: Any, *shape: int) -> bool:
    return type(state) is np.ndarray and state.dtype == np.float64 and state.shape == shape


@unless_it_fails
def _reading_of(closure: Any) -> Reading | None:
    """Return the arrays read of a closure's model, as it is now; None where stock must run."""
    if not torch.is_grad_enabled():
        return None
    known = _readings.of(closure.forward)
    if known is None or not known.covers(closure.parameters) or regime(known.n) != EXACT:
        return None
    return known if gpytorch.settings.observation_nan_policy.value() == "ignore" else None


def _read(forward: Any) -> Reading:
    """Read the marginal likelihood that is the only free variable of BoTorch's loss closure of an exact model."""
    cells = {}
    if forward.__module__ == _CLOSURES and is_within(forward):
        cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    mll = cells["mll"].cell_contents if cells.keys() == {"mll"} else None
    if not hasattr(getattr(mll, "model", None), "transform_inputs"):  # only a BoTorch model has it
        raise UnreadError("a closure of another kind")
    return Reading(mll)


_readings = Readings(_read)


class OfParameters(Repeated):
    """A function of parameters, which the optimiser writes in place."""

    lasting = True

    def __init__(self, kind: Any, parameters: Iterable[torch.Tensor], fixed: Iterable[torch.Tensor] = ()) -> None:
        self._parameters, self._fixed = tuple(parameters), tuple(fixed)
        super().__init__(kind, [p.dtype for p in self._parameters])

    def held(self, *of: Any, **options: Any) -> Held | str:
        """Return the objects on which a function of the parameters depends, or why it cannot be recorded."""
        if any(p.device.type != "cpu" or not p.is_leaf for p in self._parameters):
            return "parameters on another device"
        if not self.is_plain():
            return "a hook on a parameter"
        found = held(*of, inputs=self._parameters, **options)
        known = set(map(id, self._parameters))
        if not isinstance(found, str) and any(t.requires_grad and id(t) not in known for t in found.tensors):
            return "other tensors that require a gradient"
        return found

    def differentiated(self, loss: torch.Tensor, leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return a loss and its gradients by those leaves on which it depends."""
        try:
            slopes = torch.autograd.grad(loss, tuple(leaves), allow_unused=True)
        except caught(Exception) as error:  # the library raises its own error
            raise UnrecordedError(str(error)) from error
        self._used = [slope is not None for slope in slopes]
        return [loss.detach(), *(slope for slope in slopes if slope is not None)]

    def is_plain(self) -> bool:
        """Whether a backward pass only sets the gradients of the parameters."""
        return not any(p.requires_grad for p in self._fixed) and all(
            p.requires_grad and not p._backward_hooks and not getattr(p, "_post_accumulate_grad_hooks", None)
            for p in self._parameters
        )

    def put(self, *call: Any) -> bool:
        """Copy the parameters into the replay's inputs: an optimiser may have given them other memory."""
        return self.is_plain() and self.copies.take()


class _Closure(OfParameters):
    """The loss of a closure, and the gradients that it writes."""

    name, watched = "loss", False

    def __init__(self, forward: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        self._forward, self._names = forward, dict(parameters)
        cells = [cell.cell_contents for cell in forward.__closure__ or ()] if hasattr(forward, "__closure__") else []
        self._of = [one for one in cells if isinstance(one, torch.nn.Module)]
        self._left = Left(module for one in self._of for module in one.modules())
        kind = (*(type(getattr(one, "model", one)) for one in self._of), len(parameters))
        super().__init__(kind, parameters.values())

    def is_of(self, closure: Any) -> bool:
        """Whether a closure still has this function and these parameters."""
        same = closure.forward is self._forward and closure.parameters.keys() == self._names.keys()
        return same and all(map(operator.is_, closure.parameters.values(), self._parameters))

    def library(self, stock: Any) -> Any:
        return stock()

    def consists(self, stock: Any) -> Held | str:
        wanted = {id(p) for one in self._of for p in one.parameters() if p.requires_grad}
        if not self._of or wanted != set(map(id, self._parameters)):
            return "parameters that the optimiser does not have"
        self._left.find()
        return self.held(self._forward, but=self._left.at)

    def evaluated(self, stock: Any) -> Any:
        def compute() -> list[torch.Tensor]:
            recorder: Any
            recorder, before = _get_current_dispatch_mode(), self._left.present()
            with torch.enable_grad():
                found = self.differentiated(self._forward().sum(), self._parameters)
            return found + self._left.computed(recorder, before, self._held)

        return self._parameters, compute

    def result(self, results: tuple[torch.Tensor, ...], stock: Any) -> Any:
        """Put gradients into the parameters and return them with the loss, None if any number is not finite."""
        loss, *slopes = results
        if not all(bool(t.isfinite().all()) for t in results):
            return None
        found, given = list[torch.Tensor | None](), iter(slopes)
        for parameter, used in zip(self._parameters, self._used, strict=True):
            if not used:
                if parameter.grad is not None:
                    parameter.grad.zero_()
            elif parameter.grad is None:
                parameter.grad = next(given).clone()
            else:
                parameter.grad.copy_(next(given))
            found.append(parameter.grad)
        self._left.put(self._left.alike(given))
        return loss.clone(), tuple(found)

    def numbers(self, found: Any) -> Iterator[Any]:
        for values in (found[0], *found[1], *self._left.tensors()):
            yield np.zeros(0) if values is None else values.detach().numpy()
