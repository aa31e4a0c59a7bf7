"""A kernel matrix by one GEMM with its epilogue in place, and its gradients in closed form.

With inputs scaled by ``sqrt(|gamma|) / lengthscale`` the argument of a family is
``u = sign * (|x|^2 + |x'|^2 - 2 x.x')``: one GEMM and two rank-one updates. Given ``W = dL/du``, gradients need only
``W x'``, the row sums and the column sums of ``W``, so the backward pass is one GEMM with d + 1 columns and holds no
``n x m x d`` temporary. Second derivatives go through the plain formula.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from autokern.core.autograd import Lent, each_cotangent, plain_gradients
from autokern.kernels.blocks import bytes_on, row_blocks
from autokern.kernels.covariance import Covariance, reference, same_points
from autokern.kernels.family import Family
from autokern.kernels.far import UNSEEN, Reach, centred, reach, settled
from autokern.system import pages

__all__ = ["LAYOUTS", "block_bytes", "matrix"]

LAYOUTS = ("whole", "tiled", "symmetric")
_CACHED = 2**21
"""A block of rows this large stays in a CPU's cache between the GEMM and the passes of its epilogue."""


def matrix(covariance: Covariance, x1: torch.Tensor, x2: torch.Tensor, layout: str = "whole") -> torch.Tensor:
    """Return the kernel matrix.

    Parameters
    ----------
    covariance : Covariance
        Family, lengthscale ``(..., 1, d or 1)``, outputscale ``(...)`` or None.
    x1, x2 : Tensor
        Points, shapes ``(..., n, d)`` and ``(..., m, d)``; batch shapes broadcast.
    layout : {"whole", "tiled", "symmetric"}
        All at once; in blocks of rows that fit the cache; or only the lower triangle, mirrored (where `x1` and `x2`
        are not the same points, or there is a batch, as tiled or whole).

    Returns
    -------
    Tensor
        Shape ``(..., n, m)``, the diagonal exact where both are the same points.
    """
    family, lengthscale, outputscale = covariance
    inputs = (x1, x2, lengthscale, outputscale)
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)):
        return _evaluate(_scale(family, x1, x2, lengthscale), family, outputscale, layout, want_slope=False)[0]
    first = x1.clone()  # the caller may change points between forward and backward pass
    second = first if x2 is x1 else x2.clone()
    return _Analytic.apply(first, second, lengthscale, outputscale, family, layout)


class _Scaled(NamedTuple):
    """Centred points, scaled so that u is plus or minus their squared distance, and the dtype of the matrix.

    Points that are far apart, and all that is made of them alone, are in double precision.
    """

    first: torch.Tensor
    second: torch.Tensor
    norms: list[torch.Tensor]
    sign: float
    same: bool
    dtype: torch.dtype
    seen: Reach


def _scale(family: Family, x1: torch.Tensor, x2: torch.Tensor, lengthscale: torch.Tensor) -> _Scaled:
    same = same_points(x1, x2)
    centre = x1.mean(dim=-2, keepdim=True) if x1.shape[-2] else x1.new_zeros(x1.shape[-1])
    unit = lengthscale / math.sqrt(abs(family.gamma))
    first = (x1 - centre).div(unit)
    second = first if same else (x2 - centre).div(unit)
    norms = _norms(first, second)
    seen = UNSEEN if x1.dtype is torch.float64 and not family.kinked else reach(family, 1.0, *norms)
    if seen.far:
        first = centred(x1, centre).div(unit)
        second = first if same else centred(x2, centre).div(unit)
        norms = _norms(first, second)
    return _Scaled(first, second, norms, math.copysign(1.0, family.gamma), same, x1.dtype, seen)


