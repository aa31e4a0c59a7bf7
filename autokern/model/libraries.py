"""The libraries' own functions, on which computations rely and which ``stock`` calls, and the user's orders.

`relied.json` lists the functions that stock runs for a density, a prediction or a fantasy, besides the classes of a
model; `calibration/record_routes.py` writes it. The originals are read when autokern is imported, since ops are
imported later, when hooks may have replaced them. A function that a release lacks is None here, and its hook is not
installed.

Orders are the libraries' settings for iterative solvers, where the user changed them. A value is an order if it is less
accurate than the library's default or asks for another iteration; only candidates that obey an order are eligible. A
more accurate value is no order, since exact candidates satisfy it. The values that BoTorch sets at its import count as
defaults. All threads share the settings, which are class attributes: they are read at each call, and written only while
a deferred result is computed under the settings of its call.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from operator import gt, lt, ne
from pathlib import Path
from typing import Any, NamedTuple

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ExactGP
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from gpytorch.variational import VariationalStrategy
from linear_operator import settings as library
from linear_operator.operators import LinearOperator

from autokern.core.releases.known import Relied, relied

_routes: dict[str, list[str]] = json.loads(Path(__file__).with_name("relied.json").read_text(encoding="utf-8"))
ALGEBRA = tuple(_routes["algebra"])  # functions that form and factorise a covariance
DENSITY = tuple(_routes["density"])  # functions that compute a marginal likelihood from a prior
TASKS = tuple(_routes["tasks"])
"""Functions that compute the marginal likelihood of several tasks observed at the same points."""
PREDICTION = tuple(_routes["prediction"])  # functions that compute a prediction from a prior and a factor
MEMORY = tuple(_routes["memory"])  # functions that take operators apart and cache results on them
density: Relied = relied(*DENSITY)
tasks: Relied = relied(*TASKS)
prediction: Relied = relied(*PREDICTION)
fantasy: Relied = relied(*_routes["fantasy"])  # functions that compute a fantasy from the caches of its model


def _of(owner: Any, name: str) -> Any:
    return getattr(sys.modules.get(owner) if isinstance(owner, str) else owner, name, None)


log_prob = _of(MultivariateNormal, "log_prob")
inv_quad_logdet = _of(LinearOperator, "inv_quad_logdet")
exact_call = _of(ExactGP, "__call__")
exact_prediction = _of(DefaultPredictionStrategy, "exact_prediction")
get_fantasy_strategy = _of(DefaultPredictionStrategy, "get_fantasy_strategy")
psd_safe_cholesky = _of("linear_operator.utils.cholesky", "_psd_safe_cholesky")
solve = _of("linear_operator.functions._solve", "_solve")
variational_forward = _of(VariationalStrategy, "forward")


def noise_in_place(likelihood: Any) -> bool:
    """Whether a likelihood, and its noise model, add noise by unpatched code of a known version."""
    covariance = likelihood._modules.get("noise_covar")
    for owner in (likelihood, covariance):
        if owner is not None and any(name in owner.__dict__ for name in _NOISE):
            return False
    kinds: Any = type(likelihood), None if covariance is None else type(covariance)
    return _code(*kinds).holds()


@functools.lru_cache(64)
def _code(likelihood: Any, covariance: Any) -> Relied:
    return relied(likelihood, *(TASKS if covariance is None else (covariance,)))


_NOISE = ("__call__", "_shaped_noise_covar", "forward", "marginal", "noise", "task_noise_covar", "task_noises")

_PURPOSES = SOLVES, TRACES, ROOTS = "solves", "log determinants", "roots"  # purposes of the library's iterations
DEFAULT_SIZES = (800, 4096)
"""Defaults of `max_cholesky_size`: linear_operator's, and the one that BoTorch sets at its import."""
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
"""The relative residual to which autokern's own iterations solve, unless the library's setting is tighter."""
LONGEST = 200  # most products of autokern's own iterations with a preconditioner before it counts as failed


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative residual to reach under the present settings."""
    return float(min(TOLERANCE[dtype], library.cg_tolerance.value()))


def is_default_size(limit: float) -> bool:
    """Whether a value of `max_cholesky_size` is the default: BoTorch's if its import turned fast computations off."""
    return limit == DEFAULT_SIZES[not library.fast_computations.log_prob._default]


