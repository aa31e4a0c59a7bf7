"""Hooks into BoTorch's `gen_candidates_scipy`: fixed features, and the batched L-BFGS-B with SciPy 1.18.

`fix_features` copies column by column, each with an autograd node; the hook writes all columns at once.
BoTorch 0.18.1 optimises the starts as a batch by internals of SciPy's L-BFGS-B, which it supports up to SciPy 1.17.
With a later SciPy, all starts become one problem of many variables, and the posterior is evaluated two to four times
as often. The internals of SciPy 1.18 take the same arguments, unless it is built with 64-bit integers.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import numpy as np
import scipy

from autokern.core.recovery import uninterrupted
from autokern.hooks.bypass import stay_out
from autokern.hooks.install import hook
from autokern.hooks.later import evaluations

TRIED = (1, 18)
"""The SciPy release whose internals were compared; a later release may change their arguments."""
_REASON = "Scipy version"
_NAMES = ("fmin_l_bfgs_b_batched", "translate_bounds_for_lbfgsb")
"""Functions that BoTorch's module imports only with a SciPy release that it supports."""
_STARTS = np.array([[-1.2, 1.0], [0.0, 0.0], [1.4, -0.5]])
_BOUNDS = [None, [(-1.5, 0.5), (-0.5, 2.0)], [(None, 0.8), (-1.0, None)]]


def declare(gen: Any) -> bool:
    """Declare the hooks of `botorch.generation.gen` that are needed, and return True."""
    evaluations.declare(gen)
    stock_fixed = getattr(gen, "fix_features", None)
    if type(stock_fixed) is FunctionType:

        @hook(gen, "fix_features")
        def fixed(X: Any, fixed_features: Any = None, replace_current_value: Any = True) -> Any:
            found = None if stay_out() else evaluations.with_features(X, fixed_features, replace_current_value)
            return stock_fixed(X, fixed_features, replace_current_value) if found is None else found

    stock = getattr(gen, "get_reasons_against_fast_path", None)
    if not leaves_batch(gen) or type(stock) is not FunctionType:
        return True

    @hook(gen, "get_reasons_against_fast_path")
    def reasons(*args: Any, **kwargs: Any) -> Any:
        found = stock(*args, **kwargs)
        others = [reason for reason in found if not reason.startswith(_REASON)]
        if others == found or stay_out() or obstacle() is not None:
            return found
        from botorch.optim import batched_lbfgs_b

        for name in _NAMES:
            vars(gen).setdefault(name, getattr(batched_lbfgs_b, name))
        return others

    return True


def leaves_batch(gen: Any) -> bool:
    """Whether BoTorch treats the installed SciPy as untested."""
    check, minor = (getattr(gen, name, None) for name in ("check_scipy_version_at_least", "SCIPY_UNTESTED_VERSION"))
    return check is not None and minor is not None and bool(check(minor=minor))


def scipy_release() -> tuple[int, ...]:
    """Return the first two numbers of SciPy's version."""
    return tuple(map(int, scipy.__version__.split(".")[:2]))


@functools.cache
def obstacle() -> str | None:
    """Return why the starts cannot be optimised as a batch, None if they can; tried once, in some milliseconds."""
    from scipy.optimize import _lbfgsb_py

    if scipy_release() != TRIED:
        return "autokern has not tried that"
    if getattr(_lbfgsb_py, "HAS_ILP64", False):
        return "this SciPy is built with 64-bit integers"
    try:
        agree = all(_agree(bounds) for bounds in _BOUNDS)
    except uninterrupted(Exception) as error:
        return f"a trial failed: {type(error).__name__}: {error}"
    return None if agree else "a trial ended elsewhere than SciPy's own minimize"


def _agree(bounds: Any) -> bool:
    """Whether a batch of three starts ends where each of them ends alone, after as many iterations."""
    from botorch.optim.batched_lbfgs_b import fmin_l_bfgs_b_batched
    from scipy.optimize import minimize

    points, _, batch = fmin_l_bfgs_b_batched(_losses, _STARTS, bounds=bounds)
    alone = [minimize(_loss, start, jac=True, method="L-BFGS-B", bounds=bounds) for start in _STARTS]
    return all(
        np.allclose(point, one.x, rtol=1e-9, atol=1e-9) and (other.nit, other.success) == (one.nit, one.success)
        for point, other, one in zip(points, batch, alone, strict=True)
    )


def _loss(point: np.ndarray) -> tuple[float, np.ndarray]:
    """Return Rosenbrock's function and its gradient."""
    x, y = point
    return 100 * (y - x**2) ** 2 + (1 - x) ** 2, np.array([-400 * x * (y - x**2) - 2 * (1 - x), 200 * (y - x**2)])


def _losses(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, slopes = zip(*map(_loss, points), strict=True)
    return np.array(values), np.stack(slopes)
