"""The interface of preconditioners: a factor of an approximate inverse, its log determinant and their gradients."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

import torch

from autokern.kernels.tree import Tree


class UnfitError(Exception):
    """A preconditioner cannot be computed for a matrix."""


class Gradients(NamedTuple):
    """Gradients by the noise of each point, ``(n,)``, and by the tensors of a tree, in the order of `parts.apart`."""

    noise: torch.Tensor
    tensors: list[torch.Tensor]


class Probed(NamedTuple):
    """Probes ``w`` and their products and solutions, each of shape ``(n, t)``."""

    w: torch.Tensor  # independent random signs
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
        """Return the gradients of ``log |K|`` less the mean of ``(S u)^T dK (S w)`` over the probes.

        The sum of both is an unbiased estimate, whose variance vanishes as M approaches the identity.
        """

    def _data(self, *more: torch.Tensor) -> dict[str, Sequence[torch.Tensor | str]]:
        """Return the inputs that ranks must agree on, by the names that the error about a difference uses."""
        tree = self._tree
        return {
            "kernels": [repr(tree.node)],
            "points": tree.points,
            "hyperparameters": [self._noise, *tree.shapes, *tree.weights],
            "vectors": more,
        }


def views(flat: torch.Tensor, shapes: list[torch.Size]) -> list[torch.Tensor]:
    """Return consecutive parts of a vector as views of these shapes."""
    return [t.view(shape) for t, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]


def in_double(tree: Tree) -> Tree:
    """Return a tree with its tensors detached and in double precision."""
    return tree.each(lambda t: t.detach().double())


def cholesky(matrix: torch.Tensor) -> torch.Tensor:
    """Return the lower factor of a matrix or batch; raises UnfitError if one is not positive definite."""
    lower, info = torch.linalg.cholesky_ex(matrix)
    if info.any():
        raise UnfitError
    return lower
