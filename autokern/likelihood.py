"""The log density of a Gaussian with a kernel tree as covariance: factorisation and all gradients in one function.

``log p(r) = -(r^T K^-1 r + log |K| + n log 2 pi) / 2`` with ``dL/dK = (a a^T - K^-1) / 2``, ``a = K^-1 r``
(Rasmussen and Williams 2006, eq. 5.9). The matrix is built, factorised, inverted and pulled back in one borrowed
buffer; derivatives of it are formed block by block and never kept. Second derivatives go through the plain formula.
Between `kernels` and `ops`: may import `kernels`, `workspace`, `threads`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from autokern import threads, workspace
from autokern.kernels import tree as trees
from autokern.kernels.blocks import Blocks
from autokern.kernels.tree import Tree

__all__ = ["Ladder", "log_prob", "reference"]

Ladder = Callable[[torch.Tensor], torch.Tensor]
Inverse = Callable[[torch.Tensor], torch.Tensor]
_BLOCK_BYTES = 2**20
"""A block of rows this large stays in the cache through the passes over it."""
_LOG_2_PI = math.log(2 * math.pi)


def log_prob(
    tree: Tree, noise: torch.Tensor, residual: torch.Tensor, ladder: Ladder, inverse: Inverse | None = None
) -> torch.Tensor:
    """Return the log density of a residual.

    Parameters
    ----------
    tree : Tree
        The covariance without noise, of n points.
    noise : Tensor
        Variances added to the diagonal, shape ``(..., 1)`` or ``(..., n)``.
    residual : Tensor
        Targets less their mean, shape ``(..., n)``.
    ladder : callable
        What factorises a matrix whose plain Cholesky factorisation fails: warns, raises, or returns a lower factor.
    inverse : callable, optional
        Turns a lower factor into the symmetric inverse of the matrix, in place or not; default LAPACK's potri.

    Returns
    -------
    Tensor
        Shape ``(...)``, the broadcast batch shape of all arguments.
    """
    shape = torch.broadcast_shapes(
        noise.shape[:-1], residual.shape[:-1], *(t.shape[:-2] for part in tree[1:] for t in part)
    )
    batch = shape if not shape else torch.Size([shape.numel()])

    def flat(t: torch.Tensor, keep: int) -> torch.Tensor:
        return t if t.shape[:-keep] == batch else t.expand(*shape, *t.shape[-keep:]).reshape(*batch, *t.shape[-keep:])

    matrices = [flat(t, 2) for part in tree[1:] for t in part]
    counts = (len(tree.points), len(tree.shapes), len(tree.weights))
    out: torch.Tensor = _LogProb.apply(
        tree.node, counts, ladder, inverse, flat(noise, 1), flat(residual, 1), *matrices
    )
    return out if out.shape == shape else out.view(shape)


def reference(tree: Tree, noise: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return the same by explicit differences and autograd through Cholesky: differentiable twice, the truth."""
    k = trees.dense(tree)
    n = residual.shape[-1]
    diagonal = torch.diag_embed(noise.expand(*noise.shape[:-1], n))
    lower = torch.linalg.cholesky(k + diagonal)
    white = torch.linalg.solve_triangular(lower, residual.unsqueeze(-1), upper=False).squeeze(-1)
    logdet = 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * (white.square().sum(-1) + logdet + n * _LOG_2_PI)


def _regrouped(node: Any, counts: tuple[int, int, int], tensors: tuple[torch.Tensor, ...]) -> Tree:
    first, second = counts[0], counts[0] + counts[1]
    return Tree(node, list(tensors[:first]), list(tensors[first:second]), list(tensors[second:]))


