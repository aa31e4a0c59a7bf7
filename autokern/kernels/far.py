"""Points so far apart that single precision has no digits left for the distances of near ones.

A squared distance as ``|x|^2 + |x'|^2 - 2 x.x'`` is wrong by some ``eps |x|^2``. Where that is more than a covariance
can bear, points are centred and multiplied in double precision, block by block, forward and backward; distances are
rounded once they are formed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from autokern.kernels.family import Family

FAR = 1e-6
"""The rounding of k at no distance from which on products are taken in double precision.

Stock forgives more: the diagonal of a covariance that is differentiated is rounded as its copies elsewhere are, so that
repeated points stay equal. Ours is exact, and what is not must be near it: with 1e-3 of noise on repeated points,
float32 densities were wrong by 1 to 4 times what stock's were below this, by 100 times at 5e-5.
"""
_MOST = FAR / torch.finfo(torch.float32).eps
_SEEN = 4 * torch.finfo(torch.float64).eps
_steepness: dict[str, float] = {}


class Reach(NamedTuple):
    """Properties of points, from the largest of their squared norms."""

    far: bool  # whether to go on in double precision
    number: bool | None  # whether no point is a NaN; None where that was not read
    cut: float  # u up to which it is rounding of points that coincide, where the slope there is infinite; else 0


UNSEEN = Reach(False, None, 0.0)


def reach(of: Family, scale: float, *norms: torch.Tensor) -> Reach:
    """Look at squared norms, of which a scale makes units of u: one number is read back."""
    maxima = [n.max() for n in norms if n.numel()]
    largest = abs(scale) * torch.stack(maxima).sum().item() if maxima else 0.0
    single = norms[0].dtype is torch.float32
    if of.kinked:
        return Reach(single, not math.isnan(largest), _SEEN * largest)
    return Reach(single and not largest * _slope(of) <= _MOST, not math.isnan(largest), 0.0)


def _slope(of: Family) -> float:
    """Return how much k changes with u at no distance; about, where that is a matter of a shape."""
    found = _steepness.get(of.name)
    if found is None:
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        found = _steepness[of.name] = 1.0 if of.shape is not None else abs(of.slopes[0](zero).item())
    return found


def centre_of(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of points ``(..., n, d)``, shape ``(..., 1, d)``, or zeros; no gradient flows through it."""
    return x.detach().mean(-2, keepdim=True) if x.shape[-2] else x.new_zeros(x.shape[-1])


def settled(of: Family, u: torch.Tensor, seen: Reach, diagonal: torch.Tensor | None = None) -> torch.Tensor:
    """Return u without negative values from rounding, in place; a diagonal is 0, or NaN where its points are."""
    if diagonal is not None:
        diagonal.zero_() if seen.number else diagonal.mul_(0)
    if seen.cut > 0:
        return torch.threshold_(u, seen.cut, 0.0)
    return u.clamp_max_(0) if of.gamma < 0 else u.clamp_min_(0)


def same_points(x1: torch.Tensor, x2: torch.Tensor) -> bool:
    """Whether two sets of points are equal by value; the same memory is equal without looking."""
    if x1 is x2:
        return True
    if x1.shape != x2.shape:
        return False
    if x1.data_ptr() == x2.data_ptr() and x1.stride() == x2.stride():
        return True
    return torch.equal(x1, x2)


def are_numbers(*points: torch.Tensor) -> bool:
    """Whether no coordinate is NaN or infinite."""
    return all(math.isfinite(x.detach().sum().item()) for x in points)
