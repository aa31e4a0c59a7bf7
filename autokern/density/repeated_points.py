"""The log density of repeated observations, from the mean of the observations at each distinct point.

Observations ``r_i`` with noise ``s_i`` at one point equal one observation, their mean weighted by ``1 / s_i``, with the
noise ``1 / sum(1 / s_i)``, and a term that does not depend on the covariance (Binois, Gramacy and Ludkovski 2018,
"Practical heteroscedastic Gaussian process modeling", section 2.2). So m distinct points need a factor of m rows. Rows
are the same point only if they are equal bit by bit. The search for repeats is cached by the values of the points.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from autokern.density import gaussian
from autokern.kernels import tree as trees
from autokern.kernels.far import centre_of
from autokern.model.marginal import Marginal
from autokern.model.originals import psd_safe_cholesky

LEAST = 200
"""Fewest points that are searched for repeats; fewer cost a millisecond anyway."""
MOST_DISTINCT = 0.9
"""Largest share of distinct points for which merging is faster."""
_KEPT, _KEPT_BYTES = 16, 2**20
"""Most sets of points in the cache, and most bytes of one; a search of a larger set costs little beside a step."""
_TYPES = (torch.float64, torch.float32)
_LOG_2_PI = math.log(2 * math.pi)


class _FailedError(Exception):
    """The covariance of the distinct points cannot be factorised without jitter."""


class Repeats(NamedTuple):
    """The m distinct points among n rows."""

    first: torch.Tensor  # the first row of each distinct point, ``(m,)``
    group: torch.Tensor  # the index of each row's distinct point, ``(n,)``
    counts: torch.Tensor  # the number of rows of each distinct point, ``(m,)``, in the dtype of the points


_kept: dict[tuple[torch.Size, torch.dtype, bytes], tuple[torch.Tensor, Repeats | None]] = {}
"""Copies of points and their repeats, by shape, dtype and last row."""


def found(x: torch.Tensor) -> Repeats | None:
    """Return the repeats of points; None if few repeat, or for few, batched, non-CPU or differentiated points."""
    if x.dim() != 2 or len(x) < LEAST or x.requires_grad or not x.shape[1]:
        return None
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or not x.is_cpu or x.dtype not in _TYPES:
        return None
    mark = x.shape, x.dtype, x.detach()[-1].numpy().tobytes()
    known = _kept.pop(mark, None)
    if known is None or not torch.equal(known[0], x):
        points = x.detach().clone(memory_format=torch.contiguous_format)
        known = points, _repeated(points) if torch.isfinite(points).all() else None
    if known[0].nbytes <= _KEPT_BYTES:
        _kept[mark] = known
        for oldest in list(_kept)[:-_KEPT]:
            _kept.pop(oldest, None)
    return known[1]


def distinct(x: torch.Tensor) -> int:
    """Return the number of distinct points among ``(..., n, d)``, or n if merging is not faster."""
    at = found(x)
    return x.shape[-2] if at is None else len(at.first)


def _repeated(points: torch.Tensor) -> Repeats | None:
    rows = points.numpy()
    bits = rows.view(np.dtype((np.void, rows.strides[0]))).ravel()
    _, first, group = np.unique(bits, return_index=True, return_inverse=True)
    if len(first) > MOST_DISTINCT * len(points):
        return None
    counts = torch.from_numpy(np.bincount(group)).to(points.dtype)
    return Repeats(torch.from_numpy(first), torch.from_numpy(group), counts)


def log_prob(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor | None:
    """Return the log density of a value ``(n,)`` under a marginal whose kernel is a tree.

    Returns None if too few points repeat, or if the noise is so small that the factorisation of all points may fail by
    rounding: the usual code then adds jitter, warns or raises.
    """
    x, kernel, noise = marginal.lazy.x1, marginal.lazy.kernel, marginal.noise
    at = found(x)
    if at is None:
        return None
    points = x.detach().index_select(0, at.first)
    tree = trees.read(kernel, points, centre_of(points))
    if not _is_clear(tree, trees.diagonal(kernel, points, points.shape[:-1]), noise, len(x), exact):
        return None
    means, variances, rest = _together(noise, value - marginal.distribution.loc, at)
    strict = True

    def jittered(matrix: torch.Tensor) -> torch.Tensor:
        if strict:
            raise _FailedError
        return psd_safe_cholesky(matrix)  # in a second backward pass

    try:
        return gaussian.log_prob(tree, variances, means, ladder=jittered) + rest
    except _FailedError:
        return None
    finally:
        strict = False


@torch.no_grad()
def _is_clear(tree: trees.Tree, diagonal: torch.Tensor, noise: torch.Tensor, n: int, exact: bool) -> bool:
    """Whether the noise exceeds the rounding of the covariance of n points, by the bound of `exact_log_prob`.

    With less noise, stock's factorisation (`exact`) may need jitter or fail; if stock iterates, n counts as 1.
    """
    size = max((z.square().sum(-1).max().item() for z in tree.points), default=0.0)
    bound = 2 * ((n if exact else 1) + size) * torch.finfo(noise.dtype).eps * (diagonal.amax() + noise.amax())
    return bool(noise.amin() > bound) and math.isfinite(size)


def _together(
    noise: torch.Tensor, residual: torch.Tensor, at: Repeats
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean and noise of the observations at each distinct point, and the term without the covariance."""

    def sums(of_rows: torch.Tensor) -> torch.Tensor:
        return of_rows.new_zeros(len(at.first)).index_add(0, at.group, of_rows)

    n, m = len(at.group), len(at.first)
    if noise.shape[-1] == 1:
        means, variances = sums(residual) / at.counts, noise / at.counts
        logs = (n - m) * noise.log().sum() + at.counts.log().sum()
    else:
        weights = noise.reciprocal()
        total = sums(weights)
        means, variances = sums(residual * weights) / total, total.reciprocal()
        logs = noise.log().sum() + total.log().sum()
    within = (residual - means.index_select(0, at.group)).square() / noise
    return means, variances, -0.5 * (within.sum() + logs + (n - m) * _LOG_2_PI)
