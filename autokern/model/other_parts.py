"""The parts of a model other than kernel and priors: input transforms and tasks, mean and noise, in NumPy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch.likelihoods import DirichletClassificationLikelihood, FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.likelihoods.hadamard_gaussian_likelihood import HadamardGaussianLikelihood
from gpytorch.likelihoods.noise_models import FixedGaussianNoise, HomoskedasticNoise, MultitaskHomoskedasticNoise
from gpytorch.means import ConstantMean, LinearMean, MultitaskMean, ZeroMean

from autokern.core.releases.known import relied
from autokern.kernels.array_parts import Array, Same, summed
from autokern.model.arrays import Inspected, UnreadError
from autokern.model.forward import is_mapping

_KINDS = ("AffineInputTransform", "ChainedInputTransform", "FilterFeatures", "InputStandardize", "Log10", "Normalize",
          "Round")  # fmt: skip
_PLAIN = (bool, int, float, str, type(None), torch.Size)
_NONE = frozenset(vars(torch.nn.Module()))


def transformed(seen: Inspected, transform: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return points mapped by an input transform; raises UnreadError if it is not a known one in training mode.

    The transform learns its coefficients in this call, as usual. Changes of its settings or buffers invalidate `seen`.
    """
    module = sys.modules.get("botorch.models.transforms.input")
    kinds = {getattr(module, name, None) for name in _KINDS}
    parts = list(transform.modules())
    for part in parts:
        if type(part) not in kinds:
            raise UnreadError(f"an input transform {type(part).__name__}")
        if not part.training:
            raise UnreadError("an input transform in evaluation mode")
        for name in [*vars(part).keys() - _NONE, "training"]:
            value = seen.attribute(part, name)
            if type(value) is dict:
                seen.stays(value.__repr__)
            elif type(value) not in _PLAIN:
                raise UnreadError(f"a transform's {name}, a {type(value).__name__}")
    seen.look(*parts)
    if not relied(*map(type, parts)).holds():  # a call of an unknown transform may change its state
        raise UnreadError("an input transform that is not known")
    found = transform(x)
    for part in parts:
        for name in part._buffers:
            seen.unchanging(seen.buffer(part, name))
        for name in part._modules:
            seen.module(part, name)
    return found


class Tasks(NamedTuple):
    """The tasks of a BoTorch model."""

    column: int  # of the points, which holds task values
    values: Array  # of the tasks, sorted
    numbers: Array  # of the tasks in mean and kernel, in the order of `values`

    def mapped(self, x: Array) -> Array | None:
        """Return points ``(..., d)`` with task numbers in place of task values; None if a value is no task's."""
        found = np.trunc(x[..., self.column])
        at = np.searchsorted(self.values, found)
        if not (self.values.take(at, mode="clip") == found).all():
            return None
        whole = x.copy()
        whole[..., self.column] = self.numbers[at]
        return whole


def numbered(seen: Inspected, model: Any, x: Array) -> tuple[Tasks | None, Array]:
    """Return a model's tasks, None if it has no tasks, and the points that its mean and kernel get; or UnreadError."""
    if not is_mapping(type(model)):
        return None, x
    module: Any = sys.modules["botorch.models.multitask"]
    seen.relies(module.MultiTaskGP, f"{module.__name__}:_compute_multitask_mean")
    names = "_task_feature", "_expected_task_values", "num_tasks", "_validate_task_values", "_task_mapper"
    column, expected, count, *_ = (seen.attribute(model, name) for name in names)
    values = numbers = np.arange(count, dtype=np.float64)
    if model._buffers.get("_task_mapper") is not None:
        values = np.array(sorted(expected), np.float64)
        numbers = seen.unchanging(seen.buffer(model, "_task_mapper"))[values.astype(np.int64)].astype(np.float64)
    tasks = Tasks(column, values, numbers)
    if (points := tasks.mapped(x)) is None:
        raise UnreadError("points with unknown task values")
    return tasks, points


FIXED = FixedNoiseGaussianLikelihood, DirichletClassificationLikelihood  # a learned noise may be added to theirs


class Values(NamedTuple):
    """The means, or the noise variances, of the points."""

    value: Callable[[], Any]  # returns ``(n,)``, or one value for all points
    backward: Callable[[Array], object]  # adds to the parameters' gradients, given the gradient by each point's value


