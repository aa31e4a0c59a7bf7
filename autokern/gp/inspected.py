"""The parts of a model as arrays: views of the memory of its tensors, and constrained parameters.

NumPy computes with the memory of the tensors, so values are always the present ones. `Inspected` remembers each object
that was looked at by the dictionary that holds it, so that a replaced one is seen before the next use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpytorch.constraints import GreaterThan, Interval, LessThan, Positive

from autokern.gp.small import Array

__all__ = ["Inspected", "Parameter", "UnreadError"]


class UnreadError(Exception):
    """A part of a model is not exactly known; the message names it."""


def _sigmoid(raw: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-raw))


def _softplus(raw: Array) -> tuple[Array, Array]:
    """As torch has it, linear above 20."""
    linear = raw > 20.0
    value = np.where(linear, raw, np.log1p(np.exp(np.minimum(raw, 20.0))))
    return value, np.where(linear, 1.0, _sigmoid(raw))


def _logistic(raw: Array) -> tuple[Array, Array]:
    value = _sigmoid(raw)
    return value, value * (1.0 - value)


def _exponential(raw: Array) -> tuple[Array, Array]:
    value = np.exp(raw)
    return value, value


def _curve(transform: Any) -> Callable[[Array], tuple[Array, Array]]:
    if type(transform) is torch.nn.Softplus and (transform.beta, transform.threshold) == (1, 20):
        return _softplus
    if transform is torch.sigmoid:
        return _logistic
    if transform is torch.exp:
        return _exponential
    raise UnreadError(f"the transform {transform}")


class Parameter:
    """A constrained parameter: its present value, and the gradient by its raw tensor.

    Attributes
    ----------
    tensor, raw : Tensor, array
        The raw parameter, and its memory.
    value : array
        The value that the model computes with, of the last `refresh`.
    """

    __slots__ = ("_slope", "_transform", "grad", "raw", "tensor", "value")

    def __init__(
        self, tensor: torch.Tensor, raw: Array, transform: Callable[[Array], tuple[Array, Any]] | None
    ) -> None:
        self.tensor, self.raw, self._transform = tensor, raw, transform
        self.grad: Array = np.zeros_like(raw)
        self.value, self._slope = raw, 1.0

    def refresh(self) -> None:
        """Compute the value of the raw tensor as it is now, and set the gradient to zero."""
        if self._transform is not None:
            self.value, self._slope = self._transform(self.raw)
        self.grad.fill(0.0)

    def accumulate(self, grad: Any) -> None:
        """Add a derivative of the loss by the value."""
        self.grad += grad * self._slope


class Inspected:
    """What a reading has taken of a model: objects by the dictionaries that hold them, and views of memory."""

    def __init__(self) -> None:
        self.held: list[tuple[dict[str, Any], str, Any]] = []
        self.memory: list[tuple[torch.Tensor, int, torch.Size]] = []
        self.sizes: list[tuple[Any, int]] = []
        self.families: list[str] = []
        self.parameters: dict[int, Parameter] = {}

    def module(self, owner: torch.nn.Module, name: str) -> Any:
        """Return a submodule, or None."""
        found = owner._modules.get(name)
        self.held.append((owner._modules, name, found))
        return found

    def plain(self, *modules: Any) -> None:
        """Refuse modules with methods of their own in place of those of their class."""
        for module in modules:
            for name in ("forward", "__call__", "marginal"):
                if self.attribute(module, name) is not None:
                    raise UnreadError(f"a {type(module).__name__} with a {name} of its own")

    def attribute(self, owner: Any, name: str) -> Any:
        """Return an attribute of the instance, or None."""
        found = owner.__dict__.get(name)
        self.held.append((owner.__dict__, name, found))
        return found

    def view(self, tensor: torch.Tensor) -> Array:
        """Return the memory of a float64 tensor on the CPU, which no graph leads to."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dtype is not torch.float64:
            raise UnreadError(f"a tensor of {getattr(tensor, 'dtype', type(tensor))}")
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.grad_fn is not None:
            raise UnreadError("a tensor that is no leaf on the CPU")
        self.memory.append((tensor, tensor.data_ptr(), tensor.shape))
        seen: Array = tensor.detach().numpy()
        return seen

    def buffer(self, owner: torch.nn.Module, name: str) -> torch.Tensor:
        """Return a buffer."""
        tensor = owner._buffers.get(name)
        self.held.append((owner._buffers, name, tensor))
        if tensor is None:
            raise UnreadError(f"no buffer {name}")
        return tensor

    def parameter(self, owner: torch.nn.Module, name: str) -> Parameter:
        """Return a constrained parameter of a module, by the name of its raw tensor."""
        tensor = owner._parameters.get(name)
        self.held.append((owner._parameters, name, tensor))
        if tensor is None:
            raise UnreadError(f"no parameter {name}")
        if id(tensor) in self.parameters:
            raise UnreadError(f"a parameter {name} that serves twice")
        constraint = self.module(owner, f"{name}_constraint")
        raw = self.view(tensor)
        made = Parameter(tensor, raw, None if constraint is None else self._transform(constraint))
        self.parameters[id(tensor)] = made
        return made

    def _transform(self, constraint: Interval) -> Callable[[Array], tuple[Array, Any]] | None:
        kind = type(constraint)
        if kind not in (Positive, GreaterThan, LessThan, Interval):
            raise UnreadError(f"a constraint {kind.__name__}")
        own = constraint.__dict__
        transform = own.get("_transform") if "_transform" in own else self.module(constraint, "_transform")
        self.held.append((own, "_transform", own.get("_transform")))
        if transform is None:
            return None
        curve = _curve(transform)
        if kind is Positive:
            return curve
        lower, upper = self._bound(constraint, "lower_bound"), self._bound(constraint, "upper_bound")
        if kind is GreaterThan:

            def greater(raw: Array) -> tuple[Array, Array]:
                value, slope = curve(raw)
                return value + lower, slope

            return greater
        if kind is LessThan:

            def less(raw: Array) -> tuple[Array, Array]:
                value, slope = curve(-raw)
                return upper - value, slope

            return less

        def between(raw: Array) -> tuple[Array, Array]:
            value, slope = curve(raw)
            return value * (upper - lower) + lower, slope * (upper - lower)

        return between

    def _bound(self, constraint: Interval, name: str) -> Array:
        tensor = constraint._buffers[name]
        self.held.append((constraint._buffers, name, tensor))
        return self.constant(tensor)

    def constant(self, tensor: torch.Tensor) -> Array:
        """Return a view of a number, of any float dtype: NumPy promotes it as torch does."""
        if tensor.dim() or not tensor.is_cpu or tensor.requires_grad:
            raise UnreadError("a bound or a prior of several numbers")
        self.memory.append((tensor, tensor.data_ptr(), tensor.shape))
        seen: Array = tensor.numpy()
        return seen

    def close(self, root: torch.nn.Module) -> None:
        """Remember how many parts each module has, so that one that is added is seen.

        Raises
        ------
        UnreadError
            If a parameter that wants a gradient was not read, or there is an added loss term.
        """
        for module in root.modules():
            for name in ("_modules", "_parameters", "_priors", "_added_loss_terms"):
                space = module.__dict__.get(name)
                if space is not None:
                    self.sizes.append((space, len(space)))
                    if name == "_priors":
                        self.held += [(space, key, value) for key, value in space.items()]
            if module.__dict__.get("_added_loss_terms"):
                raise UnreadError("an added loss term")
        if {id(p) for p in root.parameters() if p.requires_grad} - self.parameters.keys():
            raise UnreadError("a parameter of something else")

    def holds(self) -> bool:
        """Whether all objects are where they were, in the same memory, and no gradient has a hook."""
        for space, name, found in self.held:
            if space.get(name) is not found:
                return False
        for space, size in self.sizes:
            if len(space) != size:
                return False
        for tensor, pointer, shape in self.memory:
            if tensor.data_ptr() != pointer or tensor.shape != shape:
                return False
        for parameter in self.parameters.values():
            tensor = parameter.tensor
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                return False
        return True
