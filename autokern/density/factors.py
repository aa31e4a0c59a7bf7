"""Cholesky factors, and inverses from these factors, in place where that is faster."""

from __future__ import annotations

import torch

_SMALL = 2**14  # elements below which a new result is faster than working in place
_ALIGNED = 64  # larger blocks have a multiple of this number of rows, at which a GEMM is faster
_LEAF, _LEAF_OF_DEVICES = 128, 2048  # rows of a triangle up to which one solve is faster than halves


def factorised(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factor from a row-major matrix's lower triangle, perhaps in its place, and LAPACK's info."""
    if matrix.numel() < _SMALL or not matrix.is_cpu:
        return torch.linalg.cholesky_ex(matrix)
    turned = matrix.mT  # column-major for LAPACK: its upper triangle is the matrix's lower one
    info = torch.empty(matrix.shape[:-2], dtype=torch.int32, device="cpu")
    torch.linalg.cholesky_ex(turned, upper=True, out=(turned, info))
    return matrix, info


def inverted(lower: torch.Tensor) -> torch.Tensor:
    """Return the symmetric inverse from a lower factor, perhaps in its place; on a CPU by LAPACK's potri."""
    if not lower.is_cpu:
        return inverted_by_products(lower)
    if lower.numel() < _SMALL:
        return torch.cholesky_inverse(lower)
    upper = lower.is_contiguous()
    turned = lower.mT if upper else lower
    return torch.cholesky_inverse(turned, upper=upper, out=turned)


def triangle_inverted(lower: torch.Tensor) -> torch.Tensor:
    """Return the inverses of lower triangles, by LAPACK's trtri; with a graph by one solve."""
    leaf = _LEAF if lower.is_cpu else _LEAF_OF_DEVICES
    if lower.shape[-1] <= leaf or (lower.requires_grad and torch.is_grad_enabled()):
        return _solved(lower)
    whole = lower.detach().mT.triu().mT  # column-major
    for one in whole.unsqueeze(0).flatten(0, -3):
        _trtri(one, leaf)
    return whole


def inverted_by_products(lower: torch.Tensor, leaf: int = _LEAF_OF_DEVICES) -> torch.Tensor:
    """Return the symmetric inverse from a lower factor, perhaps in its place, without waiting for the device.

    LAPACK's trtri and lauum by halves, so that nearly all operations are products of matrices, which a GPU computes
    fastest; torch's `cholesky_inverse` solves for a unit matrix there, with three times as many operations, and reads
    a status back. Blocks of up to `leaf` rows are not halved: below, launches cost more than operations save.
    """
    if lower.shape[-1] <= leaf:
        root = _solved(lower)
        return torch.matmul(root.mT, root, out=torch.empty_like(root))  # autocast leaves this form as it is
    flat = lower.unsqueeze(0).flatten(0, -3)
    for one in flat:
        _trtri(one, leaf)
        _lauum(one, leaf)
        _mirror(one, leaf)
    return flat.view(lower.shape)


def _solved(lower: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a lower triangle by one solve."""
    unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand(lower.shape)
    return torch.linalg.solve_triangular(lower, unit, upper=False)


def _trtri(lower: torch.Tensor, leaf: int) -> None:
    """Invert a lower triangle in its place."""
    if len(lower) <= leaf:
        lower.copy_(_solved(lower))
        return
    first, below, second = _halves(lower)
    _trtri(first, leaf)
    _trtri(second, leaf)
    product = torch.empty_like(below.mT)
    _trmm(first.mT, below.mT, product, leaf, upper=True)
    _trmm(second, product.mT, below, leaf, upper=False)
    below.neg_()


def _lauum(lower: torch.Tensor, leaf: int) -> None:
    """Replace a lower triangle L by the lower triangle of L' L, and by both triangles in diagonal blocks."""
    if len(lower) <= leaf:
        root = lower.clone()
        torch.mm(root.mT, root, out=lower)
        return
    first, below, second = _halves(lower)
    _lauum(first, leaf)
    _syrk(below, first, leaf)
    _trmm(second.mT, below.clone(), below, leaf, upper=True)
    _lauum(second, leaf)


def _syrk(a: torch.Tensor, out: torch.Tensor, leaf: int) -> None:
    """Add the lower triangle of A' A, and both triangles in diagonal blocks."""
    if len(out) <= leaf:
        out.addmm_(a.mT, a)
        return
    first, below, second = _halves(out)
    left, right = a[:, : len(first)], a[:, len(first) :]
    _syrk(left, first, leaf)
    below.addmm_(right.mT, left)
    _syrk(right, second, leaf)


def _trmm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, leaf: int, upper: bool) -> None:
    """Write the product of a triangle, whose diagonal blocks are stored whole, and a matrix."""
    if len(a) <= leaf:
        torch.mm(a, b, out=out)
        return
    first, _, second = _halves(a)
    half = len(first)
    _trmm(first, b[:half], out[:half], leaf, upper)
    _trmm(second, b[half:], out[half:], leaf, upper)
    if upper:
        out[:half].addmm_(a[:half, half:], b[half:])
    else:
        out[half:].addmm_(a[half:, :half], b[:half])


def _mirror(lower: torch.Tensor, leaf: int) -> None:
    """Copy the blocks below the diagonal above it."""
    if len(lower) > leaf:
        first, below, second = _halves(lower)
        lower[: len(first), len(first) :] = below.mT
        _mirror(first, leaf)
        _mirror(second, leaf)


def _halves(square: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the blocks of a lower triangle: the first on the diagonal, the one below it, and the second."""
    half = len(square) // 2
    half -= half % _ALIGNED if half > _ALIGNED else 0
    return square[:half, :half], square[half:, :half], square[half:, half:]
