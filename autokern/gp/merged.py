"""The log density of a small Gaussian process whose points repeat, by arrays: `repeats` as `small` computes it."""

from __future__ import annotations

import math

import numpy as np
import torch

from autokern.gp import small, structure
from autokern.gp.small import Array, Marginal, Part

__all__ = ["marginal"]

_EPS = float(np.finfo(np.float64).eps)
_LOG_2_PI = math.log(2 * math.pi)


def marginal(
    part: Part, x: Array, noise: Array, residual: Array, factor: float, by_x: Array | None = None
) -> Marginal | None:
    """Return what `small.marginal` does, from one row for points that are the same where they repeat.

    Derivatives by the points, and noise that rounding may swallow, take all rows.
    """
    seen = structure.of(torch.from_numpy(x)) if by_x is None else None
    at = None if seen is None else seen.repeats
    found = None if at is None else _merged(part, x, noise, residual, factor, at)
    return small.marginal(part, x, noise, residual, factor, by_x) if found is None else found


def _merged(
    part: Part, x: Array, noise: Array, residual: Array, factor: float, at: structure.Repeats
) -> Marginal | None:
    first, group = at.first.numpy(), at.group.numpy()
    n, m, each = len(x), len(first), np.broadcast_to(noise, (len(x),))
    k = part.evaluate(x[first])
    least = 2 * (n + part.size()) * _EPS * (k.diagonal().max() + each.max())
    if not each.min() > least:
        return None
    weights = 1.0 / each
    total = np.bincount(group, weights, m)
    means = np.bincount(group, weights * residual, m) / total
    k.flat[:: m + 1] += 1.0 / total
    found = small.density(k, means, factor)
    if found is None or not math.isfinite(found.value):
        return None
    by_variance = found.by_matrix.diagonal().copy()  # the kernel overwrites the matrix
    part.backward(found.by_matrix)
    gap, share, by_mean = residual - means[group], weights / total[group], found.by_residual[group]
    pull = weights * gap
    rest = pull @ gap + np.log(each).sum() + np.log(total).sum() + (n - m) * _LOG_2_PI
    by_noise = share * (share * by_variance[group] - pull * by_mean)
    by_noise += (0.5 * factor) * (pull * pull - weights * (1.0 - share))
    return Marginal(found.value - 0.5 * float(rest), by_noise, share * by_mean - factor * pull)
