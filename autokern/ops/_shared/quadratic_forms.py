"""Quadratic forms ``B^T K^-1 B`` and ``log |K|`` from one Cholesky factorisation, with closed-form gradients."""

from __future__ import annotations

from typing import cast

import torch

from autokern.core.autograd import Unsaved, each_cotangent, plain_gradients
from autokern.density.factors import factorised, inv_quad_logdet_gradients, inverted
from autokern.model import originals
from autokern.system import threads

_ladder = originals.psd_safe_cholesky

Pair = tuple[torch.Tensor, torch.Tensor]


def with_diagonal(matrix: torch.Tensor, diagonal: torch.Tensor | None) -> torch.Tensor:
    """Return ``matrix + diag(diagonal)``, differentiable."""
    if diagonal is None:
        return matrix
    return matrix + torch.diag_embed(diagonal.expand(matrix.shape[:-1]))


def plain(matrix: torch.Tensor, diagonal: torch.Tensor | None, rhs: torch.Tensor) -> Pair:
    """Return the quadratic form of each column and the log determinant, by autograd through Cholesky."""
    lower = torch.linalg.cholesky(with_diagonal(matrix, diagonal))
    white = torch.linalg.solve_triangular(lower, rhs, upper=False)
    return white.square().sum(-2), 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def summed(pair: Pair, reduce: bool) -> Pair:
    """Return the pair with its quadratic forms summed if `reduce`."""
    return (pair[0].sum(-1), pair[1]) if reduce else pair


def factorise(matrix: torch.Tensor, diagonal: torch.Tensor | None) -> torch.Tensor:
    """Return the lower factor of ``matrix + diag(diagonal)`` in new memory, with the library's jitter if needed."""

    def assembled() -> torch.Tensor:
        k = matrix.clone(memory_format=torch.contiguous_format)
        if diagonal is not None:
            k.diagonal(dim1=-2, dim2=-1).add_(diagonal)
        return k

    lower, info = factorised(assembled())
    return _ladder(assembled()) if torch.any(info) else lower


class _ClosedForm(torch.autograd.Function):
    """One factorisation; the backward pass inverts in the factor's memory, and returns it as the gradient by K."""

    @staticmethod
    def forward(ctx, matrix, diagonal, rhs):  # type: ignore[no-untyped-def]
        lower, white, quadratic = _white(matrix, diagonal, rhs)
        if any(ctx.needs_input_grad):
            ctx.lower, ctx.threads = lower, threads.current()
            ctx.arguments, ctx.shape = Unsaved(matrix, diagonal, rhs), None if diagonal is None else diagonal.shape
            ctx.save_for_backward(white)
        return quadratic, lower.diagonal(dim1=-2, dim2=-1).log().sum(-1).mul_(2)

    @staticmethod
    @each_cotangent
    def backward(ctx, *cotangents):  # type: ignore[no-untyped-def]
        (kept,) = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return tuple(plain_gradients(plain, ctx.arguments.unchanged(), wanted, cotangents))

        def inverse() -> torch.Tensor:
            lower, ctx.lower = ctx.lower, None
            return inverted(lower)

        def gradients() -> list[torch.Tensor | None]:
            white = kept
            if ctx.lower is None:  # a second backward pass: the first one overwrote the factor
                ctx.lower, white, _ = _white(*ctx.arguments.unchanged())
            solved = torch.linalg.solve_triangular(ctx.lower.mT, white, upper=True)
            return inv_quad_logdet_gradients(inverse, solved, cotangents, ctx.shape, wanted)

        return tuple(threads.limited(gradients, ctx.threads)())


def closed_form(matrix: torch.Tensor, diagonal: torch.Tensor | None, rhs: torch.Tensor, reduce: bool = False) -> Pair:
    """Return the quadratic forms and the log determinant of ``matrix + diag(diagonal)``, with closed-form gradients."""
    return summed(cast("Pair", _ClosedForm.apply(matrix, diagonal, rhs)), reduce)


def _white(
    matrix: torch.Tensor, diagonal: torch.Tensor | None, rhs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the factor L, ``L^-1 B`` and the quadratic forms."""
    lower = factorise(matrix, diagonal)
    white = torch.linalg.solve_triangular(lower, rhs, upper=False)
    return lower, white, white.square().sum(-2)
