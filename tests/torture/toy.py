"""Ops made for tortures: stock and one other candidate, and a session that believes the other to be faster."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autokern.core.op import Op
from autokern.core.problem import Features, Problem
from autokern.core.settings import Settings
from autokern.runtime import dispatch
from autokern.system import host
from autokern.tuning.profile import Profile, Timing, Trial

__all__ = ["GRID", "believed", "op_of", "powers"]

GRID = (16, 64, 160)
Run = Callable[[torch.Tensor], torch.Tensor]


def powers(times: Callable[[], int]) -> Run:
    """A function that squares a matrix as often as it is told each time."""

    def run(a: torch.Tensor) -> torch.Tensor:
        out = a @ a
        for _ in range(times() - 1):
            torch.mm(a, a, out=out)
        return out

    return run


def op_of(name: str, stock: Run, other: Run) -> Op:
    """An op of one matrix, which `stock` computes rightly."""
    op = Op(
        name,
        summary="what stock makes of a matrix",
        contract="exact",
        key=lambda a: (a.__class__, a.shape, a.dtype),
        problem_of=lambda a: Problem(op=name, m=a.shape[0], n=a.shape[1]),
        reference=stock,
        sample=lambda problem, generator: (torch.rand(problem.m, problem.n, generator=generator, dtype=torch.float64),),
        check=lambda problem, out, args: float((out - stock(args[0])).abs().max() * 1e9),
        grid=lambda level, dtype, device: [Problem(op=name, m=n, n=n, dtype=dtype) for n in GRID],
        features=lambda problem: Features(calls=1.0, flops=2.0 * problem.m * problem.n**2),
        memory=lambda problem: 8 * problem.m * problem.n,
    )
    op.candidate("stock")(stock)
    op.candidate("other")(other)
    return op


def believed(op: Op) -> Callable[[torch.Tensor], torch.Tensor]:
    """Start a session that knows the other candidate to be faster; return the dispatched op."""
    here, timings = host.current(), {"stock": Timing(1e-3), "other": Timing(5e-4, 0.5, 0.01, 5)}
    trials = [Trial(Problem(op=op.name, m=n, n=n), timings) for n in GRID]
    session = dispatch.reset(Settings(calibrate="never"))
    session.adopt(Profile(host=here.fields, fingerprint=here.fingerprint, trials=trials))
    return dispatch.route(op)
