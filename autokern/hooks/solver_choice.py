"""Which algorithm the library would take for a covariance of n rows, and whether the user has ordered that.

`max_cholesky_size` is 800 in linear_operator, and BoTorch sets 4096 at its import: both are defaults measured on other
machines. Any other value is the user's order.
"""

from __future__ import annotations

import sys
from typing import Any

from linear_operator import settings as library

__all__ = ["DEFAULT", "EXACT", "ITERATIVE", "ORDERED", "is_default", "preconditions", "regime"]

EXACT = "exact"
"""Stock factorises."""
ITERATIVE = "iterative"
"""Stock runs conjugate gradients because of a default: a faster factorisation is better."""
ORDERED = "ordered"
"""Stock runs conjugate gradients because the user says so."""

DEFAULT = 800
"""The default of linear_operator."""
_BOTORCH = 4096
_TOLERANCE = 1
"""The library's tolerance of training; a looser one is the user's order."""
_RANK, _LEAST = 15, 2000
"""The library's defaults of `max_preconditioner_size` and `min_preconditioning_size`; others are the user's order."""


def is_default(limit: float) -> bool:
    """Whether this is a value of `max_cholesky_size` that a library set, not the user."""
    return limit == DEFAULT or (limit == _BOTORCH and "botorch" in sys.modules)


def regime(n: int, switch: Any = library.fast_computations.log_prob) -> str:
    """Return which of the three holds for a covariance of `n` rows.

    `switch` is the setting that makes stock factorise whatever the size. Asking for no log determinant, for probes that
    stay the same, or for a looser tolerance than the library's, is an order to iterate too.
    """
    limit = library.max_cholesky_size.value()
    if n <= limit or switch.off():
        return EXACT
    special = library.skip_logdet_forward.on() or library.deterministic_probes.on()
    special = special or library.cg_tolerance.value() > _TOLERANCE
    return ITERATIVE if is_default(limit) and not special else ORDERED


def preconditions(n: int) -> bool:
    """Whether a system of `n` rows that is iterated may have another preconditioner: the user orders nothing of it."""
    least = library.min_preconditioning_size.value()
    usual = library.max_preconditioner_size.value() == _RANK and library.cg_tolerance.value() <= _TOLERANCE
    return bool(usual and (least == _LEAST or n >= least))
