"""The matrix of a kernel tree block by block, and its gradients in closed form.

Temporaries are blocks that fit the cache. With ``W = g k'(u)``, the backward pass accumulates only ``W [x' 1]`` and
``W^T [x 1]`` of each leaf, which give the gradient of equal points as ``4 gamma (rows(W) x - W x)``; no ``n x m x d``
temporary exists. For a single leaf, scaled or not, the forward pass keeps the slope, which for some families is the
matrix itself, times the scale. All other trees are evaluated again. Second derivatives differentiate `tree.dense`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from gpytorch.kernels import Kernel

from autokern.core.autograd import Lent, each_cotangent, plain_gradients
from autokern.kernels import embedded
from autokern.kernels.family import Family, Reach
from autokern.kernels.tree import Tree, apart, by_formula, by_leaf, flattened
from autokern.kernels.walk import Walk
from autokern.system import memory

Rows = tuple[int, int]  # first row of a block and the row after its last; its columns start at 0
CACHED = 2**21  # bytes of a block of rows that stays in a CPU's cache between the GEMM and its epilogue
_LAUNCHED = 2**26  # bytes of a block on an accelerator: its work outweighs a dozen kernel launches


def bytes_on(cached: int, device: str) -> int:
    """Return the bytes of a block on a device type: `cached` on a CPU."""
    return cached if device == "cpu" else _LAUNCHED


def row_blocks(matrix: torch.Tensor, cached: int) -> list[Rows]:
    """Return the bounds of row blocks of `bytes_on` bytes, but at least 16 rows; a batch of matrices is one block."""
    n, m = matrix.shape[-2:]
    if matrix.dim() > 2:
        return [(0, n)]
    row_bytes = max(1, m * matrix.element_size())
    each = max(16, bytes_on(cached, matrix.device.type) // row_bytes // 16 * 16)
    return [(start, min(n, start + each)) for start in range(0, n, each)] or [(0, n)]


class RowLeaf:
    """The centred points of one leaf, of rows and columns, their squared norms, and the sums for their gradients.

    If `mirrored`, entries left of the diagonal blocks count twice.
    """

    def __init__(
        self, of: Family, points: torch.Tensor, shape: torch.Tensor | None, others: torch.Tensor | None,
        same: bool, mirrored: bool, look: bool,
    ) -> None:  # fmt: skip
        self.family, self.shape, self.dtype, self.same, self._mirrored = of, shape, points.dtype, same, mirrored
        self._rows: tuple[torch.Tensor, ...] = ()  # no list, so that a copy of the leaf has sums of its own
        self._columns: torch.Tensor | None = None
        self._set(points, points if others is None else others)
        self.seen = Reach()
        if look and (points.dtype is not torch.float64 or of.kinked):
            self.seen = of.reach(*((self.row,) if others is None else (self.row, self.column)))
        if self.seen.far and points.dtype is not torch.float64:
            z = points.double()
            self._set(z, z if others is None else others.double())

    def _set(self, z: torch.Tensor, y: torch.Tensor) -> None:
        self.z, self.y, self.row = z, y, torch.linalg.vecdot(z, z).unsqueeze(-1)
        self.column = self.row.mT if y is z else torch.linalg.vecdot(y, y).unsqueeze(-2)

    def distances(self, at: Rows, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with u for a block; the diagonal of equal points becomes 0, or NaN for NaN points."""
        start, stop = at
        gamma, z, y, row, width = self.family.gamma, self.z, self.y, self.row, out.shape[-1]
        u = out if out.dtype is z.dtype else torch.empty_like(out, dtype=z.dtype)
        if out.dim() == 3:
            torch.baddbmm(self.column, z, y.mT, beta=gamma, alpha=-2 * gamma, out=u).add_(row, alpha=gamma)
        elif stop - start == z.shape[0]:
            torch.addmm(self.column, z, y.mT, beta=gamma, alpha=-2 * gamma, out=u).add_(row, alpha=gamma)
        else:
            torch.addmm(self.column[:, :width], z[start:stop], y[:width].mT, beta=gamma, alpha=-2 * gamma, out=u)
            u.add_(row[start:stop], alpha=gamma)
        norms = lambda: gamma * (row[..., start:stop, :] + self.column[..., :width])  # noqa: E731
        self.family.settled(u, self.seen, norms, u.diagonal(start, -2, -1) if self.same else None)
        return out if u is out else out.copy_(u)

    def accumulate(self, at: Rows, w: torch.Tensor) -> None:
        """Accumulate ``dL/du``; its diagonal cancels for equal points and is set to 0, or stays NaN."""
        (start, stop), w = at, w.to(self.z.dtype)
        if self.same:
            diagonal = w.diagonal(start, -2, -1)
            diagonal.sub_(diagonal)
        if not self._rows:
            z = torch.cat((self.z, torch.ones_like(self.row)), -1).mT
            y = z if self.y is self.z else torch.cat((self.y, torch.ones_like(self.column.mT)), -1).mT
            self._extended = z, y
        z, y = self._extended
        # both sums are transposed, which a BLAS adds faster
        self._rows += ((y if y.shape[-1] == w.shape[-1] else y[:, :stop]) @ w.mT,)
        if not self._mirrored:
            if self._columns is None:
                self._columns = z[..., start:stop] @ w
            else:
                self._columns.addmm_(z[:, start:stop], w)
        elif start:
            if self._columns is None:
                self._columns = torch.zeros_like(z)
            self._columns[:, :start].addmm_(z[:, start:stop], w[:, :start])

    def gradients(self, factor: torch.Tensor | float) -> list[torch.Tensor]:
        """Return the gradients of the points times `factor`, one for each set of points."""
        rows = self._rows[0] if len(self._rows) == 1 else torch.cat(self._rows, -1)
        if self._columns is None:
            pairs = [(self.z, rows)]
        elif self.y is self.z:
            pairs = [(self.z, rows + self._columns)]
        else:
            pairs = [(self.z, rows), (self.y, self._columns)]
        scale = factor * ((4 if self._mirrored else 2) * self.family.gamma)
        found = ((p, s.mT) for p, s in pairs)
        return [(s[..., -1:] * p).sub_(s[..., :-1]).mul_(scale).to(self.dtype) for p, s in found]


