"""Points so far apart that single precision has no digits left for the distances of near ones.

A squared distance as ``|x|^2 + |x'|^2 - 2 x.x'`` is wrong by some ``eps |x|^2``. Where that is more than a covariance
can bear, points are centred, multiplied and pulled back in double precision, block by block, and distances are rounded
once they are there. Floor 2: may import `family`.
"""

from __future__ import annotations

import torch

from autokern.kernels.family import Family

__all__ = ["FAR", "centred", "clamp_", "cut", "is_far"]

_EPS = torch.finfo(torch.float32).eps
FAR = 1e-6
"""The rounding of u from which on products are taken in double precision.

Stock forgives more: the diagonal of a covariance that is differentiated is rounded as its copies elsewhere are, so that
repeated points stay equal. Ours is exact, and what is not must be near it: with 1e-3 of noise on repeated points,
float32 densities were wrong by 1 to 4 times what stock's were below this, by 100 times at 5e-5.
"""


def is_far(of: Family, scale: float, *norms: torch.Tensor) -> bool:
    """Whether points are far apart by their squared norms, of which a scale makes units of u; NaNs are far, too.

    Where the slope is infinite at no distance, rounding is always too much.
    """
    if norms[0].dtype is not torch.float32:
        return False
    most = FAR / (_EPS * abs(scale))
    return of.kinked or not all(n.max().item() <= most for n in norms if n.numel())


def centred(points: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """Return points less a centre in double precision."""
    return points.double() - centre


def cut(of: Family, scale: float, *norms: torch.Tensor) -> float:
    """Return the u up to which it is but the rounding of points that coincide, where that matters; else 0."""
    if not of.kinked:
        return 0.0
    return (
        4
        * torch.finfo(norms[0].dtype).eps
        * abs(scale)
        * max((n.max().item() for n in norms if n.numel()), default=0.0)
    )


def clamp_(of: Family, u: torch.Tensor, cut: float) -> torch.Tensor:
    """Push to zero, in place, what rounding carried across it, and what a `cut` takes for zero."""
    return torch.threshold_(u, cut, 0.0) if cut else of.clamp_(u)
