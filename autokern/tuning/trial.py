"""Trials: a candidate run on arguments, with its backward pass where the problem wants gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from autokern.core.arguments import rebuilt, tensors_in
from autokern.core.op import Op, Run, inside
from autokern.core.problem import Problem


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
