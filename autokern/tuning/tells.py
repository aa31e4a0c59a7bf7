"""What other hosts tell: the protocol of their predictions, and how alike they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.tuning.residuals import Array, Posterior

__all__ = ["Kin", "KinOf", "Tells", "alone"]


class Tells(Protocol):
    """What predicts for another host: a `CostModel` of its profile, or the fits that the package ships."""

    def told(self, op: Op, candidate: Candidate, problems: Sequence[Problem], places: Array) -> Posterior | None:
        """Return the posterior on problems of one pool, or None of a candidate that was not measured."""

    def wins(self, op: str, device: str, name: str) -> list[bool]:
        """Return, for each trial of a candidate, whether it was as fast as any within what could be measured."""


class Kin(NamedTuple):
    """What predicts for another host, and how alike it is: from 0, nothing in common, to 1, equal."""

    model: Tells
    likeness: float


KinOf = Callable[[str], Sequence[Kin]]
"""Maps a kind of device to the other hosts that tell something about it."""


def alone(device: str) -> Sequence[Kin]:
    """Return no other host."""
    return ()
