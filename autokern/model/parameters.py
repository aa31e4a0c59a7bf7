"""Constrained parameters of models in NumPy, transforms of constraints with their slopes, and copies for accelerators.

Tensors on an accelerator have copies on the CPU, updated by one transfer and written back by one: transfers of single
parameters would take longer than all arithmetic of a small model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from gpytorch.constraints import GreaterThan, Interval, LessThan

from autokern.core.replay import as_bytes
from autokern.kernels.array_parts import Array


def sent(arrays: Sequence[Array], targets: Sequence[torch.Tensor]) -> None:
    """Copy arrays into tensors of one dtype on one device by one transfer."""
    if not targets:
        return
    flat = torch.from_numpy(np.concatenate([a.ravel() for a in arrays])).to(targets[0].device)
    parts = flat.split([a.size for a in arrays])
    plain = [t.detach() for t in targets]
    torch._foreach_copy_(plain, [part.view(t.shape) for part, t in zip(parts, plain, strict=True)])


def placed(tensors: Sequence[torch.Tensor | None], device: torch.device) -> list[torch.Tensor | None]:
    """Return copies of CPU tensors on a device by one transfer; the tensors themselves if that is the CPU."""
    if device.type == "cpu":
        return list(tensors)
    there = [None if t is None else torch.empty_like(t, device=device) for t in tensors]
    sent([t.numpy() for t in tensors if t is not None], [t for t in there if t is not None])
    return there


def fetched(tensors: Sequence[torch.Tensor]) -> list[Array]:
    """Return tensors of one dtype and device as arrays by one transfer; those of CPU tensors share their memory."""
    if tensors[0].is_cpu:
        return [t.detach().numpy() for t in tensors]
    parts = torch.cat([t.detach().reshape(-1) for t in tensors]).cpu().split([t.numel() for t in tensors])
    return [part.view(t.shape).numpy() for part, t in zip(parts, tensors, strict=True)]


class Mirrors:
    """CPU copies of tensors on one accelerator, held with these; `pull` updates the copies unless they are `still`."""

    def __init__(self, still: bool = False) -> None:
        self._still = still
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the contiguous copy of a tensor, made on first use; ValueError for a second device."""
        known = self._pairs.get(id(tensor))
        if known is None:
            if any(t.device != tensor.device for t, _ in self._pairs.values()):
                raise ValueError(f"tensors on {tensor.device} and on another accelerator")
            known = self._pairs[id(tensor)] = tensor, tensor.detach().cpu().contiguous()
        return known[1]

    def pull(self) -> None:
        """Update all copies by one transfer, unless they are `still`."""
        if self._still or not self._pairs:
            return
        flat, start = as_bytes(tensor for tensor, _ in self._pairs.values()).cpu().numpy(), 0
        for _, copied in self._pairs.values():
            own = copied.view(-1).view(torch.uint8).numpy()
            stop = start + own.size
            own[:] = flat[start:stop]
            start = stop


Curve = Callable[[Array], tuple[Array, Any]]  # maps raw values to constrained values and derivatives


def _softplus(raw: Array) -> tuple[Array, Array]:
    """Softplus as in torch, linear above 20."""
    value = np.logaddexp(raw, 0.0)
    slope = -np.expm1(-value)
    if raw.size and not value.max() <= 20.0:
        linear = raw > 20.0
        value, slope = np.where(linear, raw, value), np.where(linear, 1.0, slope)
    return value, slope


def _logistic(raw: Array) -> tuple[Array, Array]:
    value = 1.0 / (1.0 + np.exp(-raw))
    return value, value * (1.0 - value)


def _exponential(raw: Array) -> tuple[Array, Array]:
    value = np.exp(raw)
    return value, value


def curve_of(transform: Any) -> Curve | None:
    """Return the curve of a constraint's transform, None for an unsupported one."""
    if type(transform) is torch.nn.Softplus and (transform.beta, transform.threshold) == (1, 20):
        return _softplus
    return _logistic if transform is torch.sigmoid else _exponential if transform is torch.exp else None


def bounded(kind: type[Interval], curve: Curve, lower: Array, upper: Array, raw: Array) -> tuple[Array, Any]:
    """Return a curve's values and derivatives with the bounds of a constraint class applied."""
    value, slope = curve(-raw if kind is LessThan else raw)
    if kind is GreaterThan:
        return value + lower, slope
    if kind is LessThan:
        return upper - value, slope
    return value * (upper - lower) + lower, slope * (upper - lower)


class Element:
    """The part of a batched parameter that belongs to some models: its value, and the sum of derivatives by the value.

    Of one model, `lone` is a single number.
    """

    def __init__(self, value: Array, by_value: Array, lone: bool = False) -> None:
        self.value, self.by_value, self.lone = value, by_value, lone

    def accumulate(self, grad: Any) -> None:
        """Add a derivative of the loss by the value."""
        self.by_value += grad


