"""The log density of a small Gaussian process in NumPy, as one autograd function with precomputed gradients.

The function takes the raw parameters, so constraints and lengthscales add no nodes to the graph. The forward pass
computes the gradients and the backward pass scales them. Second derivatives differentiate the plain torch formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from gpytorch.kernels import Kernel, ScaleKernel
from linear_operator import to_dense
from torch.func import functional_call

from autokern.core.autograd import computed, readable
from autokern.core.locks import Lock
from autokern.density import gaussian
from autokern.density.exact_objective import Readings, Single
from autokern.kernels import tree as trees
from autokern.kernels.arrays.part import Array, arranged
from autokern.kernels.far import centre_of
from autokern.model import prior_state
from autokern.model.arrays import Inspected
from autokern.model.kernel_parts import forwarded
from autokern.model.marginal import Marginal
from autokern.model.means_and_noise import Given, Noise
from autokern.model.mirrors import fetched, placed
from autokern.model.priors import Term
from autokern.model.relied import DENSITY

MOST = {"float64": 1000, "float32": 500}
"""Most points by dtype: above, torch is faster, by its threads or in single precision."""
MOST_ROWS = 2000
"""Most points of all models of a batch together: above, a Python loop over the models is too slow."""
_NO_BATCH = torch.Size()


class KernelReading:
    """A kernel as arrays, one model for each batch element; active dimensions of the points are selected already."""

    def __init__(self, kernel: Kernel, dims: int, dtype: torch.dtype, batch: torch.Size) -> None:
        self._how: Any = dims, dtype, batch
        self._read(Inspected(dtype, batch), kernel, kernel, dims, lambda: (Given(), ()))

    def _read(
        self, seen: Inspected, root: Any, kernel: Any, dims: int, beside: Callable[[], tuple[Noise, Sequence[Term]]]
    ) -> None:
        """Read a kernel, and the noise and priors that `beside` returns for each model; all are modules of `root`."""
        self._seen, self.ones = seen, []
        seen.relies(*DENSITY)
        seen.dims = dims
        for at in np.ndindex(*seen.batch):
            seen.begin(at)
            self.ones.append(Single(forwarded(seen, kernel, None, dims), *beside()))
        self.batch, self.raw, self.families = seen.batch, seen.raw, sorted(seen.families)
        seen.close(root, whole=root is kernel)
        self.parameters = list(seen.parameters.values())
        self.raws = [parameter.tensor for parameter in self.parameters]
        names = {id(tensor): name for name, tensor in root.named_parameters()}
        self.names = [names[id(raw)] for raw in self.raws]
        self.lock = Lock()

    def holds(self, dims: int, dtype: torch.dtype, batch: torch.Size) -> bool:
        """Whether the reading is valid for these arguments and the kernel still consists of the objects read."""
        return bool(self._how == (dims, dtype, batch)) and self._seen.holds()

    def computed(
        self, scale: float, moving: bool, x: Array, mean: Array, value: Array, noise: Array | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        """Return the log densities times `scale`, and their gradients by the four arrays and the raw parameters.

        The gradient by the points is computed only if `moving`. Returns None if a factorisation fails or a density is
        not finite.
        """
        for parameter in self.parameters:
            parameter.refresh()
        dtype, (n, d), batch = x.dtype, x.shape[-2:], self.batch
        points, residual = arranged(x.astype(np.float64), self.raw), value.astype(np.float64) - mean
        by_x = np.zeros((*batch, *points.shape[-2:])) if moving else None
        values, slopes, by_noise = np.empty(batch, dtype), np.empty((*batch, n), dtype), np.empty((*batch, n))
        for one, at in zip(self.ones, np.ndindex(*batch), strict=True):
            one.on(points if points.ndim == 2 else points[at], residual if residual.ndim == 1 else residual[at])
            if noise is not None:
                one.noise.given = noise if noise.ndim == 1 else noise[at]
            found = one.evaluate(scale, None if by_x is None else by_x[at])
            if found is None:
                return None
            values[at], slopes[at] = found, one.by_residual
            if noise is not None:
                by_noise[at] = one.noise.by_noise
        if by_x is None:
            by_x = x  # a placeholder that autograd does not read
        elif self.raw:
            by_x = by_x[..., :d] + by_x[..., d:]
        arrays = [by_x.astype(dtype, copy=False), -slopes, slopes]
        if noise is not None:
            by_noise = by_noise.sum(-1, keepdims=True) if n == 1 or noise.shape[-1] != n else by_noise
            arrays.append(by_noise.astype(dtype, copy=False))
        raws = [parameter.gradient() for parameter in self.parameters]
        return torch.from_numpy(values), [*map(torch.from_numpy, arrays), *raws]


_readings = Readings(KernelReading)


def evaluated(
    reading: KernelReading, lazy: Any, scale: float, plainly: Callable[..., torch.Tensor], *tensors: torch.Tensor
) -> torch.Tensor | None:
    """Return the log densities of a reading as one autograd function; None if arrays cannot compute them.

    `tensors` are points, mean, value and, if given, noise. The lazy covariance remembers the parameters. Second
    derivatives are those of `plainly`, which takes the raw parameters after `tensors`.
    """
    if reading.lock.entered() or not readable(*tensors):
        return None
    with reading.lock.here(), np.errstate(all="ignore"):
        found = reading.computed(scale, tensors[0].requires_grad, *fetched(tensors))
        raws = [parameter.raw.copy() for parameter in reading.parameters]
    if found is None:
        return None
    prior_state.remember(lazy, reading.raws, raws)
    values, *gradients = cast("list[torch.Tensor]", placed([found[0], *found[1]], tensors[0].device))
    return computed(values, gradients, plainly, *tensors, saved=reading.raws)


def families(kernel: Kernel, x: torch.Tensor, exact: bool) -> list[str] | None:
    """Return the sorted families of a kernel's leaves, None for an unsupported kernel.

    With `exact`, KeOps kernels count as their plain classes, since gpytorch forms the matrix to factorise it.
    """
    node = trees.form(kernel, keops=exact)
    if node is not None:
        return sorted(trees.leaves(node))
    few = exact and x.is_cpu and x.shape[-2] <= MOST.get(str(x.dtype).removeprefix("torch."), 0)
    reading = _readings.of(kernel, x.shape[-1], x.dtype, kernel.batch_shape) if few else None
    return None if reading is None else reading.families


def log_prob(marginal: Marginal, value: torch.Tensor) -> torch.Tensor | None:
    """Return the log density of values ``(..., n)``, with one kernel for each batch element.

    None for an unsupported kernel or batch shape, if a factorisation fails, or if a density is not finite.
    """
    x, noise, mean, kernel = marginal.lazy.x1, marginal.noise, marginal.distribution.loc, marginal.lazy.kernel
    if any(t.shape[:-1] not in (kernel.batch_shape, _NO_BATCH) for t in (x[..., 0], noise, mean, value)):
        return None
    reading = _readings.of(kernel, x.shape[-1], x.dtype, kernel.batch_shape)
    if reading is None:
        return None

    def density(x: torch.Tensor, mean: torch.Tensor, value: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return gaussian.of_matrix(dense(kernel, x), noise, value - mean)

    plainly = replacing(kernel, reading.names, density)
    return evaluated(reading, marginal.lazy, 1.0, plainly, x, mean, value, noise)


def dense(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    """Return a kernel's matrix by plain torch steps, differentiable to any order; active dimensions are selected.

    The library would add and multiply operators, some of which it factorises with jitter of its own.
    """
    if trees.form(kernel, keops=True) is not None:
        return trees.dense(trees.read(kernel, x, centre_of(x)))
    kind = type(kernel)
    if kind is ScaleKernel:
        return kernel.outputscale[..., None, None] * dense(kernel.base_kernel, x)
    if kind not in trees.BRANCHES:
        found: torch.Tensor = to_dense(kernel.forward(x, x))
        return found
    chosen = [(child, child.active_dims) for child in kernel.kernels]
    parts = [dense(child, x if active is None else x.index_select(-1, active)) for child, active in chosen]
    total = parts[0]
    for part in parts[1:]:
        total = total + part if trees.BRANCHES[kind] == "sum" else total * part
    return total


class _Calling(torch.nn.Module):
    """A module that calls a function of `root`, for `functional_call` to replace the parameters of `root`."""

    def __init__(self, root: torch.nn.Module, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.root, self._function = root, function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """Return the function's result."""
        return self._function(*args)


def replacing(
    root: torch.nn.Module, names: list[str], function: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Return a function of the arguments of `function`, then of values for the parameters of `root` called `names`."""

    def of(*tensors: torch.Tensor) -> torch.Tensor:
        own = len(tensors) - len(names)
        modules = [(f"{at}." if at else "", one) for at, one in root.named_modules()]
        places = [(at + name, raw) for at, one in modules for name, raw in one._parameters.items()]
        given = {id(raw): tensors[own + names.index(name)] for name, raw in places if name in names}
        replaced = {f"root.{name}": given[id(raw)] for name, raw in places if id(raw) in given}  # tied ones too
        # torch does not restore tied weights of modules that are shared, as `root` is
        found: torch.Tensor = functional_call(_Calling(root, function), replaced, tensors[:own], tie_weights=False)
        return found

    return of
