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
from autokern.gp import likelihood, originals, small
from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.marginal import Marginal
from autokern.gp.parts import arranged
from autokern.gp.reading import forwarded
from autokern.kernels import tree as trees
from autokern.kernels.far import centre_of

__all__ = ["log_prob"]

_MOST_READINGS = 20
"""Readings of one kernel after which it is left alone: something replaces its parts at every step."""


class _KernelReading:
    """A kernel as arrays, on points whose active dimensions are chosen already."""

    def __init__(self, kernel: Kernel, dims: int) -> None:
        seen = self._seen = Inspected()
        seen.dims = dims
        self.part, self.dims = forwarded(seen, kernel, None, dims), dims
        seen.close(kernel)
        self.raw = seen.raw
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


def log_prob(marginal: Marginal, value: torch.Tensor) -> torch.Tensor | None:
    """Return the log density of a value under a marginal, None where it cannot be computed by arrays.

    Parameters
    ----------
    marginal : Marginal
        Of n points on the CPU in float64, without a batch, that want no gradients.
    value : Tensor
        Shape ``(n,)``.

    Returns
    -------
    Tensor or None
        Shape ``()``. None for a kernel that is not exactly known, and where there is no factor or no number.
    """
    x, noise, mean = marginal.lazy.x1, marginal.noise, marginal.distribution.loc
    if x.dim() != 2 or noise.dim() != 1 or mean.dim() != 1 or value.dim() != 1 or x.requires_grad:
        return None
    kernel = marginal.lazy.kernel
    reading = _reading_of(kernel, x.shape[-1])
    if reading is None:
        return None
    with reading.lock, np.errstate(all="ignore"):
        found = _computed(reading, *(t.detach().numpy() for t in (x, noise, mean, value)))
    if found is None:
        return None
    out: torch.Tensor = _Density.apply(found, (kernel, reading.names, x), noise, mean, value, *reading.raws)
    return out


def _computed(
    reading: _KernelReading, x: small.Array, noise: small.Array, mean: small.Array, value: small.Array
) -> tuple[float, list[torch.Tensor]] | None:
    """Return the log density, and its derivatives by noise, mean, value and the raw parameters."""
    for parameter in reading.parameters:
        parameter.refresh()
    k = reading.part.evaluate(arranged(x, reading.raw))
    n = len(k)
    k.flat[:: n + 1] += noise
    found = small.density(k, value - mean, 1.0)
    if found is None or not np.isfinite(found.value):
        return None
    diagonal = found.by_matrix.diagonal()
    by_noise = diagonal.copy() if len(noise) == n > 1 else diagonal.sum(keepdims=True)
    reading.part.backward(found.by_matrix)
    by_raw = [parameter.grad.copy() for parameter in reading.parameters]
    arrays = (by_noise, -found.by_residual, found.by_residual, *by_raw)
    return found.value, [torch.from_numpy(array) for array in arrays]


class _Density(torch.autograd.Function):
    """A density that is computed already, with its first derivatives."""

    @staticmethod
    def forward(ctx, found, of, *tensors):  # type: ignore[no-untyped-def]
        value, ctx.gradients = found
        kernel, names, x = of
        ctx.kernel, ctx.names = kernel, names
        ctx.unsaved = Unsaved(x, *tensors[:3])
        ctx.save_for_backward(*tensors[3:])
        return tensors[0].new_tensor(value)

    @staticmethod
    @each_cotangent
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        wanted, raws = ctx.needs_input_grad[2:], ctx.saved_tensors
        if torch.is_grad_enabled():
            x, *others = ctx.unsaved.unchanged()
            return None, None, *plain_gradients(_plainly(ctx.kernel, ctx.names, x), (*others, *raws), wanted, grad)
        scaled = torch._foreach_mul(ctx.gradients, grad)
        return None, None, *(one if want else None for one, want in zip(scaled, wanted, strict=True))


class _Read(torch.nn.Module):
    """Reads a kernel's tree, as a module, so that its parameters can be replaced for one call."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: torch.Tensor) -> trees.Tree:
        """Return the tree with the points `x`."""
        return trees.read(self.kernel, x, centre_of(x))


def _plainly(kernel: Kernel, names: list[str], x: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the density as a plain differentiable function of noise, mean, value and raw parameters."""

    def density(noise: torch.Tensor, mean: torch.Tensor, value: torch.Tensor, *raws: torch.Tensor) -> torch.Tensor:
        replaced = {f"kernel.{name}": raw for name, raw in zip(names, raws, strict=True)}
        tree = torch.func.functional_call(_Read(kernel), replaced, (x,))
        return likelihood.reference(tree, noise, value - mean)

    return density
