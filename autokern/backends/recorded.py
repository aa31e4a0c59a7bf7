"""The candidate `graph`: a small training step on a GPU, recorded once and launched again as a whole (`graphs`).

One recording computes density and gradients, and the backward pass only scales them. The step reads back one number:
whether the factorisation succeeded. If it failed, `fused` computes the step with stock's jitter, warnings and errors.
"""

from __future__ import annotations

import functools

import torch

from autokern.backends import graphs
from autokern.core.autograd import computed
from autokern.core.problem import Problem
from autokern.density import gaussian
from autokern.kernels.tree import Parts
from autokern.model.marginal import Marginal, ingredients
from autokern.ops._factorised import in_place
from autokern.ops.exact_log_prob import EXACT_LOG_PROB

_MOST_BYTES = 2**23
"""Bytes of the matrix (1,000 points in float64) above which computing takes longer than launching."""


def _step(parts: Parts, wanted: tuple[bool, ...], *tensors: torch.Tensor) -> torch.Tensor:
    """Return the largest `info` of the factorisation, densities and gradients in one flat tensor."""
    density, info, gradients = gaussian.at_once(parts, wanted, tensors)
    failed = info.amax().to(density.dtype) if info.dim() else info.to(density.dtype)
    return torch.cat([part.reshape(-1) for part in (failed, density, *gradients) if part is not None])


def _unsupported(problem: Problem) -> str | None:
    if problem.device != "cuda":
        return "only steps on a CUDA device can be recorded"
    large = problem.batch * problem.n**2 * problem.itemsize > _MOST_BYTES
    return "for large matrices the time of launches is negligible" if large else None


@EXACT_LOG_PROB.candidate(
    "graph",
    accuracy="better",
    unsupported=_unsupported,
    unavailable=graphs.unavailable,
    memory=in_place(2.8, 2.0),  # a recording keeps factor and inverse
    compiles=True,
)
def by_recording(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
    """Density and gradients as one recorded CUDA graph, for repeated steps of one shape."""
    tree, added, residual = ingredients(marginal, value)
    parts, shape, tensors = gaussian.arranged(tree, added, residual)
    wanted = tuple(t.requires_grad for t in tensors)
    with torch.no_grad():
        step = functools.partial(_step, parts, wanted)
        told = graphs.recorded((parts, wanted), step, tuple(tensors))
        failed = bool(told[0])
    if failed:
        return gaussian.log_prob(tree, added, residual)

    def plain(noise: torch.Tensor, residual: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return gaussian.reference(parts.tree(rest), noise, residual)

    batch = tensors[1].shape[:-1]
    _, density, *flat = told.split([1, batch.numel(), *(t.numel() for t in tensors if t.requires_grad)])
    left = iter(flat)
    gradients = [next(left).view(t.shape) if want else t for t, want in zip(tensors, wanted, strict=True)]
    out = computed(density.view(batch).clone(), gradients, plain, saved=tensors)  # callers change it in place
    return out if out.shape == shape else out.view(shape)
