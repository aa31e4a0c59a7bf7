"""Means and noise of gpytorch's models in NumPy, with their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gpytorch.likelihoods import (
    DirichletClassificationLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
)
from gpytorch.likelihoods.hadamard_gaussian_likelihood import HadamardGaussianLikelihood
from gpytorch.likelihoods.noise_models import FixedGaussianNoise, HomoskedasticNoise, MultitaskHomoskedasticNoise
from gpytorch.means import ConstantMean, LinearMean, MultitaskMean, ZeroMean

from autokern.kernels.array_parts import Array, summed
from autokern.model.arrays import Inspected, UnreadError

FIXED = FixedNoiseGaussianLikelihood, DirichletClassificationLikelihood
"""Likelihoods whose noise is known, with or without a noise that is learned."""


class Values(NamedTuple):
    """The means, or the noise variances, of the points."""

    value: Callable[[], Any]  # returns ``(n,)``, or one value for all points
    backward: Callable[[Array], object]  # adds to the parameters' gradients, given the gradient by each point's value


class Given:
    """Noise variances that the caller sets as `given` before an evaluation, which sets their gradient `by_noise`."""

    given: Array
    by_noise: Array

    def value(self) -> Array:
        """Return the variances."""
        return self.given

    def backward(self, by_noise: Array) -> None:
        """Store the gradient."""
        self.by_noise = by_noise


Noise = Given | Values
"""Variances of noise."""


class Mean:
    """A mean as a function of points: zero, a constant, a constant for each task, or linear."""

    def __init__(self, seen: Inspected, mean: Any, tasks: int | None = None) -> None:
        """Read a mean; `tasks` is the column of the points by which BoTorch selects a task's mean."""
        kind, constants = type(mean), [mean]
        self.column: int | None = None
        self._weights: Any = None
        self._seen: Any = None, None
        if kind is MultitaskMean and tasks is not None:
            several = seen.module(mean, "base_means")
            constants, self.column = [seen.module(several, name) for name in several._modules], tasks
        if kind is LinearMean:
            width = mean._parameters["weights"].shape[-2:-1] if "weights" in mean._parameters else ()
            self._weights = seen.parameter(mean, "weights", (*width, 1))
            self._constants = [seen.parameter(mean, "bias", (1,))] if "bias" in mean._parameters else []
        elif kind is ZeroMean:
            _look_at_batch(seen, mean)
            self._constants = []
        else:
            self._constants = [_constant(seen, one) for one in constants]
        self.count = len(self._constants)
        self.tensors = {id(tensor) for one in (mean, *constants) for tensor in one._parameters.values()}

    def _shares(self, x: Array) -> list[Any]:
        """Return for each constant the mask of its points, None for all."""
        if self.column is None:
            return [None] * self.count
        known, found = self._seen
        if known is not x:
            found = [np.equal(x[..., self.column, None], task) for task in range(self.count)]
            self._seen = x, found
        return found

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
    if type(mean) is ZeroMean:
        _look_at_batch(seen, mean)
        return None
    found = Mean(seen, mean, tasks)
    if found.column is not None and not ((x[:, found.column] >= 0) & (x[:, found.column] < found.count)).all():
        raise UnreadError("tasks without a mean")
    return Values(lambda: found.value(x).reshape(-1), lambda by_mean: found.backward(x, by_mean[:, None]))


def _look_at_batch(seen: Inspected, mean: Any) -> None:
    seen.attribute(mean, "batch_shape")
    if mean.batch_shape != seen.batch:
        raise UnreadError("a mean with another batch")


def _constant(seen: Inspected, mean: Any) -> Any:
    if type(mean) is not ConstantMean:
        raise UnreadError(f"a mean {type(mean).__name__}")
    _look_at_batch(seen, mean)
    return seen.parameter(mean, "raw_constant")


def noise_of(seen: Inspected, likelihood: Any, x: Array) -> Values:
    """Return the noise that a likelihood adds at points; it sees them before any input transform."""
    covariance = seen.module(likelihood, "noise_covar")
    kinds = type(likelihood), type(covariance)
    if kinds == (GaussianLikelihood, HomoskedasticNoise):
        noise = seen.parameter(covariance, "raw_noise", (1,))
        return Values(lambda: noise.value, lambda by_noise: noise.accumulate(np.add.reduce(by_noise)))
    if kinds[0] in FIXED and kinds[1] is FixedGaussianNoise:
        second, fixed = seen.module(likelihood, "second_noise_covar"), seen.attribute(covariance, "noise")
        if type(second) not in (type(None), HomoskedasticNoise) or fixed.shape != (*seen.batch, len(x)):
            raise UnreadError("further noise")
        known = seen.view(fixed, fixed=True)[seen.at]
        if second is None:
            return Values(lambda: known, lambda by_noise: None)
        more = seen.parameter(second, "raw_noise", (1,))
        return Values(lambda: known + more.value, lambda by_noise: more.accumulate(np.add.reduce(by_noise)))
    if kinds == (HadamardGaussianLikelihood, MultitaskHomoskedasticNoise):
        column = seen.attribute(likelihood, "task_feature_index") if x.shape[1] > 1 else 0
        several = seen.attribute(likelihood, "num_tasks")
        if type(column) is not int or not -x.shape[1] <= column < x.shape[1]:
            raise UnreadError("noise of tasks in no column")
        with np.errstate(invalid="ignore"):
            tasks = x[:, column].astype(np.int64)
        by_task = seen.parameter(covariance, "raw_noise", (several,))
        each = np.equal(tasks[:, None], np.arange(several)).astype(np.float64)  # unknown tasks have no noise, as there
        return Values(lambda: each @ by_task.value, lambda by_noise: by_task.accumulate(by_noise @ each))
    raise UnreadError(f"a likelihood {type(likelihood).__name__}")
