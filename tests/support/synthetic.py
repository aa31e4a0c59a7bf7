"""An op that only has a name, with candidates of every kind, and its problems: for timings that tests make up."""

from __future__ import annotations

from typing import Any

from autokern.core.op import Op
from autokern.core.problem import Features, Problem


def square(n: int, op: str = "synthetic", **more: Any) -> Problem:
    return Problem(op=op, m=n, n=n, **more)


def with_candidates(make_op: Any, **options: Any) -> Op:
    """An op whose stock takes flops, with candidates of every kind."""
    made = make_op("synthetic", features=lambda p: Features(calls=1, flops=float(p.m * p.n * p.n)), **options)
    for name in ("stock", "fast", "other"):
        made.candidate(name)(lambda a: a)
    made.candidate("exact", accuracy="better")(lambda a: a)
    made.candidate("sloppy", accuracy="approximate")(lambda a: a)
    made.candidate("slow-start", compiles=True)(lambda a: a)
    made.candidate("tall-only", unsupported=lambda p: None if p.m >= 2 * p.n else "not tall")(lambda a: a)
    return made
