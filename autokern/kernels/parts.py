"""Trees taken apart into plain tensors, as autograd functions and recorded steps need them, and put together again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from autokern.kernels.tree import Node, Tree, dense


class Parts(NamedTuple):
    """The form of a tree and its numbers of tensors, in their order; `columns` is None where points are the same."""

    node: Node
    points: int  # of the rows
    columns: int | None
    shapes: int
    weights: int

    @property
    def dims(self) -> list[int]:
        """Dimensions of its own that each tensor has behind its batch: weights have none."""
        return [2] * (self.points + (self.columns or 0) + self.shapes) + [0] * self.weights

    def pair(self, tensors: Sequence[Any]) -> tuple[Tree, list[Any] | None]:
        """Return tensors, or what stands for them, as a tree and the points of the columns."""
        left = iter(tensors)
        points, columns, shapes, weights = (list(itertools.islice(left, count or 0)) for count in self[1:])
        return Tree(self.node, points, shapes, weights), None if self.columns is None else columns

    def tree(self, tensors: Sequence[Any]) -> Tree:
        """Return tensors as a tree."""
        return self.pair(tensors)[0]

    def dense(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Evaluate tensors by plain steps."""
        return dense(*self.pair(tensors))


def apart(tree: Tree, others: list[torch.Tensor] | None = None) -> tuple[Parts, list[torch.Tensor]]:
    """Take a tree and the points of the columns apart."""
    columns = None if others is None else len(others)
    parts = Parts(tree.node, len(tree.points), columns, len(tree.shapes), len(tree.weights))
    return parts, [*tree.points, *(others or ()), *tree.shapes, *tree.weights]


def flattened(tensors: list[torch.Tensor], dims: list[int]) -> tuple[torch.Size, list[torch.Tensor]]:
    """Broadcast the batches of tensors, each with so many dimensions of its own, to a single dimension or none.

    Returns the batch shape as it was, and the tensors.
    """
    if [t.dim() for t in tensors] == dims:
        return torch.Size(), tensors
    leads = [t.shape[: t.dim() - dim] for t, dim in zip(tensors, dims, strict=True)]
    shape = torch.broadcast_shapes(*leads)
    batch = torch.Size([shape.numel()])

    def flat(t: torch.Tensor, lead: torch.Size) -> torch.Tensor:
        own = t.shape[len(lead) :]
        return t if lead == batch else t.expand(*shape, *own).reshape(*batch, *own)

    return shape, [flat(t, lead) for t, lead in zip(tensors, leads, strict=True)]
