"""Errors of candidates: against float64 truth in a calibration, against an exact candidate on the caller's data.

A candidate of class ``approximate`` leaves its op's bound by design, so the bound cannot judge it. The measure is the
largest error of an entry of the result, or of a gradient, relative to the largest entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autokern.core.arguments import in_float64, tensors_in
from autokern.core.op import Op
from autokern.core.problem import Problem
from autokern.tuning.trial import Trialled, trial

HOPELESS = 1e9  # recorded in place of an error that is NaN or infinite
_EPS = {"float32": 2.0**-23, "float64": 2.0**-52}
_MOVES = 3  # how often arguments are moved to see what rounding makes of a gradient
_ROUNDINGS = 30  # errors of one eps in all arguments that a candidate may make


def truth(op: Op, problem: Problem, args: tuple[Any, ...], move: int | None = None) -> Trialled:
    """Return the result of the op's reference in float64, with gradients where the problem wants them.

    With a `move`, the number of a draw, every number of the arguments is off by one eps of the problem's dtype.
    """
    if move is None:
        return trial(op, op.reference, problem, in_float64(args))()
    generator, eps = torch.Generator().manual_seed(move), _EPS[problem.dtype]

    def moved(values: torch.Tensor) -> torch.Tensor:
        sides = torch.randint(0, 2, values.shape, generator=generator, device="cpu").to(values) * 2 - 1
        return values * (1 + eps * sides)

    with torch.enable_grad():  # what is lazy keeps the grad mode that it was made in
        there = in_float64(args, moved)
    return trial(op, op.reference, problem, there)()


def relative_error(op: Op, found: Trialled, exact: Trialled) -> float:
    """Return the largest error of an entry of the result or of a gradient, relative to the largest entry there."""
    outs = gap(tensors_in(op.canonical(found.out)), tensors_in(op.canonical(exact.out)))
    return max(outs, gap(found.grads, exact.grads))


def gap(found: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]) -> float:
    """Return the largest difference of paired tensors, in units of the largest entry of the second of each pair."""
    worst = 0.0
    for one, other in zip(found, exact, strict=True):
        if other.numel():
            size = other.abs().max().item() or 1.0
            error = (one.detach().double() - other.detach().double()).abs().max().item() / size
            worst = max(worst, error if math.isfinite(error) else HOPELESS)
    return worst


def gradient_errors(op: Op, problem: Problem, args: tuple[Any, ...], stock: Trialled) -> Callable[..., float]:
    """Return a function of a result, and of the error that is allowed: that of its gradients against float64 truth.

    The unit is ten times stock's own error, and at least 1000 or 2 n eps of the largest gradient: a candidate may not
    be worse than the library by more than a small factor, however the problem is conditioned. Stock may share its
    rounding with the truth. So a candidate beyond that is measured by 30 times what one eps in every argument changes,
    as a factorisation rounds more than once: a gradient that is small by cancellation is known to no better.
    """
    if not problem.grad:
        return lambda trialled, allowed=0.0: 0.0
    exact = truth(op, problem, args).grads
    unit = max(10 * gap(stock.grads, exact), max(1000, 2 * problem.n) * _EPS[problem.dtype])
    by_rounding: list[float] = []

    def error(trialled: Trialled, allowed: float = 0.0) -> float:
        found, largest = gap(trialled.grads, exact), max(unit, allowed)
        if largest < found < HOPELESS:
            if not by_rounding:
                by_rounding.append(max(gap(truth(op, problem, args, move).grads, exact) for move in range(_MOVES)))
            largest = max(largest, _ROUNDINGS * by_rounding[0])
        return found / largest

    return error
