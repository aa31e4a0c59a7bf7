"""The candidate `graph`: a small training step on a GPU, recorded once and launched again as a whole (`graphs`).

Density and gradients come out of one recording, so that the backward pass of a step only scales them. The only thing
read back is whether the factorisation succeeded; where it did not, the step is taken again by `fused`, with stock's
jitter, warnings and errors.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from autokern.backends import graphs
from autokern.core.autograd import each_cotangent
from autokern.core.problem import Features, Problem
from autokern.gp import likelihood
from autokern.ops.exact_log_prob import EXACT_LOG_PROB, ingredients, ladder

__all__ = ["by_recording"]

_MOST_BYTES = 2**23
"""Bytes of a matrix (1,000 points in float64) above which the GPU needs longer than its launches."""


def _step(node: Any, counts: tuple[int, int, int], wanted: tuple[bool, ...], *tensors: torch.Tensor) -> torch.Tensor:
    """Return info, densities and gradients in one flat tensor."""
    density, info, gradients = likelihood.at_once(node, counts, wanted, tensors)
    failed = info.amax().to(density.dtype) if info.dim() else info.to(density.dtype)
    return torch.cat([part.reshape(-1) for part in (failed, density, *gradients) if part is not None])


class _Recorded(torch.autograd.Function):
    """A density whose gradients are there already; second derivatives go through the plain formula."""

    @staticmethod
    def forward(ctx, node, counts, told, *tensors):  # type: ignore[no-untyped-def]
        batch = tensors[1].shape[:-1]
        sizes = [t.numel() for t, want in zip(tensors, ctx.needs_input_grad[3:], strict=True) if want]
        _, density, *parts = told.split([1, batch.numel(), *sizes])
        ctx.node, ctx.counts, ctx.parts = node, counts, parts
        ctx.save_for_backward(*tensors)
        return density.clone().view(batch)

    @staticmethod
    @each_cotangent
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        wanted, tensors = ctx.needs_input_grad[3:], ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, None, *likelihood.plain(ctx.node, ctx.counts, tensors, wanted, grad)
        if grad.dim():
            scaled = iter([(part.view(len(grad), -1) * grad[:, None]).view(-1) for part in ctx.parts])
        else:
            scaled = iter(torch._foreach_mul(ctx.parts, grad))
        found = [next(scaled).view(t.shape) if want else None for t, want in zip(tensors, wanted, strict=True)]
        return None, None, None, *found


def _unsupported(problem: Problem) -> str | None:
    if problem.device != "cuda":
        return "only what a CUDA device runs can be recorded"
    large = problem.batch * problem.n**2 * problem.itemsize > _MOST_BYTES
    return "so large that its launches take no time to speak of" if large else None


def _features(problem: Problem) -> Features:
    plain = EXACT_LOG_PROB["fused"].features(problem)
    return Features(10.0, plain.flops, plain.bytes)


def _memory(problem: Problem) -> int:
    """A recording holds on to all that its step takes, factor and inverse at once."""
    return EXACT_LOG_PROB["recursive"].memory(problem)


@EXACT_LOG_PROB.candidate(
    "graph",
    accuracy="better",
    unsupported=_unsupported,
    unavailable=graphs.unavailable,
    features=_features,
    memory=_memory,
    compiles=True,
)
def by_recording(distribution: Any, noise: torch.Tensor | None, value: torch.Tensor, exact: bool) -> torch.Tensor:
    """Density and gradients as one recorded CUDA graph, for steps of one shape that come again and again."""
    tree, added, residual = ingredients(distribution, noise, value)
    node, counts, shape, tensors = likelihood.arranged(tree, added, residual)
    wanted = tuple(t.requires_grad for t in tensors)
    with torch.no_grad():
        step = functools.partial(_step, node, counts, wanted)
        told = graphs.recorded((node, counts, wanted), step, tensors)
        failed = bool(told[0])
    if failed:
        return likelihood.log_prob(tree, added, residual, ladder)
    out: torch.Tensor = _Recorded.apply(node, counts, told, *tensors)
    return out if out.shape == shape else out.view(shape)
