"""A kernel tree evaluated block by block, and gradients pulled back through it block by block.

Only blocks that fit the cache are ever held: a block is one GEMM per leaf with its epilogue in place. The pull-back
takes ``g = dL/dK`` on a block and keeps of each leaf the product ``W z`` and the row sums of ``W = g k'(u)``, from
which the gradient of the points follows as ``4 gamma (rows(W) z - W z)``; no ``n x n x d`` temporary exists. Both sides
are the same points, so a lower triangle of blocks is enough: what lies left of the diagonal counts twice. Floor 2: may
import `tree`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from autokern.kernels.family import Family, family
from autokern.kernels.tree import Node, Tree, leaves

__all__ = ["Blocks", "Gradients", "strips"]


def strips(rows: int, row_bytes: int, most: int) -> list[tuple[int, int]]:
    """Return the bounds of strips of rows of at most so many bytes, and of 16 rows at least."""
    each = max(16, most // max(1, row_bytes) // 16 * 16)
    return [(start, min(rows, start + each)) for start in range(0, rows, each)]


class _Leaf:
    """The points of one leaf, centred, their squared norms, and what is pulled back to them."""

    __slots__ = ("column", "family", "product", "row", "rows", "shape", "shape_index", "z")

    def __init__(self, of: Family, points: torch.Tensor, shape: torch.Tensor | None, shape_index: int) -> None:
        self.family, self.shape, self.shape_index = of, shape, shape_index
        self.z = points - points.mean(-2, keepdim=True)
        self.row = torch.linalg.vecdot(self.z, self.z).unsqueeze(-1)
        self.column = self.row.mT
        self.product: torch.Tensor | None = None
        self.rows: torch.Tensor | None = None

    def distances(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with u for rows from `start` to `stop` and all columns up to its width."""
        gamma, z, row, width = self.family.gamma, self.z, self.row, out.shape[-1]
        if out.dim() == 3:
            torch.baddbmm(self.column, z, z.mT, beta=gamma, alpha=-2 * gamma, out=out).add_(row, alpha=gamma)
            out.diagonal(0, -2, -1).zero_()
        elif stop - start == z.shape[0]:
            torch.addmm(self.column, z, z.mT, beta=gamma, alpha=-2 * gamma, out=out).add_(row, alpha=gamma)
            out.fill_diagonal_(0)
        else:
            torch.addmm(self.column[:, :width], z[start:stop], z[:width].mT, beta=gamma, alpha=-2 * gamma, out=out)
            out.add_(row[start:stop], alpha=gamma).diagonal(start).zero_()
        if not self.family.slope_is_value:  # an exponential takes what rounding carried across zero
            self.family.clamp_(out)
        return out

    def epilogue(self, u: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
        """Turn u into k in place where the family can, and fill the slope."""
        return self.family.epilogue(u, slope) if self.shape is None else self.family.epilogue(u, slope, self.shape)


class _Tape(NamedTuple):
    """The value of a node on a block (None where nobody wants it), its slope, and the tapes of its children."""

    value: torch.Tensor | None
    slope: torch.Tensor | None = None
    children: tuple[_Tape, ...] = ()


class Gradients(NamedTuple):
    """Gradients in the order of the tensors of a tree."""

    points: list[torch.Tensor]
    shapes: list[torch.Tensor]
    weights: list[torch.Tensor]


class Blocks:
    """A tree of plain tensors, of one batch shape: none or a single dimension.

    Parameters
    ----------
    tree : Tree
        Points ``(n, d)`` or ``(b, n, d)``, shapes ``(1, 1)`` or ``(b, 1, 1)``, weights ``()`` or ``(b)``.
    """

    def __init__(self, tree: Tree) -> None:
        self._node = tree.node
        self._weights = [w if not w.dim() else w[:, None, None] for w in tree.weights]
        self._leaves: list[_Leaf] = []
        self._kept: _Tape | None = None
        self._weight_totals: list[torch.Tensor | None] = [None] * len(tree.weights)
        self._shape_totals: list[torch.Tensor | None] = [None] * len(tree.shapes)
        self._leaf_factors: list[torch.Tensor | float] = [1.0] * len(tree.points)
        points, shapes = iter(tree.points), iter(enumerate(tree.shapes))
        for name in leaves(tree.node):
            of = family(name)
            index, shape = next(shapes) if of.shape is not None else (-1, None)
            self._leaves.append(_Leaf(of, next(points), shape, index))

    def fill(self, start: int, stop: int, out: torch.Tensor, keep: bool = False) -> None:
        """Write the rows from `start` to `stop` of the kernel matrix into `out`, as many columns as it has.

        With `keep`, what the pull-back of this block needs is kept: several matrices of its size.
        """
        if keep:
            self._kept, _, _ = self._tape(self._node, 0, 0, start, stop, out, wanted=True, out=out)
            return
        value, _, _ = self._value(self._node, 0, 0, start, stop, out)
        if value.data_ptr() != out.data_ptr() or value.shape != out.shape:
            out.copy_(value)

    def _value(
        self, node: Node, leaf: int, weight: int, start: int, stop: int, out: torch.Tensor
    ) -> tuple[torch.Tensor, int, int]:
        """Return the value of a node, in `out` where possible, and the numbers of the next leaf and weight."""
        if node.kind == "leaf":
            here = self._leaves[leaf]
            return here.epilogue(here.distances(start, stop, out), None), leaf + 1, weight
        if node.kind == "constant":
            return self._weights[weight], leaf, weight + 1
        if node.kind == "scale":
            scale = self._weights[weight]
            value, leaf, weight = self._value(node.children[0], leaf, weight + 1, start, stop, out)
            return _combined(torch.mul, value, scale, out), leaf, weight
        operation = torch.add if node.kind == "sum" else torch.mul
        total, leaf, weight = self._value(node.children[0], leaf, weight, start, stop, out)
        for child in node.children[1:]:
            value, leaf, weight = self._value(child, leaf, weight, start, stop, torch.empty_like(out))
            total = _combined(operation, total, value, out)
        return total, leaf, weight

    def pull(self, start: int, stop: int, g: torch.Tensor, factor: torch.Tensor) -> None:
        """Take in ``factor * g``, the derivative by the rows from `start` to `stop`, columns 0 to `stop` of the matrix.

        Columns left of `start` count twice, for their mirror images too. `g` is destroyed.
        """
        tape, self._kept = self._kept, None
        if tape is None:
            tape, _, _ = self._tape(self._node, 0, 0, start, stop, g, wanted=False)
        self._pull(self._node, tape, 0, 0, start, stop, g, factor)

    def _tape(
        self,
        node: Node,
        leaf: int,
        weight: int,
        start: int,
        stop: int,
        like: torch.Tensor,
        wanted: bool,
        out: torch.Tensor | None = None,
    ) -> tuple[_Tape, int, int]:
        """Evaluate a node with all that its pull-back needs; with `out`, write its value there too."""
        if node.kind == "leaf":
            here = self._leaves[leaf]
            u = here.distances(start, stop, torch.empty_like(like))
            slope = None if here.family.slope_is_value else torch.empty_like(like)
            k = here.epilogue(u, slope)
            if out is not None:
                out.copy_(k)
            return _Tape(k, k if slope is None else slope), leaf + 1, weight
        if node.kind == "constant":
            return _Tape(self._weights[weight]), leaf, weight + 1
        if node.kind == "scale":
            scale = self._weights[weight]
            child, leaf, weight = self._tape(node.children[0], leaf, weight + 1, start, stop, like, wanted=True)
            assert child.value is not None
            value = torch.mul(child.value, scale, out=out) if wanted else None
            return _Tape(value, None, (child,)), leaf, weight
        product = node.kind == "product"
        children = []
        for part in node.children:
            child, leaf, weight = self._tape(part, leaf, weight, start, stop, like, wanted or product)
            children.append(child)
        value = None
        if wanted:
            value = children[0].value
            for child in children[1:]:
                assert value is not None
                assert child.value is not None
                value = value * child.value if product else value + child.value
            if out is not None:
                assert value is not None
                out.copy_(value)
        return _Tape(value, None, tuple(children)), leaf, weight

    def _pull(
        self,
        node: Node,
        tape: _Tape,
        leaf: int,
        weight: int,
        start: int,
        stop: int,
        g: torch.Tensor,
        factor: torch.Tensor | float,
    ) -> tuple[int, int]:
        if node.kind == "leaf":
            self._pull_leaf(leaf, tape, start, stop, g, factor)
            return leaf + 1, weight
        if node.kind == "constant":
            _add(self._weight_totals, weight, _total(g, None, start) * factor)
            return leaf, weight + 1
        if node.kind == "scale":
            child = node.children[0]
            own = self._weights[weight] * factor
            if child.kind == "leaf" and self._leaves[leaf].family.slope_is_value:  # g k comes by on the way
                self._pull_leaf(leaf, tape.children[0], start, stop, g, own, weight, factor)
                return leaf + 1, weight + 1
            _add(self._weight_totals, weight, _total(g, tape.children[0].value, start) * factor)
            return self._pull(child, tape.children[0], leaf, weight + 1, start, stop, g, own)
        last = len(node.children) - 1
        for index, (child, branch) in enumerate(zip(node.children, tape.children, strict=True)):
            own = g if index == last else g.clone()
            if node.kind == "product":
                for other, sibling in enumerate(tape.children):
                    if other != index:
                        assert sibling.value is not None
                        own.mul_(sibling.value)
            leaf, weight = self._pull(child, branch, leaf, weight, start, stop, own, factor)
        return leaf, weight

    def _pull_leaf(
        self,
        index: int,
        tape: _Tape,
        start: int,
        stop: int,
        g: torch.Tensor,
        factor: torch.Tensor | float,
        scale: int = -1,
        outer: torch.Tensor | float = 1.0,
    ) -> None:
        """Take in `g` at a leaf, and the total of ``g k`` for the weight of number `scale`, if that is one."""
        leaf = self._leaves[index]
        self._leaf_factors[index] = factor
        assert tape.value is not None
        assert tape.slope is not None
        if leaf.shape is not None and leaf.family.shape is not None:
            by_shape = leaf.family.shape.slope(tape.value, leaf.shape)
            _add(self._shape_totals, leaf.shape_index, _total(g, by_shape, start) * factor)
        w = g.mul_(tape.slope)
        if scale >= 0:
            _add(self._weight_totals, scale, _total(w, None, start) * outer)
        if w.shape[-2] == leaf.z.shape[-2]:  # all rows; the diagonal would only cancel in what follows
            w.fill_diagonal_(0) if w.dim() == 2 else w.diagonal(0, -2, -1).zero_()
            leaf.rows, leaf.product = w.sum(-1, keepdim=True), w @ leaf.z
            return
        w.diagonal(start).zero_()
        if leaf.rows is None or leaf.product is None:
            leaf.rows, leaf.product = torch.zeros_like(leaf.row), torch.zeros_like(leaf.z)
        leaf.rows[start:stop] += w.sum(-1, keepdim=True)
        leaf.product[start:stop].addmm_(w, leaf.z[:stop])
        if start:
            left = w[:, :start].mT
            leaf.rows[:start] += left.sum(-1, keepdim=True)
            leaf.product[:start].addmm_(left, leaf.z[start:stop])

    def gradients(self) -> Gradients:
        """Return what was pulled back by all blocks."""
        points = []
        for leaf, factor in zip(self._leaves, self._leaf_factors, strict=True):
            assert leaf.rows is not None
            assert leaf.product is not None
            points.append(leaf.rows.mul(leaf.z).sub_(leaf.product).mul_(factor * (4 * leaf.family.gamma)))
        weights = [total.view(total.shape[:-2]) for total in _complete(self._weight_totals)]
        return Gradients(points, _complete(self._shape_totals), weights)


def _combined(
    operation: Callable[..., torch.Tensor], one: torch.Tensor, other: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Return ``operation(one, other)`` in `out` where the result fills it; two constants stay small."""
    if out.shape not in (one.shape, other.shape):
        return operation(one, other)
    return operation(one, other, out=out)


def _total(g: torch.Tensor, by: torch.Tensor | None, start: int) -> torch.Tensor:
    """Sum of ``g * by`` over a block and the mirror image of what lies left of its diagonal, shape ``(..., 1, 1)``."""
    product = g if by is None else g * by
    total = product.sum((-2, -1), keepdim=True)
    return total + product[..., :start].sum((-2, -1), keepdim=True) if start else total


def _add(totals: list[torch.Tensor | None], index: int, more: torch.Tensor) -> None:
    known = totals[index]
    totals[index] = more if known is None else known + more


def _complete(totals: list[torch.Tensor | None]) -> list[torch.Tensor]:
    assert all(total is not None for total in totals)
    return [total for total in totals if total is not None]
