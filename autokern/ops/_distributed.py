"""The candidate ``distributed`` of `kernel_matmul`: tiles dealt to the ranks of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autokern.core.op import Op, inside
from autokern.core.problem import Problem
from autokern.kernels import embedded as forms
from autokern.kernels import matmul as products
from autokern.kernels import over_ranks
from autokern.kernels.partition import usual
from autokern.ops._product_costs import features_with, in_tiles, is_same, of_outputs
from autokern.ops._shared import needs_few
from autokern.system import ranks

__all__ = ["NAME", "is_default", "register"]

NAME = "distributed"


def _unsupported(problem: Problem) -> str | None:
    if problem.device != "cpu":
        return "for the CPU"
    if problem.m * problem.n < over_ranks.LEAST:
        return f"for matrices of {over_ranks.LEAST} elements or more"
    return needs_few(problem)


def _unavailable(device: str) -> str | None:
    if inside.measuring:
        return "it is not measured by itself: its time follows from that of tiles, and from the links"
    return None if ranks.active() else "this process shares its work with no other rank (AUTOKERN_RANKS)"


def _memory(problem: Problem) -> int:
    return in_tiles(usual(torch.device("cpu")).tile)(problem) + of_outputs(problem)


def _derived(problem: Problem, others: Mapping[str, float]) -> float | None:
    """Return the seconds that ranks take, by those of tiles on one."""
    here, alone = ranks.active(), others.get("tiled-symmetric" if is_same(problem) else "tiled")
    if here is None or alone is None:
        return None
    return over_ranks.seconds(here, alone, problem.m * problem.rhs * problem.itemsize, problem.batch)


def register(op: Op) -> None:
    """Register the candidate."""

    @op.candidate(
        NAME,
        unsupported=_unsupported,
        unavailable=_unavailable,
        memory=_memory,
        features=features_with(2, True),
        derived=_derived,
    )
    def distributed(kernel: Any, x1: torch.Tensor, x2: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
        """Tile by tile, each rank of a job its part of the tiles, and one all-reduce."""
        return products.matmul(*forms.both(kernel, x1, x2), rhs, usual(x1.device), over_ranks.product)


def is_default(problem: Problem) -> bool:
    """Whether the candidate serves while nothing is measured."""
    here = ranks.active()
    if here is None or _unsupported(problem) is not None or inside.measuring:
        return False
    return over_ranks.pays(here, problem.m * problem.n, problem.m * problem.rhs * problem.itemsize)
