"""Means and noise of gpytorch's models as arrays, at the points that a model was read with, and their derivatives."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.likelihoods.hadamard_gaussian_likelihood import HadamardGaussianLikelihood
from gpytorch.likelihoods.noise_models import FixedGaussianNoise, HomoskedasticNoise, MultitaskHomoskedasticNoise
from gpytorch.means import ConstantMean, LinearMean, MultitaskMean, ZeroMean

from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.small import Array, Parameter

__all__ = ["Given", "Mean", "Noise", "mean_of", "noise_of"]


class Mean(Protocol):
    """The mean at the points."""

    def value(self) -> Any:
        """Return the mean of each point, or of all."""

    def backward(self, by_mean: Array) -> None:
        """Add the gradient by the parameters."""


class _Constant:
    def __init__(self, constant: Parameter) -> None:
        self._constant = constant

    def value(self) -> Any:
        return self._constant.value

    def backward(self, by_mean: Array) -> None:
        self._constant.accumulate(by_mean.sum())


class _Linear:
    def __init__(self, x: Array, weights: Parameter, bias: Parameter | None) -> None:
        self._x, self._weights, self._bias = x, weights, bias

    def value(self) -> Any:
        found = (self._x @ self._weights.value)[:, 0]
        return found if self._bias is None else found + self._bias.value

    def backward(self, by_mean: Array) -> None:
        self._weights.accumulate((by_mean @ self._x)[:, None])
        if self._bias is not None:
            self._bias.accumulate(by_mean.sum())


class _MeansOfTasks:
    """A constant for each task."""

    def __init__(self, constants: list[Parameter], tasks: Array) -> None:
        self._constants, self._tasks = constants, tasks

    def value(self) -> Any:
        return np.array([constant.value for constant in self._constants])[self._tasks]

    def backward(self, by_mean: Array) -> None:
        sums = np.bincount(self._tasks, by_mean, len(self._constants))
        for constant, total in zip(self._constants, sums, strict=True):
            constant.accumulate(total)


def mean_of(seen: Inspected, mean: Any, x: Array, tasks: Array | None) -> Mean | None:
    """Return the mean of points, None for zero; BoTorch's model selects of several means by the tasks."""
    kind = type(mean)
    if kind is MultitaskMean and tasks is not None:
        several = seen.module(mean, "base_means")
        inner = [mean_of(seen, seen.module(several, name), x, None) for name in several._modules]
        constants = [one._constant for one in inner if isinstance(one, _Constant)]
        if len(constants) < len(inner) or tasks.min() < 0 or tasks.max() >= len(constants):
            raise UnreadError("means of tasks that are no constants")
        return _MeansOfTasks(constants, tasks)
    if kind is LinearMean:
        bias = seen.parameter(mean, "bias", (1,)) if "bias" in mean._parameters else None
        return _Linear(x, seen.parameter(mean, "weights", (x.shape[1], 1)), bias)
    seen.attribute(mean, "batch_shape")
    if kind not in (ConstantMean, ZeroMean) or mean.batch_shape != seen.batch:
        raise UnreadError(f"a mean {kind.__name__}, or one with another batch")
    return _Constant(seen.parameter(mean, "raw_constant")) if kind is ConstantMean else None


class Noise(Protocol):
    """The variances of the noise at the points."""

    def value(self) -> Array:
        """Return the variance of each point, or of all."""

    def backward(self, by_noise: Array) -> None:
        """Add the gradient by the parameters, from that by the variance of each point."""


class Given:
    """Variances that are `given` before each evaluation, which leaves their derivatives as `by_noise`."""

    given: Array
    by_noise: Array

    def value(self) -> Array:
        """Return what is given."""
        return self.given

    def backward(self, by_noise: Array) -> None:
        """Keep the derivatives."""
        self.by_noise = by_noise


class _Same:
    def __init__(self, noise: Parameter) -> None:
        self._noise = noise

    def value(self) -> Array:
        return self._noise.value

    def backward(self, by_noise: Array) -> None:
        self._noise.accumulate(np.add.reduce(by_noise))


class _Known:
    def __init__(self, noise: Array) -> None:
        self._noise = noise

    def value(self) -> Array:
        return self._noise

    def backward(self, by_noise: Array) -> None:
        """Nothing is to be fitted."""


class _NoiseOfTasks:
    """A variance for each task, and none for what is no task: the library compares and never maps."""

    def __init__(self, noise: Parameter, tasks: Array) -> None:
        self._noise = noise
        self._each = np.equal(tasks[:, None], np.arange(noise.value.size)).astype(np.float64)

    def value(self) -> Array:
        found: Array = self._each @ self._noise.value
        return found

    def backward(self, by_noise: Array) -> None:
        self._noise.accumulate(by_noise @ self._each)


def noise_of(seen: Inspected, likelihood: Any, x: Array) -> Noise:
    """Return the noise that a likelihood adds at points, which it gets as the caller has them."""
    covariance = seen.module(likelihood, "noise_covar")
    kinds = type(likelihood), type(covariance)
    if kinds == (GaussianLikelihood, HomoskedasticNoise):
        return _Same(seen.parameter(covariance, "raw_noise", (1,)))
    if kinds == (FixedNoiseGaussianLikelihood, FixedGaussianNoise):
        seen.module(likelihood, "second_noise_covar")
        noise = seen.attribute(covariance, "noise")
        if getattr(likelihood, "second_noise_covar", None) is not None or noise.shape != (*seen.batch, len(x)):
            raise UnreadError("further noise")
        return _Known(seen.data(noise)[seen.at])
    if kinds == (HadamardGaussianLikelihood, MultitaskHomoskedasticNoise):
        column = seen.attribute(likelihood, "task_feature_index") if x.shape[1] > 1 else 0
        several = seen.attribute(likelihood, "num_tasks")
        if type(column) is not int or not -x.shape[1] <= column < x.shape[1]:
            raise UnreadError("noise of tasks in no column")
        with np.errstate(invalid="ignore"):
            tasks = x[:, column].astype(np.int64)
        return _NoiseOfTasks(seen.parameter(covariance, "raw_noise", (several,)), tasks)
    raise UnreadError(f"a likelihood {type(likelihood).__name__}")
