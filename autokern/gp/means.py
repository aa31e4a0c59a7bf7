"""Means of gpytorch as arrays, with the derivatives by their parameters."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from gpytorch.means import ConstantMean, LinearMean, MultitaskMean, ZeroMean

from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.small import Array, Parameter

__all__ = ["Mean", "mean_of"]


class Mean(Protocol):
    """A mean at the points that a model was read with."""

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


class _OfTasks:
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
        return _OfTasks(constants, tasks)
    if kind is LinearMean:
        bias = seen.parameter(mean, "bias", (1,)) if "bias" in mean._parameters else None
        return _Linear(x, seen.parameter(mean, "weights", (x.shape[1], 1)), bias)
    seen.attribute(mean, "batch_shape")
    if kind not in (ConstantMean, ZeroMean) or mean.batch_shape != seen.batch:
        raise UnreadError(f"a mean {kind.__name__}, or one with another batch")
    return _Constant(seen.parameter(mean, "raw_constant")) if kind is ConstantMean else None
