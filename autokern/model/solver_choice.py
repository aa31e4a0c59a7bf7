"""Which algorithm the library uses for a covariance of n rows, and whether the user ordered it.

`max_cholesky_size` is 800 in linear_operator, and BoTorch sets 4096 at its import: both are defaults measured on other
machines. Any other value counts as the user's order, as do the settings in `model.library_orders`.
"""

from __future__ import annotations

from typing import Any

from linear_operator import settings as library

from autokern.model.library_orders import ROOTS, SOLVES, TRACES, orders

EXACT = "exact"
"""Stock factorises."""
ITERATIVE = "iterative"
"""Stock runs conjugate gradients because of a default; autokern may use any faster algorithm."""
ORDERED = "ordered"
"""Stock runs conjugate gradients because the user ordered them, or set their parameters."""

TRACE, SOLVE = library.fast_computations.log_prob, library.fast_computations.solves
ROOT = library.fast_computations.covar_root_decomposition
"""The settings whose off state makes stock factorise at any size: for densities, solves and roots."""
_WHAT = {TRACE: TRACES, SOLVE: SOLVES, ROOT: ROOTS}


def regime(n: int, switch: Any = TRACE, *more: Any) -> str:
    """Return EXACT, ITERATIVE or ORDERED for `n` rows under the setting `switch`; orders for `more` count too."""
    if n <= library.max_cholesky_size.value() or switch.off():
        return EXACT
    return ORDERED if orders(*(_WHAT[each] for each in (switch, *more))) else ITERATIVE
