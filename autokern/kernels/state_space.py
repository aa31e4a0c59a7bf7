"""One-dimensional Matérn kernels as Markov chains (Hartikainen and Särkkä 2010).

The state of a leaf is the process and its derivatives by the distance ``a = sqrt(2 nu) |z - z'|``. Its feedback matrix
``F`` has the only eigenvalue -1, so the transition is ``exp(F a) = exp(-a) (I + N a + N^2 a^2 / 2)``, ``N = F + I``.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch

from autokern.kernels.tree import Node

_FEEDBACK = {
    "matern12": [[-1.0]],
    "matern32": [[0.0, 1.0], [-1.0, -2.0]],
    "matern52": [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [-1.0, -3.0, -3.0]],
}
_STATIONARY = {
    "matern12": [[1.0]],
    "matern32": [[1.0, 0.0], [0.0, 1.0]],
    "matern52": [[1.0, 0.0, -1 / 3], [0.0, 1 / 3, 0.0], [-1 / 3, 0.0, 1.0]],
}


class Leaf(NamedTuple):
    """A leaf of a sum: its family, and the indices of the weights that multiply it."""

    family: str
    weights: tuple[int, ...]


def leaves_of(node: Node) -> list[Leaf] | None:
    """Return the leaves of a tree of sums and scales over Matérn families, None for any other tree."""
    numbers = itertools.count()

    def collect(node: Node, above: tuple[int, ...]) -> list[Leaf] | None:
        if node.kind == "leaf":
            return [Leaf(node.family, above)] if node.family in _FEEDBACK else None
        if node.kind == "scale":
            return collect(node.children[0], (*above, next(numbers)))
        if node.kind != "sum":
            return None
        parts = [collect(child, above) for child in node.children]
        return None if None in parts else [leaf for part in parts for leaf in part or ()]

    return collect(node, ())


class Chain(NamedTuple):
    """The Markov chain of a family."""

    order: int  # size of the state
    feedback: torch.Tensor  # ``F``, ``(order, order)``
    powers: torch.Tensor  # ``I, N, N^2 / 2``, ``(3, order, order)``
    stationary: torch.Tensor  # covariance of the state

    def transition(self, a: torch.Tensor) -> torch.Tensor:
        """Return ``exp(F a)``, shape ``(..., order, order)``."""
        return self._decayed(a, self.powers.flatten(1)).unflatten(-1, (self.order, self.order))

    def seen(self, a: torch.Tensor) -> torch.Tensor:
        """Return the first row of ``exp(F a)``, the process's coefficients by a state before it, ``(..., order)``."""
        return self._decayed(a, self.powers[:, 0])

    def ahead(self, a: torch.Tensor) -> torch.Tensor:
        """Return the covariances of the process with a state after it, ``(..., order)``."""
        return self._decayed(a, self.powers @ self.stationary[0])

    def _decayed(self, a: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
        a = a.unsqueeze(-1)
        polynomial = powers[0] + a * powers[1]
        if self.order > 2:
            polynomial = polynomial + a * a * powers[2]
        return (-a).exp() * polynomial

    def correlation(self, a: torch.Tensor) -> torch.Tensor:
        """Return the correlation of the process at distances `a`."""
        decay = a.neg().exp_()
        if self.order == 1:
            return decay
        if self.order == 2:
            return (a + 1) * decay
        return torch.addcmul(a, a, a, value=1 / 3).add_(1) * decay

    def with_slope(self, difference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return correlations at signed differences, and their derivatives, 0 at distance 0; not differentiable."""
        a = difference.abs()
        decay = a.neg().exp_()
        if self.order == 1:
            return decay, difference.sign_().mul_(decay).neg_()
        if self.order == 2:
            return torch.addcmul(decay, a, decay), difference.mul_(decay).neg_()
        slope = torch.addcmul(difference, difference, a).mul_(decay).mul_(-1 / 3)
        return torch.addcmul(a, a, a, value=1 / 3).add_(1).mul_(decay), slope


@functools.cache
def chain(name: str) -> Chain:
    """Return the chain of a family, on the CPU in double precision."""
    like = {"dtype": torch.float64, "device": "cpu"}
    feedback = torch.tensor(_FEEDBACK[name], **like)  # type: ignore[arg-type]
    order = len(feedback)
    unit = torch.eye(order, **like)  # type: ignore[call-overload]
    nilpotent = feedback + unit
    powers = torch.stack([unit, nilpotent, nilpotent @ nilpotent / 2])
    return Chain(order, feedback, powers, torch.tensor(_STATIONARY[name], **like))  # type: ignore[arg-type]
