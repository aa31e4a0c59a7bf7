"""Ops made for tortures: stock and one other candidate."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autokern.core.op import Op
from autokern.core.problem import Features, Problem

GRID = (16, 64, 160)
Run = Callable[[torch.Tensor], torch.Tensor]


def op_of(name: str, stock: Run, other: Run) -> Op:
    """An op of one matrix, which `stock` computes rightly."""

    class Square(Op):
        def key(self, a):
            return a.__class__, a.shape, a.dtype

        def problem_of(self, a):
            return Problem(op=name, m=a.shape[0], n=a.shape[1])

        def reference(self, a):
            return stock(a)

        def sample(self, problem, generator):
            return (torch.rand(problem.m, problem.n, generator=generator, dtype=torch.float64),)

        def check(self, problem, out, args):
            return float((out - stock(args[0])).abs().max() * 1e9)

        def grid(self, level, dtype, device):
            return [Problem(op=name, m=n, n=n, dtype=dtype) for n in GRID]

        def features(self, problem):
            return Features(calls=1.0, flops=2.0 * problem.m * problem.n**2)

        def memory(self, problem):
            return 8 * problem.m * problem.n

    Square.name, Square.summary = name, "what stock makes of a matrix"
    op = Square()
    op.candidate("stock")(stock)
    op.candidate("other")(other)
    return op