class Mean:
    """A mean as a function of points: zero, a constant, a constant for each task, or linear."""

    def __init__(self, seen: Inspected, mean: Any, tasks: int | None = None) -> None:
        """Read a mean; `tasks` is the column of the points by which BoTorch selects a task's mean."""
        kind, constants, self._kept = type(mean), [mean], Same()
        self.column: int | None = None
        self._weights: Any = None
        if kind is MultitaskMean and tasks is not None:
            several = seen.module(mean, "base_means")
            constants, self.column = [seen.module(several, name) for name in several._modules], tasks
        if kind is LinearMean:
            width = mean._parameters["weights"].shape[-2:-1] if "weights" in mean._parameters else ()
            self._weights = seen.parameter(mean, "weights", (*width, 1))
            self._constants = [seen.parameter(mean, "bias", (1,))] if "bias" in mean._parameters else []
        else:
            for one in constants:
                if type(one) not in (ConstantMean, ZeroMean):
                    raise UnreadError(f"a mean {type(one).__name__}")
                seen.attribute(one, "batch_shape")
                if one.batch_shape != seen.batch:
                    raise UnreadError("a mean with another batch")
            self._constants = [] if kind is ZeroMean else [seen.parameter(one, "raw_constant") for one in constants]
        self.count = len(self._constants)
        self.tensors = {id(tensor) for one in (mean, *constants) for tensor in one._parameters.values()}

    def _shares(self, x: Array) -> list[Any]:
        """Return for each constant the mask of its points, None for all."""
        if (column := self.column) is None:
            return [None] * self.count
        return self._kept.of(x, lambda x: [np.equal(x[..., column, None], task) for task in range(self.count)])

    def value(self, x: Array) -> Any:
        """Return the means ``(..., n, 1)`` of points, or one mean for all."""
        found = [] if self._weights is None else [x @ self._weights.value]
        for share, constant in zip(self._shares(x), self._constants, strict=True):
            found.append(constant.value if share is None else share * constant.value)
        return sum(found[1:], start=found[0]) if found else 0.0

    def backward(self, x: Array, by_mean: Array, by_x: Array | None = None, theta: bool = True) -> None:
        """Add to the gradients of the parameters if `theta`, and of the points, given the gradient by the means."""
        if theta:
            for share, constant in zip(self._shares(x), self._constants, strict=True):
                summed(constant, by_mean if share is None else by_mean * share)
            if self._weights is not None:
                summed(self._weights, x.swapaxes(-1, -2) @ by_mean)
        if by_x is not None and self._weights is not None:
            by_x += by_mean * self._weights.value.swapaxes(-1, -2)


def mean_of(seen: Inspected, mean: Any, x: Array, tasks: int | None) -> Values | None:
    """Return the mean at fixed points, None for a zero mean."""
    found = Mean(seen, mean, tasks)
    if type(mean) is ZeroMean:
        return None
    if found.column is not None and not ((x[:, found.column] >= 0) & (x[:, found.column] < found.count)).all():
        raise UnreadError("tasks without a mean")
    lead = x.shape[:-2]
    return Values(lambda: found.value(x).reshape(*lead, -1), lambda by_mean: found.backward(x, by_mean[..., None]))


def noise_of(seen: Inspected, likelihood: Any, x: Array) -> Values:
    """Return the noise that a likelihood adds at points `x`, which are those before any input transform."""
    covariance = seen.module(likelihood, "noise_covar")
    kinds = type(likelihood), type(covariance)
    if kinds == (GaussianLikelihood, HomoskedasticNoise):
        noise = seen.parameter(covariance, "raw_noise", (1,))
        return Values(lambda: noise.value[..., 0], lambda by_noise: summed(noise, by_noise[..., None]))
    if kinds[0] in FIXED and kinds[1] is FixedGaussianNoise:
        second, fixed = seen.module(likelihood, "second_noise_covar"), seen.attribute(covariance, "noise")
        if type(second) not in (type(None), HomoskedasticNoise) or fixed.shape != (*seen.batch, x.shape[-2]):
            raise UnreadError("further noise")
        known = seen.view(fixed, fixed=True)[seen.at]
        if second is None:
            return Values(lambda: known, lambda by_noise: None)
        more = seen.parameter(second, "raw_noise", (1,))
        return Values(lambda: known + more.value[..., 0], lambda by_noise: summed(more, by_noise[..., None]))
    if kinds == (HadamardGaussianLikelihood, MultitaskHomoskedasticNoise):
        column = seen.attribute(likelihood, "task_feature_index") if x.shape[-1] > 1 else 0
        several = seen.attribute(likelihood, "num_tasks")
        if type(column) is not int or not -x.shape[-1] <= column < x.shape[-1]:
            raise UnreadError("noise of tasks in no column")
        with np.errstate(invalid="ignore"):
            tasks = x[..., column].astype(np.int64)
        by_task = seen.parameter(covariance, "raw_noise", (several,))
        each = np.equal(tasks[..., None], np.arange(several))  # as in stock, unknown tasks have no noise
        return Values(
            lambda: (each * by_task.value).sum(-1), lambda by_noise: summed(by_task, by_noise[..., None] * each)
        )
    raise UnreadError(f"a likelihood {type(likelihood).__name__}")
