"""Stock's conjugate gradients on real models: their number of products, and the error of their gradients.

The numbers come from a study, whose counts `calibration/large.py --ship` writes to `iterations.json`.
"""

from __future__ import annotations

import bisect
import functools
import importlib.resources
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from linear_operator.utils.errors import NanError, NotPSDError

from autokern.core.op import tensors_in
from autokern.core.problem import Candidate, Error, Problem, Run
from autokern.core.state import once
from autokern.model.library_orders import LONGEST, TOLERANCE
from autokern.ops._problems import OpOfParts, iterates

_MAY_COST = 1.3
"""Exact gradients may take this many times stock's time at least, where stock's own are inaccurate."""
_REST = 12.0
"""Time of the rest of a training step, in units of a product."""


class Counted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Results of the study."""

    least: int  # smallest number of products of any system
    points: list[int]
    usual: list[float]  # typical numbers of products at the sizes `points`
    errors: list[float]  # lowest and highest relative error of stock's gradients
    alone: float  # the library's time over that of the candidate `stock`, whose parts are dispatched
    exact: int  # points up to which exact candidates serve without measurements


@functools.cache
def counted() -> Counted:
    text = importlib.resources.files("autokern.ops").joinpath("iterations.json").read_bytes()
    return msgspec.json.decode(text, type=Counted)


class Loose(OpOfParts):
    """An op whose stock iterates to a loose tolerance above `max_cholesky_size`, with the error `looseness`."""

    looseness: Error

    def approximates(self, problem: Problem) -> bool:
        return iterates(problem)

    def expected_error(self, problem: Problem, candidate: Candidate) -> Error | None:
        return self.looseness if iterates(problem) and candidate.loose else candidate.error(problem)

    def remark(self, problem: Problem) -> str:
        return self.looseness.words if iterates(problem) else ""


class Iterated(Loose):
    """One whose stock spends its time in products: densities and solves."""

    @once
    def looseness(self) -> Error:  # type: ignore[override]
        low, high = (100 * error for error in counted().errors)
        worth = f"its gradients are off by {low:.0f} % to {high:.0f} % on models like this"
        return Error(f"{low:.0f}-{high:.0f} %", f"stock iterates, by default to a tolerance of 1: {worth}")

    def may_cost(self, problem: Problem) -> float:
        """Return how many times stock's time on a sample an exact candidate may take.

        Real systems take more products than samples, and on a CPU the library by itself takes longer than the candidate
        `stock`, whose parts are dispatched. Above `exact_up_to` points on a CPU the answer is 1: iterations to a tight
        residual are much faster there.
        """
        if not iterates(problem) or (problem.device == "cpu" and problem.n > exact_up_to(problem)):
            return 1.0
        known = counted()
        usual = known.usual[max(0, bisect.bisect_right(known.points, problem.n) - 1)]
        harder = (max(usual, known.least) + _REST) / (known.least + _REST)
        return harder * (max(_MAY_COST, known.alone) if problem.device == "cpu" else _MAY_COST)


def to_a_residual(more: str = "") -> Callable[[Problem], Error]:
    """Return the error rule of a candidate that solves by `density.systems`; `more` ends the text."""

    def error(problem: Problem) -> Error:
        goal = f"{TOLERANCE[getattr(torch, problem.dtype)]:.0e}"
        return Error(f"residual {goal}", f"solved to a relative residual of {goal}, or your tighter cg_tolerance{more}")

    return error


def as_own_iterations(name: str, value: float, problem: Problem) -> bool:
    """Whether autokern's preconditioned iterations obey the library setting `name` at `value`."""
    some = {"max_cg_iterations": value >= LONGEST, "min_preconditioning_size": value <= problem.n}
    return some.get(name, name in ("max_cholesky_size", "terminate_cg_by_size", "num_trace_samples"))


def or_iterate(stock: Run, numbers: Callable[[Any], Iterable[torch.Tensor]] = tensors_in) -> Callable[[Run], Run]:
    """Return a decorator of exact candidates: where stock iterates, it serves after a failed factorisation or a NaN.

    The last argument, or its `exact`, says whether stock factorises; `numbers` are what must be finite.
    """

    def decorate(run: Run) -> Run:
        @functools.wraps(run)
        def either(*args: Any) -> Any:
            exact = getattr(args[-1], "exact", args[-1])
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
    """Return the number of points up to which an exact candidate serves without measurements, 0 under user orders."""
    return counted().exact if iterates(problem) and not problem.orders else 0
