"""Detects points spread so far that small distances lose all digits in single precision.

The squared distance ``|x|^2 + |x'|^2 - 2 x.x'`` has an error of about ``eps |x|^2``. If that changes a covariance too
much, points are centred and multiplied in double precision, block by block, forward and backward, and the distances
are rounded afterwards.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from autokern.kernels.family import Family

FAR = 1e-6
"""The error of k at distance zero above which products are taken in double precision.

Stock tolerates more: in a covariance that is differentiated it rounds the diagonal like the other entries, so that
repeated points stay equal. Our diagonal is exact, so entries of repeated points must be near it: with a noise of 1e-3
on repeated points, float32 densities had 1 to 4 times stock's error below this threshold, 100 times at 5e-5.
"""
_MOST = FAR / torch.finfo(torch.float32).eps
_SEEN = 4 * torch.finfo(torch.float64).eps
_steepness: dict[str, float] = {}


class Reach(NamedTuple):
    """Properties of points, from their largest squared norm."""

    far: bool  # whether double precision is needed
    number: bool | None  # whether no coordinate is NaN; None if it was not read
    cut: float  # |u| up to which kinked families round to a distance of zero; 0 for other families


UNSEEN = Reach(False, None, 0.0)


def reach(of: Family, scale: float, *norms: torch.Tensor) -> Reach:
    """Return the reach of points by their squared norms times `scale`, in units of u; reads one number back."""
    maxima = [n.max() for n in norms if n.numel()]
    largest = abs(scale) * torch.stack(maxima).sum().item() if maxima else 0.0
    single = norms[0].dtype is torch.float32
    if of.kinked:
        return Reach(single, not math.isnan(largest), _SEEN * largest)
    return Reach(single and not largest * _slope(of) <= _MOST, not math.isnan(largest), 0.0)


def _slope(of: Family) -> float:
    """Return ``|dk/du|`` at distance zero, 1 as an approximation for families with a shape."""
    found = _steepness.get(of.name)
    if found is None:
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        found = _steepness[of.name] = 1.0 if of.shape is not None else abs(of.slopes[0](zero).item())
    return found


def centre_of(x: torch.Tensor) -> torch.Tensor:
    """Return the detached mean of points ``(..., n, d)``, shape ``(..., 1, d)``, or zeros for no points."""
    return x.detach().mean(-2, keepdim=True) if x.shape[-2] else x.new_zeros(x.shape[-1])


def settled(of: Family, u: torch.Tensor, seen: Reach, diagonal: torch.Tensor | None = None) -> torch.Tensor:
    """Clear u of values on the wrong side of zero, in place; a given diagonal becomes 0, or NaN for NaN points."""
    if diagonal is not None:
        diagonal.zero_() if seen.number else diagonal.mul_(0)
    if seen.cut > 0:
        return torch.threshold_(u, seen.cut, 0.0)
    return u.clamp_max_(0) if of.gamma < 0 else u.clamp_min_(0)


def same_points(x1: torch.Tensor, x2: torch.Tensor) -> bool:
    """Whether two sets of points have equal values; tensors that share their memory are not compared."""
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
