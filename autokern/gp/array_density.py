"""The log density of a small Gaussian process by arrays, as a function of autograd with its gradients computed at once.

Raw parameters go in, so that constraints and lengthscales are no nodes of the graph. The gradients are there when the
value is, and the backward pass scales them. Second derivatives go through the plain formula.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gpytorch.kernels import Kernel

from autokern.core.autograd import computed, readable
from autokern.core.locks import Lock
from autokern.gp import likelihood, merged, plain, prior_state
from autokern.gp.inspected import Inspected
from autokern.gp.marginal import Marginal
from autokern.gp.parts import arranged
from autokern.gp.reading import Readings, forwarded
from autokern.gp.relied import DENSITY
from autokern.gp.small import Array
from autokern.kernels import tree as trees

__all__ = ["MOST", "MOST_ROWS", "families", "log_prob"]

MOST = {"float64": 1000, "float32": 500}
"""Points above which one thread is too few, and double precision too slow for single, by dtype."""
MOST_ROWS = 2000
"""Points of all models of a batch above which a loop over them is too slow."""
_NO_BATCH = torch.Size()


class _KernelReading:
    """A kernel as arrays, on points whose active dimensions are chosen already."""

    def __init__(self, kernel: Kernel, dims: int, dtype: torch.dtype, batch: torch.Size) -> None:
        seen = self._seen = Inspected(dtype, batch)
        self._how = dims, dtype, batch
        seen.relies(*DENSITY)
        seen.dims = dims
        self.parts = []
        for at in np.ndindex(*batch):
            seen.begin(at)
            self.parts.append(forwarded(seen, kernel, None, dims))
        self.raw, self.families = seen.raw, sorted(seen.families)
        seen.close(kernel)
        self.parameters = list(seen.parameters.values())
        self.raws = [parameter.tensor for parameter in self.parameters]
        names = {id(tensor): name for name, tensor in kernel.named_parameters()}
        self.names = [names[id(raw)] for raw in self.raws]
        self.lock = Lock()

    def holds(self, dims: int, dtype: torch.dtype, batch: torch.Size) -> bool:
        """Whether the kernel still consists of the objects that were read."""
        return self._how == (dims, dtype, batch) and self._seen.holds()


_readings = Readings(_KernelReading)


def families(kernel: Kernel, x: torch.Tensor, exact: bool) -> list[str] | None:
    """Return the families of a kernel's leaves, sorted, None for a kernel that is no tree and not known here.

    Where the matrix is factorised, gpytorch forms it for its KeOps classes as well.
    """
    node = trees.form(kernel, keops=exact)
    if node is not None:
        return sorted(trees.leaves(node))
    few = exact and x.is_cpu and x.shape[-2] <= MOST.get(str(x.dtype).removeprefix("torch."), 0)
    reading = _readings.of(kernel, x.shape[-1], x.dtype, kernel.batch_shape) if few else None
    return None if reading is None else reading.families


def log_prob(marginal: Marginal, value: torch.Tensor) -> torch.Tensor | None:
    """Return the log density of values ``(..., n)`` under marginals of CPU arrays, None where arrays cannot compute it.

    Each of a batch has its own kernel. None for a kernel not exactly known, and where there is no factor or number.
    """
    x, noise, mean = marginal.lazy.x1, marginal.noise, marginal.distribution.loc
    kernel = marginal.lazy.kernel
    batch = kernel.batch_shape
    if any(t.shape[:-1] not in (batch, _NO_BATCH) for t in (x[..., 0], noise, mean, value)):
        return None
    reading = _readings.of(kernel, x.shape[-1], x.dtype, batch) if readable(x, noise, mean, value) else None
    if reading is None or reading.lock.entered():
        return None
    with reading.lock.here(), np.errstate(all="ignore"):
        found = _computed(reading, batch, x.requires_grad, *(t.detach().numpy() for t in (x, noise, mean, value)))
        raws = [parameter.raw.copy() for parameter in reading.parameters]
    if found is None:
        return None
    prior_state.remember(marginal.lazy, reading.raws, raws)
    return computed(*found, _plainly(kernel, reading.names), x, noise, mean, value, saved=reading.raws)


def _computed(
    reading: _KernelReading, batch: torch.Size, moving: bool, x: Array, noise: Array, mean: Array, value: Array
) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """Return the log densities, and for each model their derivatives by points, noise, mean, value and raw parameters.

    Those by the points are computed if they are `moving`.
    """
    for parameter in reading.parameters:
        parameter.refresh()
    dtype, n = x.dtype, x.shape[-2]
    points, residual = arranged(x.astype(np.float64), reading.raw), value.astype(np.float64) - mean
    by_points = np.zeros((*batch, *points.shape[-2:])) if moving else None
    values, slopes, by_noise = np.empty(batch, dtype), np.empty((*batch, n), dtype), np.empty((*batch, n))
    for part, at in zip(reading.parts, np.ndindex(*batch), strict=True):
        found = merged.marginal(
            part,
            points if points.ndim == 2 else points[at],
            noise if noise.ndim == 1 else noise[at],
            residual if residual.ndim == 1 else residual[at],
            1.0,
            None if by_points is None else by_points[at],
        )
        if found is None:
            return None
        values[at], by_noise[at], slopes[at] = found
    if n == 1 or noise.shape[-1] != n:
        by_noise = by_noise.sum(-1, keepdims=True)
    by_x = x  # of no use
    if by_points is not None:
        d = x.shape[-1]
        by_x = (by_points[..., :d] + by_points[..., d:] if reading.raw else by_points).astype(dtype, copy=False)
    arrays = by_x, by_noise.astype(dtype, copy=False), -slopes, slopes
    raws = [parameter.gradient() for parameter in reading.parameters]
    return torch.from_numpy(values), [*map(torch.from_numpy, arrays), *raws]


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
