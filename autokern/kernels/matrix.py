"""The matrix of a kernel tree between two sets of points, and its gradients in closed form.

For a single leaf, scaled or not, the backward pass keeps the slope, which for some families is the matrix itself; both
include the scale. All other trees are evaluated again, block by block. With ``W = dL/du``, gradients need only
``W [x' 1]`` and ``W^T [x 1]``, so no ``n x m x d`` temporary exists. Second derivatives differentiate `tree.dense`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from gpytorch.kernels import Kernel

from autokern.core.autograd import Lent, each_cotangent, plain_gradients
from autokern.kernels import embedded
from autokern.kernels.blocks import Leaf, row_blocks
from autokern.kernels.far import same_points
from autokern.kernels.tree import Parts, Tree, apart, by_leaf, flattened
from autokern.kernels.walk import Walk
from autokern.system import buffers

CACHED = 2**21
"""Bytes of a block of rows that stays in a CPU's cache between the GEMM and its epilogue."""
_Rows = tuple[int, int]


def both(kernel: Kernel, x1: torch.Tensor, x2: torch.Tensor) -> tuple[Tree, list[torch.Tensor] | None, bool]:
    """Return the tree of a kernel, the points of the columns, and whether both sets of points have equal values.

    The columns' points are None if both sets are equal, unless two distinct tensors need separate gradients.
    """
    same = same_points(x1, x2)
    parted = x1 is not x2 and torch.is_grad_enabled() and (x1.requires_grad or x2.requires_grad)
    return *embedded.both(kernel, x1, x1 if same and not parted else x2), same


def matrix(tree: Tree, others: list[torch.Tensor] | None, same: bool, layout: str = "whole") -> torch.Tensor:
    """Return the kernel matrix, which the caller may overwrite; the caller must not change the arguments afterwards.

    The tree has the rows' points; `others` are the columns', None for the same; `same` says that both have equal
    values, so that the diagonal is exact. The layout is ``whole``, ``tiled`` in blocks of rows that fit the cache
    (whole for a batch), or ``again``: tiled, keeping no matrix for the backward pass.
    """
    parts, tensors = apart(tree, others)
    shape, tensors = flattened(tensors, parts.dims)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        k = _Matrix.apply(parts, same, layout, *tensors)
    else:
        blocks = _Blocks(parts, tensors, same)
        k = blocks.evaluated(layout, False, blocks.scale)[0]
    return k.view(*shape, *k.shape[-2:]) if shape else k


class _Blocks(Walk[_Rows]):
    """A tree at two sets of points, of detached tensors with at most one batch dimension, the same for all."""

    def __init__(self, parts: Parts, tensors: Sequence[torch.Tensor], same: bool) -> None:
        tree, others = parts.pair(tensors)
        columns = others or [None] * len(tree.points)
        self.leaves = [Leaf(*leaf, True, other, same) for leaf, other in zip(by_leaf(tree), columns, strict=True)]
        super().__init__(tree.node, self.leaves, [w if not w.dim() else w[:, None, None] for w in tree.weights])
        scaled = tree.node.kind == "scale"
        inner = tree.node.children[0] if scaled else tree.node
        self.single = self.leaves[0] if inner.kind == "leaf" and not tree.shapes else None
        self.scale = self._weights[0] if scaled and self.single is not None else None

    def _empty(self) -> torch.Tensor:
        leaf = self.leaves[0]
        size, like = (*leaf.z.shape[:-1], leaf.y.shape[-2]), leaf.z.new_empty(0, dtype=leaf.dtype)
        return buffers.huge(size, like) if len(size) == 2 else like.new_empty(size)

    def evaluated(
        self, layout: str, want_slope: bool, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the matrix and, if wanted, the slope of a single leaf, both times `scale`."""
        k = self._empty()
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
        self, at: _Rows, out: torch.Tensor, slope: torch.Tensor | None, scale: torch.Tensor | None
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


class _Matrix(torch.autograd.Function):
    """The kernel matrix with closed-form first derivatives; second ones differentiate the plain formula.

    The caller may overwrite the matrix: the backward pass uses it if its version is unchanged, and else computes it
    again.
    """

    @staticmethod
    def forward(ctx, parts, same, layout, *tensors):  # type: ignore[no-untyped-def]
        blocks = _Blocks(parts, tensors, same)
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
            found: Sequence[torch.Tensor | None] = _of_tree(_Blocks(parts, tensors, same), grad)
        else:
            found = _of_leaf(ctx.blocks, layout, grad, slope, ctx.kept, wanted)
        return None, None, None, *(one if want else None for one, want in zip(found, wanted, strict=True))


def _of_tree(blocks: _Blocks, grad: torch.Tensor) -> list[torch.Tensor]:
    """Return all gradients by evaluating the tree again."""
    for leaf in blocks.leaves:
        leaf.started()
    for start, stop in row_blocks(grad, CACHED):
        blocks.backward((start, stop), grad[..., start:stop, :].clone(memory_format=torch.contiguous_format))
    return blocks.gradients()


def _of_leaf(
    blocks: _Blocks, layout: str, grad: torch.Tensor, slope: torch.Tensor | None, lent: Lent, wanted: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    """Return the gradients of a single leaf by its points, and by its scale if it has one."""
    leaf, scale = copy.copy(blocks.single), blocks.scale
    assert leaf is not None
    want_scale, want_points = scale is not None and wanted[-1], any(wanted[: None if scale is None else -1])
    k = lent.take() if slope is None or want_scale else slope
    k = blocks.evaluated(layout, False, scale)[0] if k is None else k
    own, value, by = k if slope is None else slope, k, scale
    if (
        scale is not None
        and want_scale
        and not scale.min().item() > torch.finfo(k.dtype).tiny / torch.finfo(k.dtype).eps
    ):
        value, by = blocks.evaluated(layout, False, None)[0], None  # the scale is too small to divide by
    leaf.started()
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
