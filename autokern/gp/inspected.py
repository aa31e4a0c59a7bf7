"""The parts of a model as arrays: views of the memory of its tensors, and constrained parameters.

NumPy computes with the memory of the tensors, so values are always the present ones. `Inspected` remembers what was
looked at and where, so that a replaced object is seen before the next use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from gpytorch.constraints import GreaterThan, Interval, LessThan, Positive

from autokern.gp.small import Array

__all__ = ["Inspected", "Parameter", "UnreadError"]

_EMPTY = ("_added_loss_terms", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SPACES = ("_modules", "_parameters", "_buffers", "_priors", *_EMPTY)
_OWN = frozenset(("_validate_args", "_has_transformed_inputs", "_original_train_inputs"))
"""What instances of the libraries' classes set over an attribute of the class."""


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
    """What a reading has taken of a model: objects by their holders, views of memory, and what must not change.

    Modules are held weakly: a reading is kept beside a model and must not keep it alive.

    Attributes
    ----------
    parameters : dict
        The parameters that were read, by the identity of their raw tensors.
    families : list of str
        The families of the kernel's leaves.
    """

    def __init__(self) -> None:
        self.parameters: dict[int, Parameter] = {}
        self.families: list[str] = []
        self._held: list[tuple[weakref.ref[Any], str, str, Any]] = []
        self._modules: dict[int, tuple[weakref.ref[Any], type, tuple[tuple[str, int], ...]]] = {}
        self._memory: list[tuple[torch.Tensor, int, torch.Size, tuple[int, ...]]] = []
        self._equal: list[tuple[Array, Array]] = []
        self._fixed: list[torch.Tensor] = []
        self._priors: list[tuple[weakref.ref[Any], str, weakref.ref[Any], Any]] = []

    def _hold(self, owner: Any, space: str, name: str) -> Any:
        """Return what an object has under a name in one of its dictionaries, by default its own."""
        found = (owner.__dict__[space] if space else owner.__dict__).get(name)
        kept = weakref.ref(found) if isinstance(found, torch.nn.Module) else found
        self._held.append((weakref.ref(owner), space, name, kept))
        return found

    def look(self, *modules: Any) -> None:
        """Refuse modules that redefine anything of their class, or that have hooks; later changes will be seen."""
        for module in modules:
            own = module.__dict__
            redefined = [name for name in own if name not in _OWN and hasattr(type(module), name)]
            spaces = tuple((name, len(own[name])) for name in _SPACES if name in own)
            if redefined or any(own.get(name) for name in _EMPTY):
                raise UnreadError(f"a {type(module).__name__} with {redefined or 'hooks or added losses'} of its own")
            self._modules[id(module)] = (weakref.ref(module), type(module), (*spaces, ("", len(own))))

    def module(self, owner: torch.nn.Module, name: str) -> Any:
        """Return a submodule, or None."""
        if owner.__dict__.get(name) is not None:
            raise UnreadError(f"an attribute {name} in front of a module")
        return self._hold(owner, "_modules", name)

    def attribute(self, owner: Any, name: str) -> Any:
        """Return an attribute of the instance, or None."""
        return self._hold(owner, "", name)

    def chosen(self, kernel: Any) -> Array | None:
        """Return the active dimensions of a kernel, None for all."""
        active = self._hold(kernel, "_buffers", "active_dims")
        if active is None:
            return None
        self._remember(active)
        seen = active.numpy()
        self._equal.append((seen, seen.copy()))
        return self._equal[-1][1]

    def data(self, tensor: torch.Tensor) -> Array:
        """Return the memory of a float64 tensor that wants no gradient."""
        if tensor.requires_grad:
            raise UnreadError("data that want gradients")
        self._fixed.append(tensor)
        return self.view(tensor)

    def _remember(self, tensor: torch.Tensor) -> None:
        self._memory.append((tensor, tensor.data_ptr(), tensor.shape, tensor.stride()))

    def view(self, tensor: torch.Tensor) -> Array:
        """Return the memory of a float64 tensor on the CPU, which no graph leads to."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dtype is not torch.float64:
            raise UnreadError(f"a tensor of {getattr(tensor, 'dtype', type(tensor))}")
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.grad_fn is not None:
            raise UnreadError("a tensor that is no leaf on the CPU")
        self._remember(tensor)
        seen: Array = tensor.detach().numpy()
        return seen

    def buffer(self, owner: torch.nn.Module, name: str) -> torch.Tensor:
        """Return a buffer."""
        tensor = self._hold(owner, "_buffers", name)
        if tensor is None:
            raise UnreadError(f"no buffer {name}")
        return cast("torch.Tensor", tensor)

    def parameter(self, owner: torch.nn.Module, name: str, shape: tuple[int, ...] = ()) -> Parameter:
        """Return a constrained parameter of a module, by the name of its raw tensor."""
        tensor = self._hold(owner, "_parameters", name)
        if tensor is None or tensor.shape != shape:
            raise UnreadError(f"a parameter {name} of another shape, or none")
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
        plain = "_transform" in constraint.__dict__
        transform = self.attribute(constraint, "_transform") if plain else self.module(constraint, "_transform")
        if isinstance(transform, torch.nn.Softplus):
            self.attribute(transform, "beta")
            self.attribute(transform, "threshold")
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
        return self.constant(self.buffer(constraint, name))

    def constant(self, tensor: torch.Tensor) -> Array:
        """Return a view of a number, of any float dtype: NumPy promotes it as torch does."""
        if tensor.dim() or not tensor.is_cpu or tensor.requires_grad:
            raise UnreadError("a bound or a prior of several numbers")
        self._fixed.append(tensor)
        self._remember(tensor)
        seen: Array = tensor.numpy()
        return seen

    def close(self, root: torch.nn.Module) -> None:
        """Look at all modules, and refuse a model with a parameter that wants a gradient and was not read."""
        self.look(*root.modules())
        for module in root.modules():
            for name, (prior, closure, _) in module.__dict__.get("_priors", {}).items():
                self._priors.append((weakref.ref(module), name, weakref.ref(prior), getattr(closure, "__func__", None)))
        if {id(p) for p in root.parameters() if p.requires_grad} - self.parameters.keys():
            raise UnreadError("a parameter of something else")

    def holds(self) -> bool:
        """Whether a model consists of the same objects in the same memory, and no gradient has a hook."""
        for ref, space, name, found in self._held:
            owner = ref()
            if owner is None:
                return False
            present = (owner.__dict__[space] if space else owner.__dict__).get(name)
            if present is not (found() if found.__class__ is weakref.ref else found):
                return False
        for ref, kind, spaces in self._modules.values():
            module = ref()
            if module is None or module.__class__ is not kind:
                return False
            own = module.__dict__
            for space, size in spaces:
                if len(own[space] if space else own) != size:
                    return False
        for ref, name, prior, function in self._priors:
            present = ref().__dict__["_priors"].get(name)
            if present is None or present[0] is not prior() or getattr(present[1], "__func__", None) is not function:
                return False
        for tensor, pointer, shape, stride in self._memory:
            if tensor.data_ptr() != pointer or tensor.shape != shape or tensor.stride() != stride:
                return False
        for parameter in self.parameters.values():
            tensor = parameter.tensor
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                return False
        for tensor in self._fixed:
            if tensor.requires_grad:
                return False
        return all(np.array_equal(now, then) for now, then in self._equal)
