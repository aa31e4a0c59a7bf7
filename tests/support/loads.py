"""Machines that are as busy as a test says, whatever this one is."""

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest

from autokern.system.load import Snapshot, Waited

_now = SimpleNamespace(seconds=0.0, busy=0.0, others=0.0)


def _read() -> Snapshot:
    """Return counters that are a second further than those of the last reading."""
    _now.seconds += 1.0
    _now.busy += _now.others
    return Snapshot(_now.seconds, 2, _now.busy, 0.0)


def busy(others: float) -> None:
    """Let others use so many of two cores from now on; the next test begins on a quiet machine."""
    _now.others = others


def quiet(patch: pytest.MonkeyPatch) -> None:
    """Let nobody use the cores, and no sample be disturbed."""
    busy(0.0)
    patch.setattr("autokern.system.load.snapshot", _read)
    patch.setattr("autokern.tuning.timer.Waited", functools.partial(Waited, Path("/nowhere")))
