"""A kernel tree evaluated on one block of its matrix at a time, forward and backward.

A block is one GEMM per leaf, followed by its epilogue in place. The backward pass takes ``g = dL/dK`` on a block and
passes ``W = g k'(u)`` to each leaf, which accumulates the gradients of its points. Only the leaves interpret the place
of a block (rows of a matrix, or a tile of a product).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from autokern.kernels.family import Family
from autokern.kernels.tree import Node


class Leaf(Protocol):
    """The points of one leaf, with the accumulated sums for their gradients."""

    family: Family
    shape: torch.Tensor | None

    def distances(self, at: Any, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with u on a block."""

    def accumulate(self, at: Any, w: torch.Tensor) -> None:
        """Accumulate ``dL/du`` of a block, up to the factor of `gradients`; `w` may be overwritten."""

    def gradients(self, factor: torch.Tensor | float) -> list[torch.Tensor]:
        """Return the gradients of the points times `factor`, one for each set of points."""


class _Part(NamedTuple):
    """A node with the index of its leaf or weight, from left to right; -1 for sums and products."""

    kind: str
    number: int
    children: tuple[_Part, ...] = ()


def _numbered(node: Node, leaves: Iterator[int], weights: Iterator[int]) -> _Part:
    number = next(leaves) if node.kind == "leaf" else next(weights) if node.kind in ("constant", "scale") else -1
    return _Part(node.kind, number, tuple(_numbered(child, leaves, weights) for child in node.children))


class _Tape(NamedTuple):
    """The value of a node on a block (None if it is not needed), its slope, and the tapes of its children."""

    value: Any
    slope: Any = None
    children: tuple[_Tape, ...] = ()


