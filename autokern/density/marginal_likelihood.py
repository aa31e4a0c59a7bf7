"""The log marginal likelihood and log priors of one exact model in NumPy, with derivatives by all parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gpytorch.means import ConstantMean

from autokern.density.lapack import density
from autokern.kernels.arrays.part import Array, Part
from autokern.model.arrays import Inspected
from autokern.model.means_and_noise import Noise, Values
from autokern.model.priors import Term, term


class Single:
    """One model of a batch.

    A mean of None stands for zero. `by_residual` is the gradient by the residual, of the last evaluation.
    """

    __slots__ = ("_kernel", "_mean", "_targets", "_terms", "_x", "by_residual", "noise")

    def __init__(self, kernel: Part, noise: Noise, terms: Sequence[Term], mean: Values | None = None) -> None:
        self._kernel, self._terms, self._mean = kernel, terms, mean
        self.noise: Any = noise

    def on(self, x: Array, targets: Array) -> Single:
        """Set the points, laid out by `points.arranged`, and the targets; returns itself."""
        self._x, self._targets = x, targets
        return self

    def evaluate(self, scale: float, by_x: Array | None = None) -> float | None:
        """Return the log marginal likelihood times `scale`, and add its gradients to parameters and `by_x`.

        Returns None if the factorisation fails or the value is not finite.
        """
        targets, (k, kept) = self._targets.astype(np.float64, copy=False), self._kernel.evaluate(self._x)
        k.flat[:: len(targets) + 1] += self.noise.value()
        residual = targets if self._mean is None else targets - self._mean.value()
        found = density(k, residual, scale)
        if found is None or not math.isfinite(found.value):
            return None
        total, self.by_residual = found.value, found.by_residual
        by_noise = found.by_matrix.diagonal().copy()  # since the kernel overwrites `by_matrix`
        self._kernel.backward(kept, found.by_matrix, by_x)
        self.noise.backward(by_noise)
        if self._mean is not None:
            self._mean.backward(-found.by_residual)
        for parameter, at in self._terms:
            value, slope = at(parameter.value)
            total += value
            parameter.accumulate(slope * scale)
        return total * scale if math.isfinite(total) else None


def terms_of(seen: Inspected, model: Any) -> list[Term]:
    """Return the terms of a model's priors; reads a constant mean that was not read yet."""
    found = []
    for _, module, prior, closure, _ in model.named_priors():
        if type(module) is ConstantMean and seen.present(module._parameters.get("raw_constant")) is None:
            seen.parameter(module, "raw_constant")
        found.append(term(seen, module, prior, closure))
    return found
