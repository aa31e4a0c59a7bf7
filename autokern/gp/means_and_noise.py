"""Means and noise of gpytorch's models as arrays, at the points that a model was read with, and their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.likelihoods.hadamard_gaussian_likelihood import HadamardGaussianLikelihood
from gpytorch.likelihoods.noise_models import FixedGaussianNoise, HomoskedasticNoise, MultitaskHomoskedasticNoise
from gpytorch.means import ConstantMean, LinearMean, MultitaskMean, ZeroMean

from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.small import Array

__all__ = ["Given", "Noise", "Values", "mean_of", "noise_of"]


class Values(NamedTuple):
    """The mean, or the variances of the noise, of each point, or one of all."""

    value: Callable[[], Any]
    backward: Callable[[Array], object]  # adds the gradient by the parameters, from that by each point's value


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


Noise = Given | Values
"""Variances of noise."""


def mean_of(seen: Inspected, mean: Any, x: Array, tasks: Array | None) -> Values | None:
    """Return the mean of points, None for zero; BoTorch's model selects of several means by the tasks."""
    kind = type(mean)
    if kind is MultitaskMean and tasks is not None:
        several = seen.module(mean, "base_means")
        inner = [seen.module(several, name) for name in several._modules]
        if any(type(one) is not ConstantMean for one in inner) or tasks.min() < 0 or tasks.max() >= len(inner):
            raise UnreadError("means of tasks that are no constants")
        return _means_of_tasks([_constant(seen, one) for one in inner], tasks)
    if kind is LinearMean:
        bias = seen.parameter(mean, "bias", (1,)) if "bias" in mean._parameters else None
        return _linear(x, seen.parameter(mean, "weights", (x.shape[1], 1)), bias)
    if kind is ZeroMean:
        _look_at_batch(seen, mean)
        return None
    if kind is not ConstantMean:
        raise UnreadError(f"a mean {kind.__name__}")
    constant = _constant(seen, mean)
    return Values(lambda: constant.value, lambda by_mean: constant.accumulate(by_mean.sum()))


def _look_at_batch(seen: Inspected, mean: Any) -> None:
    seen.attribute(mean, "batch_shape")
    if mean.batch_shape != seen.batch:
        raise UnreadError("a mean with another batch")


def _constant(seen: Inspected, mean: Any) -> Any:
    _look_at_batch(seen, mean)
    return seen.parameter(mean, "raw_constant")


def _linear(x: Array, weights: Any, bias: Any) -> Values:
    def value() -> Array:
        found: Array = (x @ weights.value)[:, 0]
        return found if bias is None else found + bias.value

    def backward(by_mean: Array) -> None:
        weights.accumulate((by_mean @ x)[:, None])
        if bias is not None:
            bias.accumulate(by_mean.sum())

    return Values(value, backward)


def _means_of_tasks(constants: list[Any], tasks: Array) -> Values:
    def backward(by_mean: Array) -> None:
        sums = np.bincount(tasks, by_mean, len(constants))
        for constant, total in zip(constants, sums, strict=True):
            constant.accumulate(total)

    return Values(lambda: np.array([constant.value for constant in constants])[tasks], backward)


def noise_of(seen: Inspected, likelihood: Any, x: Array) -> Values:
    """Return the noise that a likelihood adds at points, which it gets as the caller has them."""
    covariance = seen.module(likelihood, "noise_covar")
    kinds = type(likelihood), type(covariance)
    if kinds == (GaussianLikelihood, HomoskedasticNoise):
        noise: Any = seen.parameter(covariance, "raw_noise", (1,))
        return Values(lambda: noise.value, lambda by_noise: noise.accumulate(np.add.reduce(by_noise)))
    if kinds == (FixedNoiseGaussianLikelihood, FixedGaussianNoise):
        seen.module(likelihood, "second_noise_covar")
        fixed = seen.attribute(covariance, "noise")
        if getattr(likelihood, "second_noise_covar", None) is not None or fixed.shape != (*seen.batch, len(x)):
            raise UnreadError("further noise")
        known = seen.data(fixed)[seen.at]
        return Values(lambda: known, lambda by_noise: None)
    if kinds == (HadamardGaussianLikelihood, MultitaskHomoskedasticNoise):
        column = seen.attribute(likelihood, "task_feature_index") if x.shape[1] > 1 else 0
        several = seen.attribute(likelihood, "num_tasks")
        if type(column) is not int or not -x.shape[1] <= column < x.shape[1]:
            raise UnreadError("noise of tasks in no column")
        with np.errstate(invalid="ignore"):
            tasks = x[:, column].astype(np.int64)
        return _noise_of_tasks(seen.parameter(covariance, "raw_noise", (several,)), tasks)
    raise UnreadError(f"a likelihood {type(likelihood).__name__}")


def _noise_of_tasks(noise: Any, tasks: Array) -> Values:
    """Return a variance for each task, and none for what is no task: the library compares and never maps."""
    each = np.equal(tasks[:, None], np.arange(noise.value.size)).astype(np.float64)
    return Values(lambda: each @ noise.value, lambda by_noise: noise.accumulate(by_noise @ each))