def _norms(first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
    """Return the squared norms of points as columns, those of the same points once."""
    return [z.square().sum(-1, keepdim=True) for z in ((first,) if first is second else (first, second))]


class _Factors(NamedTuple):
    """``u = left @ right.mT + row + column``."""

    left: torch.Tensor
    right: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor


def _factors(points: _Scaled) -> _Factors:
    norms = [n.neg() for n in points.norms] if points.sign < 0 else points.norms
    return _Factors(points.first * (-2.0 * points.sign), points.second, norms[0], norms[-1].mT)


def _finish(
    u: torch.Tensor, slope: torch.Tensor | None, family: Family, outputscale: torch.Tensor | None
) -> torch.Tensor:
    k = family.finish(u, slope, torch.empty_like)
    if outputscale is not None:
        k.mul_(outputscale)
        if slope is not None:
            slope.mul_(outputscale)
    return k


def _whole(
    points: _Scaled, family: Family, outputscale: torch.Tensor | None, want_slope: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    left, right, row, column = _factors(points)
    if left.dim() == right.dim() == 2:
        u = torch.addmm(column, left, right.mT, out=_empty(left, right, left.dtype)).add_(row)
    else:
        u = torch.matmul(left, right.mT).add_(row).add_(column)
    settled(family, u, points.seen, u.diagonal(dim1=-2, dim2=-1) if points.same else None)
    u = u if u.dtype is points.dtype else u.to(points.dtype)
    if outputscale is not None and torch.broadcast_shapes(u.shape, outputscale.shape) != u.shape:
        u = u.expand(torch.broadcast_shapes(u.shape, outputscale.shape)).contiguous()
    slope = torch.empty_like(u) if want_slope else None
    return _finish(u, slope, family, outputscale), slope


def _empty(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    like = left if left.dtype is dtype else left.new_empty(0, dtype=dtype)
    return pages.empty((left.shape[-2], right.shape[-2]), like)


def block_bytes(device: str) -> int:
    """Return the bytes of a block on a kind of device."""
    return bytes_on(_CACHED, device)


def _row_blocks(matrix: torch.Tensor) -> list[tuple[int, int]]:
    n, m = matrix.shape
    return row_blocks(n, m * matrix.element_size(), block_bytes(matrix.device.type))


def _tiled(
    points: _Scaled, family: Family, outputscale: torch.Tensor | None, want_slope: bool, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    left, right, row, column = _factors(points)
    k = _empty(left, right, points.dtype)
    slope = _empty(left, right, points.dtype) if want_slope else None
    turned = right.mT
    for start, stop in _row_blocks(k):
        end = stop if symmetric else k.shape[1]
        out = k[start:stop, :end]
        u = out if left.dtype is k.dtype else torch.empty_like(out, dtype=left.dtype)
        torch.addmm(column[:, :end], left[start:stop], turned[:, :end], out=u).add_(row[start:stop])
        settled(family, u, points.seen, u.diagonal(start) if points.same else None)
        if u is not out:
            u = out.copy_(u)
        slopes = None if slope is None else slope[start:stop, :end]
        values = _finish(u, slopes, family, outputscale)
        if values.data_ptr() != u.data_ptr():
            u.copy_(values)
        if symmetric and start:
            for full in (k, slope):
                if full is not None:
                    full[:start, start:stop].copy_(full[start:stop, :start].mT)
    return k, slope


def _evaluate(
    points: _Scaled, family: Family, outputscale: torch.Tensor | None, layout: str, want_slope: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    scale = None if outputscale is None else outputscale[..., None, None]
    plain = points.first.dim() == 2 and points.second.dim() == 2 and (scale is None or scale.numel() == 1)
    if not plain or (layout == "whole" and points.first.dtype is points.dtype):
        return _whole(points, family, scale, want_slope)
    scale = None if scale is None else scale.reshape(1, 1)
    return _tiled(points, family, scale, want_slope, symmetric=layout == "symmetric" and points.same)


class _Analytic(torch.autograd.Function):
    """The kernel matrix with closed-form first derivatives; second ones by the plain formula.

    The caller owns the matrix and may write into it: it serves the backward pass while its version is unchanged, and is
    computed again otherwise.
    """

    @staticmethod
    def forward(ctx, x1, x2, lengthscale, outputscale, family, layout):  # type: ignore[no-untyped-def]
        need = any(ctx.needs_input_grad)
        points = _scale(family, x1, x2, lengthscale)
        k, slope = _evaluate(points, family, outputscale, layout, need and not family.slope_is_value)
        if need:
            ctx.fixed, ctx.kept = (family, layout, *points[3:]), Lent(k)
            ctx.save_for_backward(x1, x2, lengthscale, outputscale, points.first, points.second, slope)
        return k

    @staticmethod
    @each_cotangent
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x1, x2, lengthscale, outputscale, first, second, slope = ctx.saved_tensors
        wanted, (family, layout, *rest) = ctx.needs_input_grad[:4], ctx.fixed
        if torch.is_grad_enabled():
            return *_plain_gradients((x1, x2, lengthscale, outputscale), wanted, family, grad), None, None

        def again(scale: torch.Tensor | None) -> torch.Tensor:
            points = _Scaled(first, second, _norms(first, second), *rest)
            return _evaluate(points, family, scale, layout, want_slope=False)[0]

        k = ctx.kept.take() if slope is None or wanted[3] else slope
        k = again(outputscale) if k is None else k
        moments = _moments(grad, k if slope is None else slope, first, second, layout, wanted, same=rest[1])
        grads: list[Any] = [None] * 4
        sign = rest[0]
        to_input = math.sqrt(abs(family.gamma)) / lengthscale
        if wanted[0]:
            of_points = (moments.rows * first - moments.product) * (2 * sign)
            grads[0] = (of_points * to_input).sum_to_size(x1.shape).to(x1.dtype)
        if wanted[1]:
            of_points = (moments.columns * second - moments.turned) * (2 * sign)
            grads[1] = (of_points * to_input).sum_to_size(x2.shape).to(x2.dtype)
        if wanted[2]:
            total = (moments.rows * first.square() - 2 * first * moments.product).sum(-2, keepdim=True)
            total = total + (moments.columns * second.square()).sum(-2, keepdim=True)
            grads[2] = (total * (-2 * sign) / lengthscale).sum_to_size(lengthscale.shape).to(lengthscale.dtype)
        if wanted[3]:
            if outputscale.min().item() > torch.finfo(k.dtype).tiny / torch.finfo(k.dtype).eps:
                total = (moments.total if slope is None else _dot(grad, k)) / outputscale
            else:  # nothing to divide by
                total = _dot(grad, again(None))
            grads[3] = total.sum_to_size(outputscale.shape).to(outputscale.dtype)
        return (*grads, None, None)


class _Moments(NamedTuple):
    """Products and sums of ``W = dL/du`` for the gradients; torch adds up the total, losing fewer digits."""

    total: torch.Tensor
    product: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    turned: torch.Tensor


def _moments(
    grad: torch.Tensor,
    slope: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    layout: str,
    wanted: tuple[bool, ...],
    same: bool,
) -> _Moments:
    """Return ``W x'``, row sums, column sums and ``W^T x`` (where wanted), W formed block by block where it pays.

    Where both are the same points, the diagonal cancels and is left out, except for NaN.
    """
    d = second.shape[-1]
    right = torch.cat((second, torch.ones_like(second[..., :1])), dim=-1)
    if layout == "whole" or grad.dim() != 2 or first.dim() != 2 or second.dim() != 2:
        w = (grad * slope).to(right.dtype)
        total = w.sum((-2, -1))
        if same:
            w.diagonal(dim1=-2, dim2=-1).mul_(0)
        product = w @ right
        columns = w.sum(-2).unsqueeze(-1)
        turned = w.mT @ first if wanted[1] else first
        return _Moments(total, product[..., :d], product[..., d:], columns, turned)
    n, m = grad.shape
    product = right.new_empty(n, d + 1)
    columns = right.new_zeros(m)
    turned = right.new_zeros(m, d)
    total = right.new_zeros(())
    blocks = _row_blocks(grad)
    buffer = grad.new_empty(blocks[0][1] if blocks else 0, m)
    for start, stop in blocks:
        w = torch.mul(grad[start:stop], slope[start:stop], out=buffer[: stop - start]).to(right.dtype)
        total += w.sum()
        if same:
            w.diagonal(start).mul_(0)
        torch.mm(w, right, out=product[start:stop])
        columns += w.sum(0)
        if wanted[1]:
            turned.addmm_(w.mT, first[start:stop])
    return _Moments(total, product[:, :d], product[:, d:], columns.unsqueeze(-1), turned)


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sum of products over the last two dimensions, block by block; a BLAS would lose digits that torch's sums keep."""
    if a.dim() != 2 or a.shape != b.shape or len(blocks := _row_blocks(a)) == 1:
        return (a * b).sum((-2, -1))
    return torch.stack([(a[start:stop] * b[start:stop]).sum() for start, stop in blocks]).sum()


def _plain_gradients(
    inputs: tuple[torch.Tensor, ...], wanted: tuple[bool, ...], family: Family, grad: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return the gradients as differentiable functions of the inputs and of `grad`."""

    def plain(x1: torch.Tensor, x2: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return reference(Covariance(family, *parameters), x1, x2)

    return plain_gradients(plain, inputs, wanted, grad)
