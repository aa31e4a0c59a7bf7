"""Preconditioner: a factor of an approximate inverse, its log determinant, and the gradients of what it stands for."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

import torch

from autokern.kernels.tree import Tree

__all__ = ["Gradients", "Preconditioner", "Probed", "UnfitError", "cholesky", "in_double"]


class UnfitError(Exception):
    """A preconditioner cannot be made for a matrix."""


class Gradients(NamedTuple):
    """Gradients by the noise of each point, ``(n,)``, and by the tensors of a tree, in the order of `parts.apart`."""

    noise: torch.Tensor
    tensors: list[torch.Tensor]


class Probed(NamedTuple):
    """Probes ``w`` and what was computed with them, each of shape ``(n, t)``."""

    w: torch.Tensor  # independent signs
    u: torch.Tensor  # the solutions of ``S^T K S u = w``
    sw: torch.Tensor  # ``S w``
    su: torch.Tensor  # ``S u``
    kw: torch.Tensor  # ``K S w``
    ku: torch.Tensor  # ``K S u``


class Preconditioner(abc.ABC):
    """A square matrix ``S`` for which ``M = S^T K S`` is near the identity."""

    logdet: float  # ``-2 log |det S|``, near ``log |K|``
    _tree: Tree
    _noise: torch.Tensor

    @abc.abstractmethod
    def apply(self, v: torch.Tensor) -> torch.Tensor:
        """Return ``S v`` for columns ``(n, t)``."""

    @abc.abstractmethod
    def turned(self, v: torch.Tensor) -> torch.Tensor:
        """Return ``S^T v`` for columns ``(n, t)``."""

    @abc.abstractmethod
    def gradients(self, by: Probed) -> Gradients:
        """Return the gradients of ``log |K|`` without the part ``(S u)^T dK (S w)`` in the mean over the probes.

        Both parts together are an unbiased estimate, and its variance vanishes as M nears the identity.
        """

    def _data(self, *more: torch.Tensor) -> dict[str, Sequence[torch.Tensor | str]]:
        """Return what its rows depend on, by the words for it in errors of ranks that differ."""
        tree = self._tree
        return {
            "kernels": [repr(tree.node)],
            "points": tree.points,
            "hyperparameters": [self._noise, *tree.shapes, *tree.weights],
            "vectors": more,
        }


def views(flat: torch.Tensor, shapes: list[torch.Size]) -> list[torch.Tensor]:
    """Return views of the stretches of a vector in some shapes."""
    return [t.view(shape) for t, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]


def in_double(tree: Tree) -> Tree:
    """Return a tree of plain tensors in double precision, outside of autograd."""
    return tree.each(lambda t: t.detach().double())


def cholesky(matrix: torch.Tensor) -> torch.Tensor:
    """Return the lower factor of a matrix, or of each of a batch; raises UnfitError where one is not definite."""
    lower, info = torch.linalg.cholesky_ex(matrix)
    if info.any():
        raise UnfitError
    return lower
