"""Which algorithm the library would take for a covariance of n rows, and whether the user has ordered it.

`max_cholesky_size` is 800 in linear_operator, and BoTorch sets 4096 at its import: both are defaults that somebody
measured elsewhere. Any other value is the user's order. Floor 4.
"""

from __future__ import annotations

import sys

from linear_operator import settings as library

__all__ = ["EXACT", "ITERATIVE", "ORDERED", "regime"]

EXACT = "exact"
"""Stock factorises."""
ITERATIVE = "iterative"
"""Stock runs conjugate gradients because of a default: a faster factorisation is better."""
ORDERED = "ordered"
"""Stock runs conjugate gradients because the user says so."""

_DEFAULT, _BOTORCH = 800, 4096


def regime(n: int) -> str:
    """Return which of the three holds for a covariance of `n` rows."""
    limit = library.max_cholesky_size.value()
    if n <= limit or library.fast_computations.log_prob.off():
        return EXACT
    default = limit == _DEFAULT or (limit == _BOTORCH and "botorch" in sys.modules)
    return ITERATIVE if default else ORDERED
