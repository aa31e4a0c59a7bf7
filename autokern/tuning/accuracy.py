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

HOPELESS = 1e9
"""Recorded in place of an error that is NaN or infinite."""


def truth(op: Op, problem: Problem, args: tuple[Any, ...]) -> Trialled:
    """Return the result of the op's reference in float64, with gradients where the problem wants them."""
    return trial(op, op.reference, problem, in_float64(args))()


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


def gradient_errors(op: Op, problem: Problem, args: tuple[Any, ...], stock: Trialled) -> Callable[[Trialled], float]:
    """Return a function that gives the error of gradients against float64 truth.

    The unit is ten times stock's own error, and never less than 1000 eps of the largest gradient: a candidate may not
    be worse than the library by more than a small factor, however the problem is conditioned.
    """
    if not problem.grad:
        return lambda trialled: 0.0
    exact = truth(op, problem, args).grads
    eps = 2.0**-52 if problem.dtype == "float64" else 2.0**-23
    unit = max(10 * gap(stock.grads, exact), 1000 * eps)
    return lambda trialled: gap(trialled.grads, exact) / unit
