"""Conjugate gradients as users meet them: the products of a density, and how far off the gradients are.

`calibration/large.py --ship` writes `iterations.json` from what its study counted: the least products of any system,
the usual ones, the errors of stock's gradients, how many times as long as the candidate `stock`, whose parts are
dispatched, the library takes by itself, and the points up to which exact candidates serve while nothing is measured.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from linear_operator.utils.errors import NanError, NotPSDError

from autokern.core.arguments import tensors_in
from autokern.core.candidate import Candidate, Error, Run
from autokern.core.locks import once
from autokern.core.problem import Problem
from autokern.gp.systems import LONGEST, TOLERANCE
from autokern.ops._shared import iterates

_MAY_COST = 1.3
"""Times of stock's time that exact gradients may take at least, where stock's are loose."""
_REST = 12.0
"""What the rest of a step takes, in products."""


class Counted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the study counted: by number of points, and over all of its models."""

    least: int
    points: list[int]
    usual: list[float]
    errors: list[float]
    alone: float
    exact: int


@functools.cache
def counted() -> Counted:
    """Return what the package ships."""
    text = importlib.resources.files("autokern.ops").joinpath("iterations.json").read_bytes()
    return msgspec.json.decode(text, type=Counted)


def _usual(n: int) -> float:
    """Return the products that a system of n points usually takes, by the next smaller size of the study."""
    below = [usual for size, usual in zip(counted().points, counted().usual, strict=True) if size <= n]
    return below[-1] if below else counted().usual[0]


class Loose:
    """What an op says of its answers where stock iterates to a loose tolerance; mixed in before `Op`."""

    looseness: Error
    """What is to be expected of stock there."""

    def approximates(self, problem: Problem) -> bool:
        """Whether stock iterates."""
        return iterates(problem)

    def expected_error(self, problem: Problem, candidate: Candidate) -> Error | None:
        """Return the error to expect: stock's of what iterates as stock does, else what the candidate says itself."""
        return self.looseness if iterates(problem) and candidate.loose else candidate.error(problem)

    def remark(self, problem: Problem) -> str:
        """Return what stock's answer is worth."""
        return self.looseness.words if iterates(problem) else ""


class Iterated(Loose):
    """What an op says besides whose stock takes as long as its products: densities, and solutions."""

    @once
    def looseness(self) -> Error:  # type: ignore[override]
        """How far off the gradients of a density are."""
        low, high = (100 * error for error in counted().errors)
        worth = f"its gradients are off by {low:.0f} % to {high:.0f} % on models like this"
        return Error(f"{low:.0f}-{high:.0f} %", f"stock iterates, by default to a tolerance of 1: {worth}")

    def may_cost(self, problem: Problem) -> float:
        """Return how many times stock's time on a sample exact gradients may take.

        Systems of users take more products than samples do. On a CPU, stock has dispatched parts, and may take as long
        as the library by itself. Above the points up to which that was found to suffice, iterations to a tight residual
        take much less.
        """
        if not iterates(problem) or (problem.device == "cpu" and problem.n > exact_up_to(problem)):
            return 1.0
        harder = (max(_usual(problem.n), counted().least) + _REST) / (counted().least + _REST)
        return harder * (max(_MAY_COST, counted().alone) if problem.device == "cpu" else _MAY_COST)


def to_a_residual(more: str = "") -> Callable[[Problem], Error]:
    """Return the error to expect of a candidate that solves to the residual of `gp.systems`."""

    def error(problem: Problem) -> Error:
        goal = TOLERANCE[torch.float32 if problem.dtype == "float32" else torch.float64]
        return Error(
            f"residual {goal:.0e}", f"solved to a relative residual of {goal:.0e}, or your tighter cg_tolerance{more}"
        )

    return error


def as_own_iterations(name: str, value: float, problem: Problem) -> bool:
    """Whether iterations of our own, preconditioned and to a tight residual, obey a setting of the library."""
    obeyed = name in ("max_cholesky_size", "terminate_cg_by_size", "num_trace_samples")
    some = (name == "max_cg_iterations" and value >= LONGEST) or (
        name == "min_preconditioning_size" and value <= problem.n
    )
    return obeyed or some


def or_iterate(
    stock: Run,
    is_exact: Callable[..., bool] = lambda *args: args[-1],
    numbers: Callable[[Any], Iterable[torch.Tensor]] = tensors_in,
) -> Callable[[Run], Run]:
    """Return a decorator of exact candidates: stock answers where it iterates and there is no factor or no number."""

    def decorate(run: Run) -> Run:
        @functools.wraps(run)
        def either(*args: Any) -> Any:
            exact = is_exact(*args)
            try:
                found = run(*args)
            except (NanError, NotPSDError):
                if exact:
                    raise
            else:
                if exact or all(t.isfinite().all() for t in numbers(found)):
                    return found
            return stock(*args)

        return either

    return decorate


def exact_up_to(problem: Problem) -> int:
    """Return the points up to which an exact candidate serves while nothing is measured, nor ordered."""
    return counted().exact if iterates(problem) and not problem.orders else 0
