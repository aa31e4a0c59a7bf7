"""The density of observations at points that occur several times, by the mean of each point's observations.

Observations ``r_i`` with noise ``s_i`` at one point are worth one observation, their mean weighted by ``1 / s_i``, with
the noise ``1 / sum(1 / s_i)``, and a term that the covariance does not enter (Binois, Gramacy and Ludkovski 2018,
"Practical heteroscedastic Gaussian process modeling", section 2.2). So m points that differ take a factor of m rows.
"""

from __future__ import annotations

import math

import torch

from autokern.gp import likelihood, structure
from autokern.gp.likelihood import Ladder
from autokern.gp.marginal import Marginal
from autokern.gp.structure import Repeats
from autokern.kernels import tree as trees
from autokern.kernels.far import centre_of

__all__ = ["is_clear", "log_prob"]

_LOG_2_PI = math.log(2 * math.pi)


class _FailedError(Exception):
    """The covariance of the points that differ has no factor without jitter."""


def log_prob(marginal: Marginal, value: torch.Tensor, exact: bool, ladder: Ladder) -> torch.Tensor | None:
    """Return the log density of a value ``(n,)`` under a marginal with a kernel that is a tree.

    None is returned where nothing repeats, and where the noise is so small that rounding may take the factor of all
    points away: what to do then (jitter, a warning, an error) is the ordinary way's matter.
    """
    x, kernel, noise = marginal.lazy.x1, marginal.lazy.kernel, marginal.noise
    found = structure.of(x)
    at = None if found is None else found.repeats
    if at is None:
        return None
    points = x.detach().index_select(0, at.first)
    tree = trees.read(kernel, points, centre_of(points))
    if not is_clear(tree, trees.diagonal(kernel, points, points.shape[:-1]), noise, len(x), exact):
        return None
    residual = value - marginal.distribution.loc
    means, variances, rest = _together(noise, residual, at)
    strict = True

    def jittered(matrix: torch.Tensor) -> torch.Tensor:
        if strict:
            raise _FailedError
        return ladder(matrix)  # of a second backward pass

    try:
        return likelihood.log_prob(tree, variances, means, jittered) + rest
    except _FailedError:
        return None
    finally:
        strict = False


@torch.no_grad()
def is_clear(tree: trees.Tree, diagonal: torch.Tensor, noise: torch.Tensor, n: int, exact: bool) -> bool:
    """Whether noise is larger than what rounding does to the covariance of n points, by the bound of `exact_log_prob`.

    Where stock factorises, it may need jitter for less noise, or fail; where it iterates, one entry counts.
    """
    size = max((z.square().sum(-1).max().item() for z in tree.points), default=0.0)
    bound = 2 * ((n if exact else 1) + size) * torch.finfo(noise.dtype).eps * (diagonal.amax() + noise.amax())
    return bool(noise.amin() > bound) and math.isfinite(size)


def _together(
    noise: torch.Tensor, residual: torch.Tensor, at: Repeats
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean and the variance of the observations at each point, and the log density of all beside those."""

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
