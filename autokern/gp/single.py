"""One exact model by arrays: log density of its data and log priors, with the derivatives by all parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gpytorch.means import ConstantMean

from autokern.gp import small
from autokern.gp.inspected import Inspected
from autokern.gp.means_and_noise import Noise, Values
from autokern.gp.priors import Term, term
from autokern.gp.small import Array

__all__ = ["Single", "terms_of"]


class Single:
    """One model of a batch.

    A mean of None is zero, or targets are residuals already; `by_residual` is the derivative, of the last evaluation.
    """

    __slots__ = ("_kernel", "_mean", "_targets", "_terms", "_x", "by_residual", "noise")

    def __init__(self, kernel: small.Part, noise: Noise, terms: Sequence[Term], mean: Values | None = None) -> None:
        self._kernel, self._terms, self._mean = kernel, terms, mean
        self.noise: Any = noise

    def on(self, x: Array, targets: Array) -> Single:
        """Give it points as its kernel takes them, and targets; return itself."""
        self._x, self._targets = x, targets
        return self

    def evaluate(self, scale: float, by_x: Array | None = None) -> float | None:
        """Return the marginal log likelihood times a factor, and add its derivatives to the parameters.

        The derivative by the points is added to `by_x`. None is returned where there is no factor or no number.
        """
        targets, (k, kept) = self._targets.astype(np.float64, copy=False), self._kernel.evaluate(self._x)
        k.flat[:: len(targets) + 1] += self.noise.value()
        residual = targets if self._mean is None else targets - self._mean.value()
        found = small.density(k, residual, scale)
        if found is None or not math.isfinite(found.value):
            return None
        total, self.by_residual = found.value, found.by_residual
        by_noise = found.by_matrix.diagonal().copy()  # the kernel overwrites the matrix
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
    """Return the priors of a model, whose mean may be unread."""
    found = []
    for _, module, prior, closure, _ in model.named_priors():
        if type(module) is ConstantMean and seen.present(module._parameters.get("raw_constant")) is None:
            seen.parameter(module, "raw_constant")
        found.append(term(seen, module, prior, closure))
    return found
