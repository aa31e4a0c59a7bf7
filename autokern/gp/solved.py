"""To what residual large systems are solved; how they were is noted in `core.solved`."""

from __future__ import annotations

import torch
from linear_operator import settings as library

__all__ = ["LONGEST", "TOLERANCE", "tolerance"]

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
"""The relative residual to which systems are solved, unless the library's own setting is tighter."""
LONGEST = 200
"""Products after which nothing is expected of a preconditioner."""


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative residual to reach now."""
    return float(min(TOLERANCE[dtype], library.cg_tolerance.value()))
