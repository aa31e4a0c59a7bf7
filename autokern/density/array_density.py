"""The density of a small Gaussian process in NumPy, as one autograd function with precomputed gradients.

The function takes the raw parameters, so constraints and lengthscales add no nodes to the graph. The forward pass
computes the gradients and the backward pass scales them. Second derivatives differentiate the plain torch formula.

`log_prob` returns the density of a Gaussian with kernel and noise, `loss` a marginal likelihood with priors. Any
`forward` method may compute mean and points of the prior.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import InducingPointKernel, Kernel
from gpytorch.likelihoods import GaussianLikelihood

from autokern.core.autograd import computed, readable
from autokern.core.problem import INDUCING
from autokern.core.state import Lock
from autokern.density import gaussian, inducing, matrices
from autokern.density.exact_objective import DTYPES, OBJECTIVES, Readings, Single, modules_of, places, terms_of
from autokern.kernels import tree as trees
from autokern.kernels.array_distances import arranged
from autokern.kernels.array_parts import Array
from autokern.model import memoized
from autokern.model.arrays import Inspected, UnreadError
from autokern.model.kernel_parts import forwarded
from autokern.model.libraries import DENSITY
from autokern.model.marginal import Marginal
from autokern.model.other_parts import FIXED, noise_of
from autokern.model.parameters import Mirrors, fetched, placed

MOST = {"float64": 1000, "float32": 500}
"""Most points by dtype: above, torch is faster, by its threads or in single precision."""
MOST_ROWS = 2000  # most points of all models of a batch together: above, a Python loop over the models is too slow


class KernelReading:
    """A kernel as arrays, one model for each batch element; active dimensions of the points are selected already."""

    def __init__(self, kernel: Kernel, dims: int, dtype: torch.dtype, batch: torch.Size, n: int) -> None:
        self._how: Any = dims, dtype, batch
        self._read(Inspected(dtype, batch), kernel, kernel, dims, n, lambda: (None, (), None, matrices.density))

    def _read(
        self, seen: Inspected, root: Any, kernel: Any, dims: int, n: int, beside: Callable[[], tuple[Any, ...]]
    ) -> None:
        """Read a kernel and, by `beside`, each model's further arguments of `Single`; all belong to `root`."""
        self._seen, self._places = seen, places(seen.batch, n)
        self._ones: list[Single] = []
        seen.relies(*DENSITY)
        seen.dims = dims
        for at in self._places:
            seen.begin(at)
            if type(kernel) is InducingPointKernel:
                self._ones.append(inducing.Collapsed(seen, kernel, beside))
            else:
                self._ones.append(Single(forwarded(seen, kernel, np.arange(dims)), *beside()))
        self.batch, self.raw, self.families = seen.batch, seen.raw, sorted(seen.families)
        seen.close(root, whole=root is kernel)
        self.parameters = list(seen.parameters.values())
        self.raws = [parameter.tensor for parameter in self.parameters]
        self.kernel, shared = memoized.outline(kernel)
        still = [seen.still[at] for at in map(id, shared) if at in seen.still]  # bounds and active dimensions
        self.shared, self.arrays = [*self.raws, *(tensor for tensor, _ in still)], [array for _, array in still]
        names = {id(tensor): name for name, tensor in root.named_parameters()}
        self.names = [names[id(raw)] for raw in self.raws]
        self.lock = Lock()

    def holds(self, dims: int, dtype: torch.dtype, batch: torch.Size, n: int) -> bool:
        """Whether the reading is valid for these arguments and the kernel still consists of the objects read."""
        return bool(self._how == (dims, dtype, batch) and self._places == places(batch, n)) and self._seen.holds()

    def computed(
        self, scale: float, moving: bool, x: Array, mean: Array, value: Array, noise: Array | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        """Return log densities times `scale`, and gradients by arrays (points if `moving`) and raw parameters."""
        graded = torch.is_grad_enabled()
        for parameter in self.parameters:
            parameter.refresh()
        dtype, (n, d), batch = x.dtype, x.shape[-2:], self.batch
        if n == 1 and not np.isfinite(x).all():  # one point's variance is computed without its coordinates
            return None
        points = arranged(x.astype(np.float64), self.raw)
        residual = np.zeros((*batch, n)) + value - mean
        by_x = np.zeros((*batch, *points.shape[-2:])) if moving else None
        values, slopes, by_noise = np.empty(batch, dtype), np.empty((*batch, n), dtype), np.empty((*batch, n))
        for one, at in zip(self._ones, self._places, strict=True):
            one.on(points if points.ndim == 2 else points[at], residual[at])
            if noise is not None:
                one.given = noise if noise.ndim == 1 else noise[at]
            found = one.evaluate(scale, None if by_x is None else by_x[at], graded)
            if found is None:
                return None
            values[at] = found
            if graded:
                slopes[at], by_noise[at] = one.by_residual, one.by_noise
        if not graded:
            return torch.from_numpy(values), []
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
    """Return the log densities for points, mean, value and, if given, noise; None if arrays cannot compute them.

    The lazy covariance remembers the kernel. `plainly` takes the raw parameters after `tensors`.
    """
    if reading.lock.entered() or not readable(*tensors):
        return None
    with reading.lock.here(), np.errstate(all="ignore"):
        found = reading.computed(scale, tensors[0].requires_grad, *fetched(tensors))
        arrays = [array.copy() for array in (*(one.raw for one in reading.parameters), *reading.arrays)]
    if found is None:
        return None
    memoized.remember(lazy, reading.kernel, reading.shared, arrays)
    values, *gradients = cast("list[torch.Tensor]", placed([found[0], *found[1]], tensors[0].device))
    return values if not gradients else computed(values, gradients, plainly, *tensors, saved=reading.raws)


def families(kernel: Kernel, x: torch.Tensor, exact: bool) -> list[str] | None:
    """Return the sorted families of a supported kernel; if `exact`, gpytorch forms the matrix of KeOps kernels too."""
    node = trees.form(kernel, keops=exact)
    if node is not None:
        return sorted(trees.leaves(node))
    few = exact and x.is_cpu and x.shape[-2] <= MOST.get(str(x.dtype).removeprefix("torch."), 0)
    reading = _readings.of(kernel, x.shape[-1], x.dtype, kernel.batch_shape, x.shape[-2]) if few else None
    return None if reading is None else reading.families


def log_prob(marginal: Marginal, value: torch.Tensor) -> torch.Tensor | None:
    """Return the log density of values ``(..., n)``; None for an unsupported kernel or batch, or if it fails."""
    x, noise, mean, kernel = marginal.lazy.x1, marginal.noise, marginal.distribution.loc, marginal.lazy.kernel
    if any(t.shape[:-1] not in (kernel.batch_shape, torch.Size()) for t in (x[..., 0], noise, mean, value)):
        return None
    reading = _readings.of(kernel, x.shape[-1], x.dtype, kernel.batch_shape, x.shape[-2])
    if reading is None:
        return None

    def density(x: torch.Tensor, mean: torch.Tensor, value: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return matrices.log_density(gaussian.dense(kernel, x), noise, value - mean)

    plainly = gaussian.replacing(kernel, reading.names, density)
    return evaluated(reading, marginal.lazy, 1.0, plainly, x, mean, value, noise)


class StepReading(KernelReading):
    """Noise, kernel and priors of an `ExactMarginalLogLikelihood` in NumPy."""

    def __init__(
        self, mll: Any, kernel: Any, dims: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        if type(mll) not in OBJECTIVES or dtype not in DTYPES:
            raise UnreadError("an unsupported marginal likelihood or dtype")
        seen = Inspected(dtype, torch.Size(shape[:-1]), None if device.type == "cpu" else Mirrors())
        model, noisy = modules_of(seen, mll)
        if type(noisy) not in (GaussianLikelihood, *FIXED):
            raise UnreadError("noise that depends on the points")
        sparse = type(kernel) is InducingPointKernel
        if sparse and (kernel.likelihood is not noisy or device.type != "cpu"):
            raise UnreadError("inducing points with a likelihood of their own, or on an accelerator")
        self._kernel, self.mll = weakref.ref(kernel), weakref.ref(mll)
        self._how = dims, shape[: None if type(noisy) in FIXED else -1], dtype, device
        points, (of, self.formula, word) = np.empty((shape[-1], 0)), OBJECTIVES[type(mll)]
        n = shape[-1]
        self._read(seen, mll, kernel, dims, n, lambda: (noise_of(seen, noisy, points), terms_of(seen, model), None, of))
        if any(raw.device != device for raw in self.raws):
            raise UnreadError("parameters on another device than the targets")
        self.inducing = len(kernel.inducing_points) if sparse else 0
        self.kernels = "+".join(self.families) + (f"/{INDUCING}" if self.inducing else word)

    def holds(  # type: ignore[override]
        self, kernel: Any, dims: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> bool:
        """Whether the reading is valid for a prior with this kernel, and for these shapes, dtype and device."""
        if self.mll() is None or self._kernel() is not kernel:
            return False
        same = self._how == (dims, shape[: len(self._how[1])], dtype, device) and len(shape) == len(self.batch) + 1
        return same and self._places == places(self.batch, shape[-1]) and self._seen.holds()


class Step(NamedTuple):
    """One evaluation of a marginal likelihood."""

    reading: StepReading
    forward: Callable[[Any, torch.Tensor], torch.Tensor]  # stock's: maps distribution and value to the loss
    distribution: Any  # the prior at the training points
    value: torch.Tensor  # the targets

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of a `Reading` with these shapes; the first number is that of the inducing points, if any."""
        x, value = self.distribution._covar.x1, self.value
        models = value[..., 0].numel() if value.dim() > 1 else 1
        dtype, (n, d), reading = str(value.dtype).removeprefix("torch."), x.shape[-2:], self.reading
        return reading.inducing or n, n, d, models, dtype, value.device.type, reading.kernels


_steps = Readings(StepReading)


def step_of(mll: Any, forward: Any, distribution: Any, value: Any) -> Step | None:
    """Return the step of `mll` at a prior with one plain lazy kernel matrix, None if any part is unsupported."""
    lazy, mean = distribution._covar, distribution.loc
    x = lazy.x1
    usual = type(value) is torch.Tensor is type(mean) is type(x) and value.device == mean.device == x.device
    if not usual or not (value.dtype is mean.dtype is x.dtype) or not value.numel() or mean.shape != value.shape:
        return None
    if x.shape[-2:-1] != value.shape[-1:] or (x.dim() > 2 and x.shape[:-1] != value.shape):
        return None
    reading = _steps.of(mll, lazy.kernel, x.shape[-1], value.shape, value.dtype, value.device)
    if reading is None or (reading.inducing and x.requires_grad):
        return None
    return Step(reading, forward, distribution, value)


def loss(step: Step) -> torch.Tensor | None:
    """Return the log marginal likelihood per point; None, for a fallback to stock, if it cannot be computed."""
    reading, mean, value, lazy = step.reading, step.distribution.loc, step.value, step.distribution._covar
    mll: Any = reading.mll()
    kernel = lazy.kernel

    def plain(x: torch.Tensor, mean: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if reading.inducing:
            with inducing.again(kernel, lazy) as covariance:
                return step.forward(MultivariateNormal(mean, covariance), value)
        density = reading.formula(gaussian.dense(kernel, x), mll.likelihood.noise, value - mean)
        return mll._add_other_terms(density, ()) / value.shape[-1]

    plainly = gaussian.replacing(mll, reading.names, plain)
    found = evaluated(reading, lazy, 1.0 / value.shape[-1], plainly, lazy.x1, mean, value)
    if found is not None and reading.inducing:
        inducing.add_loss(kernel, lazy)
    return found