class Walk:
    """A tree of detached tensors, evaluated block by block; its weights broadcast to a block."""

    def __init__(self, node: Node, leaves: Sequence[Leaf], weights: list[torch.Tensor]) -> None:
        self._root = _numbered(node, itertools.count(), itertools.count())
        self._leaves, self._weights = leaves, weights
        self._kept: _Tape | None = None
        self._weight_totals: dict[int, torch.Tensor] = {}
        self._shape_totals: dict[int, torch.Tensor] = {}  # by leaf
        self._leaf_factors: list[torch.Tensor | float] = [1.0] * len(leaves)

    def _spare(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised matrix of the size of a block."""
        return torch.empty_like(like)

    def _total(self, g: torch.Tensor, by: torch.Tensor | None, at: Any) -> torch.Tensor:
        """Return the sum of ``g * by`` over all elements that a block stands for, shape ``(..., 1, 1)``."""
        return (g if by is None else g * by).sum((-2, -1), keepdim=True)

    def fill(self, at: Any, out: torch.Tensor, keep: bool = False) -> None:
        """Write a block of the kernel matrix into `out`; `keep` stores each node's value for `backward`."""
        if keep:
            self._kept = self._tape(self._root, at, out, wanted=True, out=out)
            return
        value = self._value(self._root, at, out)
        if value.data_ptr() != out.data_ptr() or value.shape != out.shape:
            out.copy_(value)

    def _value(self, part: _Part, at: Any, out: torch.Tensor) -> torch.Tensor:
        """Return the value of a node, in `out` if possible."""
        if part.kind == "leaf":
            leaf = self._leaves[part.number]
            return leaf.family.finish(leaf.distances(at, out), None, self._spare, leaf.shape)
        if part.kind == "constant":
            return self._weights[part.number]
        first, *others = part.children
        total = self._value(first, at, out)
        if part.kind == "scale":
            return _combined(torch.mul, total, self._weights[part.number], out)
        operation = torch.add if part.kind == "sum" else torch.mul
        for child in others:
            total = _combined(operation, total, self._value(child, at, self._spare(out)), out)
        return total

    def backward(self, at: Any, g: torch.Tensor, factor: torch.Tensor | float = 1.0) -> None:
        """Accumulate gradients from a block's derivative ``factor * g``, one factor for all blocks; overwrites `g`."""
        tape, self._kept = self._kept, None
        tape = self._tape(self._root, at, g, wanted=False) if tape is None else tape
        self._backward(self._root, tape, at, g, factor)

    def _tape(self, part: _Part, at: Any, like: torch.Tensor, wanted: bool, out: torch.Tensor | None = None) -> _Tape:
        """Evaluate a node and record the values that `backward` needs; with `out`, also write its value there."""
        if part.kind == "leaf":
            leaf = self._leaves[part.number]
            u = leaf.distances(at, self._spare(like))
            slope = None if leaf.family.slope_is_value else self._spare(like)
            k = leaf.family.finish(u, slope, self._spare, leaf.shape)
            if out is not None:
                out.copy_(k)
            return _Tape(k, k if slope is None else slope)
        if part.kind == "constant":
            return _Tape(self._weights[part.number])
        inside = wanted or part.kind != "sum"
        children = tuple(self._tape(child, at, like, inside) for child in part.children)
        if not wanted:
            return _Tape(None, None, children)
        value = children[0].value
        if part.kind == "scale":
            return _Tape(torch.mul(value, self._weights[part.number], out=out), None, children)
        for child in children[1:]:
            value = value * child.value if part.kind == "product" else value + child.value
        if out is not None:
            out.copy_(value)
        return _Tape(value, None, children)

    def _backward(self, part: _Part, tape: _Tape, at: Any, g: torch.Tensor, factor: torch.Tensor | float) -> None:
        number = part.number
        if part.kind == "leaf":
            self._backward_leaf(number, tape, at, g, factor)
        elif part.kind == "constant":
            _add(self._weight_totals, number, self._total(g, None, at) * factor)
        elif part.kind == "scale":
            child, own = part.children[0], self._weights[number] * factor
            if child.kind == "leaf" and self._leaves[child.number].family.slope_is_value:  # the leaf forms ``g k``
                self._backward_leaf(child.number, tape.children[0], at, g, own, number, factor)
                return
            _add(self._weight_totals, number, self._total(g, tape.children[0].value, at) * factor)
            self._backward(child, tape.children[0], at, g, own)
        else:
            last = len(part.children) - 1
            for index, (child, branch) in enumerate(zip(part.children, tape.children, strict=True)):
                own_g = g if index == last else self._spare(g).copy_(g)
                for other, sibling in enumerate(tape.children if part.kind == "product" else ()):
                    if other != index:
                        own_g.mul_(sibling.value)
                self._backward(child, branch, at, own_g, factor)

    def _backward_leaf(
        self, index: int, tape: _Tape, at: Any, g: torch.Tensor, factor: torch.Tensor | float, scale: int = -1,
        outer: torch.Tensor | float = 1.0,
    ) -> None:  # fmt: skip
        """Accumulate `g` at a leaf, and the total of ``g k`` for the weight `scale` unless that is negative."""
        leaf = self._leaves[index]
        self._leaf_factors[index] = factor
        if leaf.shape is not None and leaf.family.shape is not None:
            by_shape = leaf.family.shape.slope(tape.value, leaf.shape)
            _add(self._shape_totals, index, self._total(g, by_shape, at) * factor)
        w = g.mul_(tape.slope)
        if scale >= 0:
            _add(self._weight_totals, scale, self._total(w, None, at) * outer)
        leaf.accumulate(at, w)

    def totals(self) -> list[torch.Tensor]:
        """Return the gradients of shapes, then of weights, from the blocks so far."""
        shapes = [total for _, total in sorted(self._shape_totals.items())]
        weights = [self._weight_totals[number] for number in range(len(self._weights))]
        return [*shapes, *(total.view(total.shape[:-2]) for total in weights)]

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients accumulated over all blocks, in the order of `tree.apart`."""
        pairs = zip(self._leaves, self._leaf_factors, strict=True)
        sets = zip(*(leaf.gradients(factor) for leaf, factor in pairs), strict=True)
        return [*itertools.chain.from_iterable(sets), *self.totals()]


def _combined(
    operation: Callable[..., torch.Tensor], one: torch.Tensor, other: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Return ``operation(one, other)``, in `out` unless both operands are smaller constants."""
    return operation(one, other, out=out) if out.shape in (one.shape, other.shape) else operation(one, other)


def _add(totals: dict[int, torch.Tensor], index: int, more: torch.Tensor) -> None:
    totals[index] = totals[index] + more if index in totals else more