def _steps(matrix: torch.Tensor) -> list[tuple[int, int]]:
    """Return the blocks of rows, one of all rows for a batch."""
    n = matrix.shape[-1]
    if matrix.dim() > 2:
        return [(0, n)]
    rows = max(16, _BLOCK_BYTES // (n * matrix.element_size()) // 16 * 16)
    return [(start, min(n, start + rows)) for start in range(0, n, rows)]


def _factorise(blocks: Blocks, noise: torch.Tensor, buffer: torch.Tensor, ladder: Ladder) -> None:
    """Fill `buffer` with the lower factor of the noisy covariance."""

    def assemble() -> None:
        for start, stop in _steps(buffer):
            blocks.fill(start, stop, buffer[..., start:stop, :stop])
        buffer.diagonal(dim1=-2, dim2=-1).add_(noise)

    assemble()
    turned = buffer.mT  # column-major, as LAPACK wants it; its upper triangle is the lower one of the buffer
    if buffer.is_cpu:
        info = torch.empty(buffer.shape[:-2], dtype=torch.int32)
        torch.linalg.cholesky_ex(turned, upper=True, out=(turned, info))
    else:
        upper, info = torch.linalg.cholesky_ex(turned, upper=True)
        turned.copy_(upper)
    if not torch.any(info):
        return
    assemble()
    if buffer.dim() == 2:
        for start, stop in _steps(buffer):
            buffer[:start, start:stop] = buffer[start:stop, :start].mT
    buffer.copy_(ladder(buffer))


class _LogProb(torch.autograd.Function):
    """The density with closed-form first derivatives by everything it is made of; second ones by the plain formula."""

    @staticmethod
    def forward(ctx, node, counts, ladder, inverse, noise, residual, *tensors):  # type: ignore[no-untyped-def]
        n = residual.shape[-1]
        lease = workspace.borrow((*residual.shape, n), residual)
        buffer = lease.tensor
        try:
            _factorise(Blocks(_regrouped(node, counts, tensors)), noise, buffer, ladder)
            white = torch.linalg.solve_triangular(buffer, residual.unsqueeze(-1), upper=False)
            logdet = buffer.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            quadratic = torch.linalg.vecdot(white, white, dim=-2).squeeze(-1)
        except BaseException:
            lease.release()
            raise
        if any(ctx.needs_input_grad):
            ctx.node, ctx.counts, ctx.inverse = node, counts, inverse
            ctx.lease, ctx.white, ctx.threads, ctx.unit = lease, white, threads.current(), None
            ctx.save_for_backward(noise, residual, *tensors)
        else:
            lease.release()
        return -0.5 * (quadratic + n * _LOG_2_PI) - logdet  # fresh memory: callers divide it in place

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        noise, residual, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():
            return None, None, None, None, *_plain(ctx, noise, residual, tuple(tensors), wanted, grad)
        if ctx.unit is None:
            with threads.scope(ctx.threads):
                ctx.unit = _unit_gradients(ctx, noise, residual, tuple(tensors), wanted)
        by_vector, by_matrix = grad.unsqueeze(-1), grad[..., None, None]
        pairs = zip(ctx.unit, wanted, strict=True)
        found = [
            None if not want or unit is None else unit * (by_vector if index < 2 else by_matrix)
            for index, (unit, want) in enumerate(pairs)
        ]
        return None, None, None, None, *found


def _unit_gradients(
    ctx: Any, noise: torch.Tensor, residual: torch.Tensor, tensors: tuple[torch.Tensor, ...], wanted: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    """Return the gradients of each density by noise, residual and the tensors of the tree; the buffer is given back."""
    buffer = ctx.lease.tensor
    try:
        a = torch.linalg.solve_triangular(buffer.mT, ctx.white, upper=True)
        vector = a.squeeze(-1)
        found: list[torch.Tensor | None] = [None] * len(wanted)
        if wanted[1]:
            found[1] = -vector
        if not (wanted[0] or any(wanted[2:])):
            return found
        inverse = (ctx.inverse or _potri)(buffer)
        if wanted[0]:
            by_noise = (vector.square() - inverse.diagonal(dim1=-2, dim2=-1)).mul_(0.5)
            found[0] = by_noise.sum(-1, keepdim=True) if noise.shape[-1] == 1 < residual.shape[-1] else by_noise
        if any(wanted[2:]):
            blocks = Blocks(_regrouped(ctx.node, ctx.counts, tensors))
            turned = a.mT
            for start, stop in _steps(buffer):
                g = a[..., start:stop, :] * turned[..., :stop]
                blocks.pull(start, stop, g.sub_(inverse[..., start:stop, :stop]), 0.5)
            points, shapes, weights = blocks.gradients()
            found[2:] = [*points, *shapes, *weights]
        return found
    finally:
        ctx.lease.release()
        ctx.lease = ctx.white = None


def _potri(lower: torch.Tensor) -> torch.Tensor:
    """Overwrite a lower factor with the inverse of its matrix, by LAPACK's potri."""
    turned = lower.mT
    torch.cholesky_inverse(turned, upper=True, out=turned)
    return lower


def _plain(
    ctx: Any,
    noise: torch.Tensor,
    residual: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    wanted: tuple[bool, ...],
    grad: torch.Tensor,
) -> list[torch.Tensor | None]:
    """Return the gradients as differentiable functions of everything."""
    inputs = (noise, residual, *tensors)
    value = reference(_regrouped(ctx.node, ctx.counts, tensors), noise, residual)
    sources = [t for t, want in zip(inputs, wanted, strict=True) if want]
    found = iter(torch.autograd.grad(value, sources, grad, create_graph=True))
    return [next(found) if want else None for want in wanted]