class Parameter(Element):
    """A constrained parameter: its `value` as of the last `refresh`, always the same array, and its raw memory."""

    def __init__(self, tensor: torch.Tensor, raw: Array, transform: Curve | None) -> None:
        super().__init__(np.zeros(raw.shape), np.zeros(raw.shape))
        self.tensor, self.raw, self._transform = tensor, raw, transform
        self._slope: Any = 1.0
        self._grad: torch.Tensor | None = None
        self._pointer, self._written = 0, raw

    def refresh(self) -> None:
        """Update the value from the raw tensor, and set the gradient to zero."""
        if self._transform is None:
            self.value[...] = self.raw
        else:
            raw = self.raw if self.raw.dtype == np.float64 else self.raw.astype(np.float64)
            self.value[...], self._slope = self._transform(raw)
        self.by_value.fill(0.0)

    def gradient(self) -> torch.Tensor:
        """Return the gradient by the raw tensor, as a new tensor of its dtype."""
        return torch.from_numpy(np.asarray(self.by_value * self._slope, self.raw.dtype))

    def write(self) -> torch.Tensor:
        """Overwrite the tensor's ``grad`` with the gradient, and return it."""
        grad = self.tensor.grad
        if grad is None:
            grad = self.tensor.grad = self.gradient()
        elif grad is self._grad and grad.data_ptr() == self._pointer:
            np.multiply(self.by_value, self._slope, out=self._written, casting="same_kind")
            return grad
        else:
            grad.copy_(self.gradient())
        if type(grad) is torch.Tensor and grad.is_cpu and not grad.requires_grad:
            self._grad, self._pointer, self._written = grad, grad.data_ptr(), grad.numpy()
        return grad

    def written(self, grad: torch.Tensor) -> Array:
        """Return the memory of the tensor's ``grad``."""
        return self._written if grad is self._grad and grad.data_ptr() == self._pointer else grad.numpy()

    def of(self, at: tuple[Any, ...], shape: tuple[int, ...]) -> Element:
        """Return the part of the models at these indices of the batch; `shape` is that of one model.

        A slice of models keeps its axis, and `shape` is padded to the two axes of points or covariances.
        """
        place: Any = (*at, ...)  # the ellipsis gives a view even of a single number
        value, by_value = self.value[place], self.by_value[place]
        if at and isinstance(at[-1], slice):
            padded = len(value), *(1,) * (2 - len(shape)), *shape
            value, by_value = value.reshape(padded), by_value.reshape(padded)
        return Element(value, by_value, not shape)


class Mirrored(Parameter):
    """A constrained parameter on an accelerator; `raw` is its copy on the CPU."""

    _version: int

    @staticmethod
    def write_all(parameters: Sequence[Mirrored]) -> tuple[torch.Tensor, ...]:
        """Overwrite the ``grad`` of several parameters' tensors by one transfer, and return them."""
        arrays: list[Array] = [np.asarray(p.by_value * p._slope, p.raw.dtype) for p in parameters]
        for parameter in parameters:
            if parameter.tensor.grad is None:
                parameter.tensor.grad = torch.empty_like(parameter.tensor)
        grads = [cast("torch.Tensor", parameter.tensor.grad) for parameter in parameters]
        sent(arrays, grads)
        for parameter, grad, array in zip(parameters, grads, arrays, strict=True):
            parameter._grad, parameter._written = grad, array
            parameter._pointer, parameter._version = grad.data_ptr(), grad._version
        return tuple(grads)

    def written(self, grad: torch.Tensor) -> Array:
        """Return the content of the tensor's ``grad``, transferred only if it was written to since `write_all`."""
        known = grad is self._grad and grad.data_ptr() == self._pointer and grad._version == self._version
        return self._written if known else grad.detach().cpu().numpy()


class Still:
    """A copy of a parameter's value for each model of a batch, with axes that broadcast against the points.

    `shape` is that of one model. A parameter without a batch is kept once; a batch smaller than `models` is repeated.
    """

    def __init__(self, of: Element, shape: tuple[int, ...], models: int) -> None:
        self._of, self._shape, self._models = of, shape, models
        self.refresh()

    def refresh(self) -> None:
        """Copy the present value."""
        each = self._of.value.reshape(-1, 1, *(1,) * (2 - len(self._shape)), *self._shape)
        copies = 1 if len(each) == 1 else self._models // len(each)
        self.value = np.tile(each, (copies, *(1,) * (each.ndim - 1)))

    def accumulate(self, grad: Any) -> None:
        """Add a derivative of the loss by the value to that of the parameter."""
        self._of.accumulate(grad.reshape(-1, *self._of.value.shape).sum(0))
