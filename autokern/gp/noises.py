"""Noise of gpytorch's likelihoods as arrays, with the derivatives by their parameters."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.likelihoods.hadamard_gaussian_likelihood import HadamardGaussianLikelihood
from gpytorch.likelihoods.noise_models import FixedGaussianNoise, HomoskedasticNoise, MultitaskHomoskedasticNoise

from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.small import Array, Parameter

__all__ = ["Noise", "noise_of"]


class Noise(Protocol):
    """The variances of the noise at the points that a model was read with."""

    def value(self) -> Array:
        """Return the variance of each point, or of all."""

    def backward(self, by_noise: Array) -> None:
        """Add the gradient by the parameters, from that by the variance of each point."""


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


class _OfTasks:
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
        return _OfTasks(seen.parameter(covariance, "raw_noise", (several,)), tasks)
    raise UnreadError(f"a likelihood {type(likelihood).__name__}")
