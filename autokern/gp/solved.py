"""To what residual large systems are solved, and how the last one was: written where systems are solved, by thread."""

from __future__ import annotations

import dataclasses
import threading

import torch
from linear_operator import settings as library

__all__ = ["TOLERANCE", "Solved", "latest", "note", "tolerance"]

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
"""The relative residual to which systems are solved, unless the library's own setting is tighter."""


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative residual to reach now."""
    return float(min(TOLERANCE[dtype], library.cg_tolerance.value()))


@dataclasses.dataclass(frozen=True)
class Solved:
    """How a system was solved.

    Parameters
    ----------
    residual : float
        The relative residual that was reached, of all columns.
    iterations : int
        Products with the matrix until then.
    preconditioner : str
        Name of the preconditioner.
    columns : int
        Probes that were solved together with the targets.
    standard_error : float
        Of the log density, by the differences between probes; infinite with a single probe.
    """

    residual: float
    iterations: int
    preconditioner: str
    columns: int
    standard_error: float


_own = threading.local()


def note(found: Solved) -> None:
    """Keep a record as this thread's last one."""
    _own.latest = found


def latest() -> Solved | None:
    """Return the record of the last system that this thread solved to a stated residual, or None."""
    found: Solved | None = getattr(_own, "latest", None)
    return found