class Row(NamedTuple):
    """A setting that affects iterations."""

    setting: Any  # the library's class
    default: float
    orders: Callable[[Any, Any], bool]  # whether a value is an order, given the default
    of: tuple[str, ...]  # the purposes whose iterations it affects

    @property
    def name(self) -> str:
        """The name of the setting."""
        return str(self.setting.__name__)

    def value(self) -> Any:
        """Return the value in force; of a switch, whether it is on."""
        return self.setting.on() if hasattr(self.setting, "on") else self.setting.value()


ROWS = (
    Row(library.max_cholesky_size, DEFAULT_SIZES[0], lambda limit, _: not is_default_size(limit), _PURPOSES),
    Row(library.cg_tolerance, 1, gt, (SOLVES, TRACES)),
    # an order if it is looser than its default, and in force as `cg_tolerance`
    Row(gpytorch.settings.eval_cg_tolerance, 0.01, lambda a, b: library.cg_tolerance.value() == a > b, (SOLVES,)),
    Row(library.max_cg_iterations, 1000, lt, (SOLVES, TRACES)),
    Row(library.terminate_cg_by_size, False, ne, (SOLVES, TRACES)),
    Row(library.max_preconditioner_size, 15, ne, (SOLVES, TRACES)),
    Row(library.min_preconditioning_size, 2000, ne, (SOLVES, TRACES)),
    Row(library.preconditioner_tolerance, 1e-3, ne, (SOLVES, TRACES)),
    Row(library.num_trace_samples, 10, lt, (TRACES,)),
    Row(library.max_lanczos_quadrature_iterations, 20, lt, (TRACES,)),
    Row(library.deterministic_probes, False, ne, (TRACES,)),
    Row(library.skip_logdet_forward, False, ne, (TRACES,)),
    Row(library.max_root_decomposition_size, 100, lt, (ROOTS,)),
    Row(library.tridiagonal_jitter, 1e-6, ne, (ROOTS,)),
)
_OF = {what: tuple(row for row in ROWS if what in row.of) for what in _PURPOSES}


def orders(*what: str) -> str:
    """Return the words for a problem's variant that state the user's orders for these purposes."""
    found = {row.name: value for each in what for row in _OF[each] if row.orders(value := row.value(), row.default)}
    return "".join(f"/order:{name}={float(value):g}" for name, value in found.items())


def words(exact: bool, *what: str) -> str:
    """Return the words of `orders` for a problem's variant; "" if the library does not iterate."""
    return "" if exact else orders(*what)


_LATER = (
    *(row.setting for row in ROWS if not {SOLVES, ROOTS}.isdisjoint(row.of)), library.cholesky_jitter,
    library.cholesky_max_tries, library.fast_computations.solves, library.fast_computations.covar_root_decomposition,
)  # fmt: skip
"""Settings that decide how, and how accurately, the library solves and factorises."""


def as_now() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a function that makes contexts with the present settings; a context sets only changed settings."""
    return functools.partial(_again, [(kind, _arguments(kind)) for kind in _LATER])


def _arguments(kind: Any) -> tuple[Any, ...]:
    if hasattr(kind, "_global_double_value"):
        return kind._global_float_value, kind._global_double_value, kind._global_half_value
    return (kind._state,) if hasattr(kind, "on") else (kind.value(),)


@contextlib.contextmanager
def _again(kept: list[tuple[Any, tuple[Any, ...]]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind, values in kept:
            if _arguments(kind) != values:
                stack.enter_context(kind(*values))
        yield


EXACT = "exact"  # stock factorises
ITERATIVE = "iterative"  # stock runs conjugate gradients because of a default; autokern may use any faster algorithm
ORDERED = "ordered"  # stock runs conjugate gradients because the user ordered them, or set their parameters

TRACE, SOLVE = library.fast_computations.log_prob, library.fast_computations.solves
ROOT = library.fast_computations.covar_root_decomposition
"""The settings whose off state makes stock factorise at any size: for densities, solves and roots."""
_WHAT = {TRACE: TRACES, SOLVE: SOLVES, ROOT: ROOTS}


def regime(n: int, switch: Any = TRACE, *more: Any) -> str:
    """Return EXACT, ITERATIVE or ORDERED for `n` rows under the setting `switch`; orders for `more` count too."""
    if n <= library.max_cholesky_size.value() or switch.off():
        return EXACT
    return ORDERED if orders(*(_WHAT[each] for each in (switch, *more))) else ITERATIVE
