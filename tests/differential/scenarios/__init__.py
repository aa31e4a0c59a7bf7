"""Scenarios by theme; importing this fills the table."""

from scenarios import (  # noqa: F401
    contracts,
    events,
    fantasies,
    inplace,
    kernels,
    late,
    matrices,
    models,
    modes,
    numerics,
    predictions,
    training,
)