class Blocks(Walk):
    """A tree at one or two sets of points; its tensors are detached and share at most one batch dimension.

    `mirrored` blocks end at the column of their last row, and also stand for the upper triangle. Without `look`,
    nothing is read back from the device, as a recorded (CUDA graph) step requires.
    """

    def __init__(
        self, tree: Tree, others: list[torch.Tensor] | None = None, same: bool = True, mirrored: bool = False,
        look: bool = True,
    ) -> None:  # fmt: skip
        columns: Sequence[torch.Tensor | None] = others or [None] * len(tree.points)
        pairs = zip(by_leaf(tree), columns, strict=True)
        self.leaves, self._mirrored = [RowLeaf(*leaf, y, same, mirrored, look) for leaf, y in pairs], mirrored
        super().__init__(tree.node, self.leaves, [w if not w.dim() else w[:, None, None] for w in tree.weights])
        scaled = tree.node.kind == "scale"
        inner = tree.node.children[0] if scaled else tree.node
        self.single = self.leaves[0] if inner.kind == "leaf" and not tree.shapes else None
        self.scale = self._weights[0] if scaled and self.single is not None else None

    def _total(self, g: torch.Tensor, by: torch.Tensor | None, at: Rows) -> torch.Tensor:
        """Return the sum over a block, counting the columns before its first row twice if they are mirrored."""
        product = g if by is None else g * by
        total, start = product.sum((-2, -1), keepdim=True), at[0]
        return total + product[..., :start].sum((-2, -1), keepdim=True) if start and self._mirrored else total

    def evaluated(
        self, layout: str, want_slope: bool, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the matrix and, if wanted, the slope of a single leaf, both times `scale`."""
        leaf = self.leaves[0]
        size, like = (*leaf.z.shape[:-1], leaf.y.shape[-2]), leaf.z.new_empty(0, dtype=leaf.dtype)
        k = memory.huge(size, like) if len(size) == 2 else like.new_empty(size)
        slope = torch.empty_like(k) if want_slope else None
        if k.dim() > 2 or (layout == "whole" and all(leaf.z.dtype is k.dtype for leaf in self.leaves)):
            return self._written((0, k.shape[-2]), k, slope, scale), slope
        for start, stop in row_blocks(k, CACHED):
            out = k[start:stop]
            found = self._written((start, stop), out, None if slope is None else slope[start:stop], scale)
            if found.data_ptr() != out.data_ptr():
                out.copy_(found)
        return k, slope

    def _written(
        self, at: Rows, out: torch.Tensor, slope: torch.Tensor | None, scale: torch.Tensor | None
    ) -> torch.Tensor:
        """Return a block of the matrix, in `out` if the epilogue works in place."""
        leaf = self.single
        if leaf is None:
            self.fill(at, out)
            return out
        k = leaf.family.finish(leaf.distances(at, out), slope, torch.empty_like)
        if scale is not None:
            k.mul_(scale)
            if slope is not None:
                slope.mul_(scale)
        return k


def same_points(x1: torch.Tensor, x2: torch.Tensor) -> bool:
    """Whether two sets of points have equal values; tensors that share their memory are not compared."""
    if x1 is x2 or x1.shape != x2.shape:
        return x1 is x2
    return (x1.data_ptr() == x2.data_ptr() and x1.stride() == x2.stride()) or torch.equal(x1, x2)


def both(kernel: Kernel, x1: torch.Tensor, x2: torch.Tensor) -> tuple[Tree, list[torch.Tensor] | None, bool]:
    """Return the tree of a kernel, the points of the columns, and whether both sets of points have equal values.

    The columns' points are None if both sets are equal, unless two distinct tensors need separate gradients.
    """
    same = same_points(x1, x2)
    parted = x1 is not x2 and torch.is_grad_enabled() and (x1.requires_grad or x2.requires_grad)
    return *embedded.both(kernel, x1, x1 if same and not parted else x2), same


def matrix(tree: Tree, others: list[torch.Tensor] | None, same: bool, layout: str = "whole") -> torch.Tensor:
    """Return the kernel matrix, which the caller may overwrite; the caller must not change the arguments afterwards.

    The tree has the rows' points, `others` the columns' (None if the same tensor); `same` says that both have equal
    values, so that the diagonal is exact. The layout is ``whole``, ``tiled`` in blocks of rows that fit the cache
    (whole for a batch), or ``again``: tiled, keeping no matrix for the backward pass.
    """
    parts, tensors = apart(tree, others)
    shape, tensors = flattened(tensors, parts.dims)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        k = _Matrix.apply(parts, same, layout, *tensors)
    else:
        blocks = Blocks(*parts.pair(tensors), same)
        k = blocks.evaluated(layout, False, blocks.scale)[0]
    return k.view(*shape, *k.shape[-2:]) if shape else k


def by_cdist(tree: Tree, others: list[torch.Tensor] | None) -> torch.Tensor:
    """Return the kernel matrix ``(..., n, m)`` by torch.cdist, not in its matmul mode, which gives indefinite ones."""
    pairs = zip(by_leaf(tree), others or tree.points, strict=True)
    way = "donot_use_mm_for_euclid_dist"
    us = (torch.cdist(a, b, compute_mode=way).square() * of.gamma for (of, a, _), b in pairs)
    return by_formula(tree.node, us, tree.shapes, [w[..., None, None] for w in tree.weights])


class _Matrix(torch.autograd.Function):
    """The kernel matrix, which the caller may overwrite (`Lent`), with closed-form first derivatives."""

    @staticmethod
    def forward(ctx, parts, same, layout, *tensors):  # type: ignore[no-untyped-def]
        tree, others = parts.pair(tensors)
        blocks = Blocks(tree, others, same)
        leaf = None if layout == "again" else blocks.single
        k, slope = blocks.evaluated(layout, leaf is not None and not leaf.family.slope_is_value, blocks.scale)
        ctx.fixed, ctx.kept = (parts, same, layout), None if leaf is None else Lent(k)
        ctx.blocks = None if leaf is None else blocks
        ctx.save_for_backward(slope, *tensors)
        return k

    @staticmethod
    @each_cotangent
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (parts, same, layout), (slope, *tensors) = ctx.fixed, ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            return None, None, None, *plain_gradients(parts.dense, tensors, wanted, grad)
        if ctx.kept is None:
            tree, others = parts.pair(tensors)
            blocks = Blocks(tree, others, same)
            for start, stop in row_blocks(grad, CACHED):
                blocks.backward((start, stop), grad[..., start:stop, :].clone(memory_format=torch.contiguous_format))
            found: Sequence[torch.Tensor | None] = blocks.gradients()
        else:
            found = _of_leaf(ctx.blocks, layout, grad, slope, ctx.kept, wanted)
        return None, None, None, *(one if want else None for one, want in zip(found, wanted, strict=True))


def _of_leaf(
    blocks: Blocks, layout: str, grad: torch.Tensor, slope: torch.Tensor | None, lent: Lent, wanted: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    """Return the gradients of a single leaf by its points, and by its scale if it has one."""
    leaf, scale = copy.copy(blocks.single), blocks.scale
    assert leaf is not None
    want_scale, want_points = scale is not None and wanted[-1], any(wanted[: None if scale is None else -1])
    k = lent.take() if slope is None or want_scale else slope
    k = blocks.evaluated(layout, False, scale)[0] if k is None else k
    own, value, by = k if slope is None else slope, k, scale
    least = torch.finfo(k.dtype).tiny / torch.finfo(k.dtype).eps
    if scale is not None and want_scale and not scale.min().item() > least:
        value, by = blocks.evaluated(layout, False, None)[0], None  # the scale is too small to divide by
    totals, steps, buffer = [], row_blocks(grad, CACHED), None
    for at in steps:
        g, slopes, values = (t[at[0] : at[1]] if len(steps) > 1 else t for t in (grad, own, value))
        if want_scale and value is not own:
            totals.append((g * values).sum((-2, -1)))
        w = torch.mul(g, slopes) if buffer is None else torch.mul(g, slopes, out=buffer[: len(g)])
        buffer = w if buffer is None else buffer
        if want_scale and value is own:
            totals.append(w.sum((-2, -1)))
        if want_points:
            leaf.accumulate(at, w)
    sets = 1 if leaf.y is leaf.z else 2
    found: list[torch.Tensor | None] = [*leaf.gradients(1.0)] if want_points else [None] * sets
    if scale is not None:
        total = torch.stack(totals).sum(0) if want_scale else None
        found.append(total if total is None or by is None else total / by.view(total.shape))
    return found
