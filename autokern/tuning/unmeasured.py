"""Unmeasured: whether a default candidate may run on what is counted of it, without a measurement of its own. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autokern.core.op import Op
from autokern.core.problem import Problem
from autokern.tuning.cost_model import Estimate

__all__ = ["is_little", "unheard"]

_LITTLE = 10.0
"""How much less work than stock a default candidate must do to run unmeasured where others are measured."""


def is_little(op: Op, name: str, problem: Problem) -> bool:
    """Whether a candidate does so little of stock's work that it needs no measurement."""
    own, stock = (candidate.features(problem) for candidate in (op[name], op.stock))
    return _LITTLE * (own.flops + own.bytes) <= stock.flops + stock.bytes


def unheard(name: str, estimates: Mapping[str, Estimate], far: float = math.inf) -> bool:
    """Whether nothing was measured here nearer than `far`, and nothing of this candidate anywhere."""
    return name not in estimates and all(e.distance >= far for e in estimates.values())
