"""The log density of a small Gaussian process by arrays, as a function of autograd with its gradients computed at once.

Raw parameters go in, so that constraints and lengthscales are no nodes of the graph. The gradients are there when the
value is, and the backward pass scales them. Second derivatives go through the plain formula.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel

from autokern.core.autograd import Unsaved, each_cotangent, plain_gradients
from autokern.gp import likelihood, originals, plain, small
from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.marginal import Marginal
from autokern.gp.parts import arranged
from autokern.gp.reading import forwarded

__all__ = ["families", "log_prob"]

_MOST_READINGS = 20
"""Readings of one kernel after which it is left alone: something replaces its parts at every step."""


class _KernelReading:
    """A kernel as arrays, on points whose active dimensions are chosen already."""

    def __init__(self, kernel: Kernel, dims: int) -> None:
        seen = self._seen = Inspected()
        seen.dims = dims
        self.part, self.dims = forwarded(seen, kernel, None, dims), dims
        seen.close(kernel)
        self.raw, self.families = seen.raw, sorted(seen.families)
        self.parameters = list(seen.parameters.values())
        self.raws = [parameter.tensor for parameter in self.parameters]
        names = {id(tensor): name for name, tensor in kernel.named_parameters()}
        self.names = [names[id(raw)] for raw in self.raws]
        self.lock = threading.Lock()
        self.count = 1

    def holds(self, dims: int) -> bool:
        """Whether the kernel still consists of the objects that were read."""
        return dims == self.dims and originals.in_place() and self._seen.holds()


_readings: weakref.WeakKeyDictionary[Any, _KernelReading] = weakref.WeakKeyDictionary()
_left_alone: weakref.WeakSet[Any] = weakref.WeakSet()


def _reading_of(kernel: Kernel, dims: int) -> _KernelReading | None:
    """Return the reading of a kernel as it is now, None where it was found to be unknown once."""
    known = _readings.get(kernel)
    if known is not None and known.holds(dims):
        return known
    if kernel in _left_alone:
        return None
    try:
        made = _KernelReading(kernel, dims)
    except UnreadError:
        _left_alone.add(kernel)
        return None
    if not made.holds(dims):
        _left_alone.add(kernel)
        return None
    made.count += 0 if known is None else known.count
    if made.count > _MOST_READINGS:
        _left_alone.add(kernel)
    _readings[kernel] = made
    return made


def families(kernel: Kernel, dims: int) -> list[str] | None:
    """Return the families of a kernel's leaves, sorted, None for a kernel that is not exactly known.

    Its own active dimensions are taken as chosen already.
    """
    reading = _reading_of(kernel, dims)
    return None if reading is None else reading.families


def log_prob(marginal: Marginal, value: torch.Tensor) -> torch.Tensor | None:
    """Return the log density of a value under a marginal, None where it cannot be computed by arrays.

    Parameters
    ----------
    marginal : Marginal
        Of n points on the CPU in float64, without a batch.
    value : Tensor
        Shape ``(n,)``.

    Returns
    -------
    Tensor or None
        Shape ``()``. None for a kernel that is not exactly known, and where there is no factor or no number.
    """
    x, noise, mean = marginal.lazy.x1, marginal.noise, marginal.distribution.loc
    if x.dim() != 2 or noise.dim() != 1 or mean.dim() != 1 or value.dim() != 1:
        return None
    kernel = marginal.lazy.kernel
    reading = _reading_of(kernel, x.shape[-1])
    if reading is None:
        return None
    with reading.lock, np.errstate(all="ignore"):
        found = _computed(reading, x.requires_grad, *(t.detach().numpy() for t in (x, noise, mean, value)))
    if found is None:
        return None
    out: torch.Tensor = _Density.apply(found, (kernel, reading.names), x, noise, mean, value, *reading.raws)
    return out


def _computed(
    reading: _KernelReading, moving: bool, x: small.Array, noise: small.Array, mean: small.Array, value: small.Array
) -> tuple[float, list[torch.Tensor]] | None:
    """Return the log density, and its derivatives by points, noise, mean, value and the raw parameters.

    That by the points is computed if they are `moving`.
    """
    for parameter in reading.parameters:
        parameter.refresh()
    points = arranged(x, reading.raw)
    k = reading.part.evaluate(points)
    n, d = x.shape
    k.flat[:: n + 1] += noise
    found = small.density(k, value - mean, 1.0)
    if found is None or not np.isfinite(found.value):
        return None
    diagonal = found.by_matrix.diagonal()
    by_noise = diagonal.copy() if len(noise) == n > 1 else diagonal.sum(keepdims=True)
    by_points = np.zeros_like(points) if moving else None
    reading.part.backward(found.by_matrix, by_points)
    by_x = x if by_points is None else by_points[:, :d] + by_points[:, d:] if reading.raw else by_points
    by_raw = [parameter.grad.copy() for parameter in reading.parameters]
    arrays = (by_x, by_noise, -found.by_residual, found.by_residual, *by_raw)
    return found.value, [torch.from_numpy(array) for array in arrays]


class _Density(torch.autograd.Function):
    """A density that is computed already, with its first derivatives."""

    @staticmethod
    def forward(ctx, found, of, *tensors):  # type: ignore[no-untyped-def]
        value, ctx.gradients = found
        ctx.kernel, ctx.names = of
        ctx.unsaved = Unsaved(*tensors[:4])
        ctx.save_for_backward(*tensors[4:])
        return tensors[0].new_tensor(value)

    @staticmethod
    @each_cotangent
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        wanted, raws = ctx.needs_input_grad[2:], ctx.saved_tensors
        if torch.is_grad_enabled():
            others = ctx.unsaved.unchanged()
            return None, None, *plain_gradients(_plainly(ctx.kernel, ctx.names), (*others, *raws), wanted, grad)
        scaled = torch._foreach_mul(ctx.gradients, grad)
        return None, None, *(one if want else None for one, want in zip(scaled, wanted, strict=True))


class _Matrix(torch.nn.Module):
    """The matrix of a kernel as a module, so that its parameters can be replaced for one call."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the matrix of the points `x`."""
        return plain.dense(self.kernel, x)


def _plainly(kernel: Kernel, names: list[str]) -> Callable[..., torch.Tensor]:
    """Return the density as a plain differentiable function of points, noise, mean, value and raw parameters."""

    def density(
        x: torch.Tensor, noise: torch.Tensor, mean: torch.Tensor, value: torch.Tensor, *raws: torch.Tensor
    ) -> torch.Tensor:
        replaced = {f"kernel.{name}": raw for name, raw in zip(names, raws, strict=True)}
        k = torch.func.functional_call(_Matrix(kernel), replaced, (x,))
        return likelihood.of_matrix(k, noise, value - mean)

    return density
