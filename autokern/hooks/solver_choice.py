"""Which algorithm the library would take for a covariance of n rows, and whether the user has ordered that.

`max_cholesky_size` is 800 in linear_operator, and BoTorch sets 4096 at its import: both are defaults measured on other
machines. Any other value is the user's order, as is what `gp.library_orders` lists.
"""

from __future__ import annotations

from typing import Any

from linear_operator import settings as library

from autokern.gp.library_orders import ROOTS, SOLVES, TRACES, orders

__all__ = ["EXACT", "ITERATIVE", "ORDERED", "ROOT", "SOLVE", "TRACE", "regime"]

EXACT = "exact"
"""Stock factorises."""
ITERATIVE = "iterative"
"""Stock runs conjugate gradients because of a default: a faster factorisation is better."""
ORDERED = "ordered"
"""Stock runs conjugate gradients because the user says so, or as the user says."""

TRACE, SOLVE = library.fast_computations.log_prob, library.fast_computations.solves
ROOT = library.fast_computations.covar_root_decomposition
"""The settings that make stock factorise whatever the size: for densities, for solutions and for roots."""
_WHAT = {TRACE: TRACES, SOLVE: SOLVES, ROOT: ROOTS}


def regime(n: int, switch: Any = TRACE, *more: Any) -> str:
    """Return which of the three holds for a covariance of `n` rows.

    `switch` is the setting that makes stock factorise; orders for what `more` of them are about count too.
    """
    if n <= library.max_cholesky_size.value() or switch.off():
        return EXACT
    return ORDERED if orders(*(_WHAT[each] for each in (switch, *more))) else ITERATIVE
