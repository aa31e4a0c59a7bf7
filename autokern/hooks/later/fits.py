"""Fits by BoTorch whose models are not read as arrays: loss and gradients of a closure, replayed (`repeated`)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from autokern.core.beside import Beside
from autokern.core.recovery import caught
from autokern.core.replay.held import Held, held
from autokern.core.replay.recording import UnrecordedError
from autokern.hooks.later.repeated import Repeated

_closures = Beside["_Closure"]()
_SINGLE = 1e-4
"""The largest difference in single precision."""
Found = tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]


def evaluate(closure: Any, stock: Any) -> Found:
    """Return loss and gradients of a closure of BoTorch's, which are in ``grad`` of its parameters then."""
    known = _closures.get(closure)
    if known is None or not known.is_of(closure):
        known = _closures.put(closure, _Closure(closure.forward, closure.parameters))
    found: Found = known.call(lambda: stock(closure))
    return found


class OfParameters(Repeated):
    """A function of parameters, which the optimiser writes in place."""

    lasting = True

    def __init__(self, kind: Any, parameters: Iterable[torch.Tensor], fixed: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(kind)
        self._parameters, self._fixed = tuple(parameters), tuple(fixed)
        if any(p.dtype is torch.float32 for p in self._parameters):
            self.agreement = _SINGLE

    def held(self, *of: Any, **options: Any) -> Held | str:
        """Return what a function of the parameters consists of, or why it cannot be recorded."""
        if any(p.device.type != "cpu" or not p.is_leaf for p in self._parameters):
            return "parameters on another device"
        if not self.is_plain():
            return "a hook on a parameter"
        found = held(*of, inputs=self._parameters, **options)
        known = set(map(id, self._parameters))
        if any(t.requires_grad and id(t) not in known for t in found.tensors):
            return "other tensors that require a gradient"
        return found

    def differentiated(self, loss: torch.Tensor, leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return a loss and its gradients by those leaves on which it depends."""
        try:
            slopes = torch.autograd.grad(loss, tuple(leaves), allow_unused=True)
        except caught(Exception) as error:  # which is for the library to raise
            raise UnrecordedError(str(error)) from error
        self._used = [slope is not None for slope in slopes]
        return [loss.detach(), *(slope for slope in slopes if slope is not None)]

    def is_plain(self) -> bool:
        """Whether a backward pass does no more with the parameters than to set their gradients."""
        return not any(p.requires_grad for p in self._fixed) and all(
            p.requires_grad and not p._backward_hooks and not getattr(p, "_post_accumulate_grad_hooks", None)
            for p in self._parameters
        )

    def _memory(self) -> list[Any]:
        return [(p.data_ptr(), p.stride()) for p in self._parameters]

    def renew(self) -> None:
        """Take what the model consists of now for unchanged."""
        super().renew()
        self._places = self._memory()

    def put(self, *call: Any) -> bool:
        """Whether the parameters are as they were recorded; they hold the numbers."""
        return self._memory() == self._places and self.is_plain()


class _Closure(OfParameters):
    """The loss of a closure, and the gradients that it writes."""

    name, watched = "loss", False

    def __init__(self, forward: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        self._forward, self._names = forward, dict(parameters)
        cells = [cell.cell_contents for cell in forward.__closure__ or ()] if hasattr(forward, "__closure__") else []
        self._of = [one for one in cells if isinstance(one, torch.nn.Module)]
        kind = (*(type(getattr(one, "model", one)) for one in self._of), len(parameters))
        super().__init__(kind, parameters.values())

    def is_of(self, closure: Any) -> bool:
        """Whether a closure still has this function and these parameters."""
        same = closure.forward is self._forward and closure.parameters.keys() == self._names.keys()
        return same and all(map(operator.is_, closure.parameters.values(), self._parameters))

    def library(self, stock: Any) -> Found:
        """Return the loss and the gradients of all parameters."""
        found: Found = stock()
        return found

    def consists(self, stock: Any) -> Held | str:
        """Return what the loss consists of, or why it cannot be recorded."""
        wanted = {id(p) for one in self._of for p in one.parameters() if p.requires_grad}
        if not self._of or wanted != set(map(id, self._parameters)):
            return "parameters of which the optimiser has not all"
        return self.held(self._forward)

    def evaluated(self, stock: Any) -> Any:
        """Return the parameters, and what computes the loss and its gradients."""

        def compute() -> list[torch.Tensor]:
            with torch.enable_grad():
                return self.differentiated(self._forward().sum(), self._parameters)

        return self._parameters, compute

    def result(self, results: tuple[torch.Tensor, ...], stock: Any) -> Found | None:
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
        return loss.clone(), tuple(found)

    def numbers(self, found: Found) -> Iterator[Any]:
        """Yield the loss and the gradients."""
        for values in (found[0], *found[1]):
            yield np.zeros(0) if values is None else values.detach().numpy()
