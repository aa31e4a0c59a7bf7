"""Trials: a candidate run on arguments, with its backward pass where the problem wants gradients, and its errors.

Errors are those against float64 truth in a calibration, against an exact candidate on the caller's data. A candidate of
class ``approximate`` leaves its op's bound by design, so the bound cannot judge it. The measure is the largest error of
an entry of the result, or of a gradient, relative to the largest entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from autokern.core.arguments import in_float64, rebuilt, tensors_in
from autokern.core.op import Op, Run, inside
from autokern.core.problem import Problem

HOPELESS = 1e9  # recorded in place of an error that is NaN or infinite
_EPS = {"float32": 2.0**-23, "float64": 2.0**-52}
_MOVES = 3  # how often arguments are moved to see what rounding makes of a gradient
_ROUNDINGS = 30  # errors of one eps in all arguments that a candidate may make


class Trialled(NamedTuple):
    """What one trial gave: the candidate's result, and gradients with respect to the leaves of its arguments."""

    out: Any
    grads: tuple[torch.Tensor, ...]


class _Seeded(torch.autograd.Function):
    """A scalar whose gradients by some tensors are given.

    At its first call with cotangents `torch.autograd.grad` imports a computer algebra system, for half a second.
    """

    @staticmethod
    def forward(ctx, cotangents, *outputs):  # type: ignore[no-untyped-def]
        ctx.cotangents = cotangents
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return None, *ctx.cotangents


def trial(op: Op, run: Run, problem: Problem, args: tuple[Any, ...]) -> Callable[[], Trialled]:
    """Return a function that runs a candidate, and its backward pass if the problem wants gradients.

    Gradients are those of the canonical form of the result with respect to all leaves among the arguments, under
    cotangents that are the same for every candidate. Inside of a candidate that calls other ops, as stock of a
    composite one, calls are dispatched.
    """
    leaves = list({id(t): t for t in tensors_in(args) if t.requires_grad}.values())
    cotangents: list[torch.Tensor] = []
    nested = any(candidate.parts and candidate.run is run for candidate in op.listed)
    shared = any(t.grad_fn is not None for t in leaves)  # parts of a caller's graph, who will walk it once more
    repeats = op.warm_repeats(problem)

    def forward() -> Any:
        fresh = rebuilt(args) if op.composite else args
        out = op.materialize(run(*fresh))
        for _ in range(repeats):
            out = op.materialize(run(*rebuilt(fresh)))
        return out

    def call() -> Trialled:
        with torch.set_grad_enabled(bool(problem.grad)):
            out = forward()
            if not problem.grad:
                return Trialled(out, ())
            outputs = tuple(tensors_in(op.canonical(out)))
            if not cotangents:
                generator = torch.Generator().manual_seed(7)
                for output in outputs:
                    random = torch.rand(output.shape, generator=generator, dtype=torch.float32, device="cpu") - 0.5
                    cotangents.append(random.to(dtype=output.dtype, device=output.device))
            seeded = _Seeded.apply(cotangents, *outputs)  # type: ignore[no-untyped-call]
        return Trialled(out, torch.autograd.grad(seeded, leaves, retain_graph=shared))

    def open_call() -> Trialled:
        before, inside.active = inside.active, False
        try:
            return call()
        finally:
            inside.active = before

    return open_call if nested else call


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
