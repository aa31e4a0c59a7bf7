"""Drift: whether what was measured to be faster still is. Now and then a call is timed beside stock while it is served.

Machines change: other neighbours, other clocks, a newer driver. What falls behind stock several times running gives way
to it for the rest of the process; nothing is ever promoted in its place. Checks come at 1,000 calls of a key, 2,000,
4,000 and so on, sooner only under suspicion, so that they cost next to nothing.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import msgspec

from autokern.core.op import Op, inside
from autokern.core.settings import Settings
from autokern.runtime.memo import NEVER, Entry, LargeEntry
from autokern.system import host, randomness
from autokern.tuning import timer

__all__ = ["check", "schedule"]

_log = logging.getLogger("autokern")

_FIRST = 1000
"""Calls after which a key is looked at."""
_SOON = 100
"""Calls after which it is looked at again if it was behind."""
_BEHIND = 1.15
"""Times of stock's from which a candidate is behind."""
_STRIKES = 3
"""Checks running in which a candidate was behind that end its service."""
_SAMPLE = 5e-5
"""Seconds that one sample lasts at least."""


def schedule(entry: Entry, op: Op, settings: Settings) -> None:
    """Set the call at which an entry is looked at next, if it is at all: by its decision's word, or for drift."""
    if entry.decision.review > entry.count:
        entry.due = entry.decision.review
    elif _may_drift(entry, op, settings):
        entry.due = max(_FIRST, 2 * entry.count)
    else:
        entry.due = NEVER


def _may_drift(entry: Entry, op: Op, settings: Settings) -> bool:
    """Whether a measurement chose the candidate, and stock could take its place and be timed without harm."""
    measured = entry.decision.source in ("measured", "interpolated", "extrapolated")
    harmless = not (isinstance(entry, LargeEntry) or entry.candidate.compiles)
    here = entry.decision.problem.device == "cpu"  # on a GPU the check would have to wait for all that is queued
    free = not settings.deterministic and settings.profile is None and not host.multi_rank()
    replaceable = entry.candidate is not op.stock and "stock" not in entry.decision.excluded
    return measured and harmless and here and free and replaceable


def check(entry: Entry, op: Op, args: tuple[Any, ...]) -> None:
    """Time the candidate of an entry beside stock on the arguments of a call; let stock serve if it fell behind."""
    ratio = _ratio(entry, op, args)
    entry.strikes = entry.strikes + 1 if ratio > _BEHIND else 0
    entry.due = entry.count + _SOON if entry.strikes else 2 * entry.count
    if entry.strikes == _STRIKES:
        reason = f"{entry.candidate.name} was measured to be faster once; in {_STRIKES} checks running it was not"
        _log.info("%s runs stock from now on: %s", entry.decision.problem, reason)
        entry.demote(op.stock)
        entry.decision = msgspec.structs.replace(
            entry.decision, candidate="stock", reason=reason, source="measured", margin=1.0, uncertainty=0.0
        )


def _ratio(entry: Entry, op: Op, args: tuple[Any, ...]) -> float:
    """Return the time of the candidate over stock's, backward pass included; 0 where that cannot be told."""
    problem, runs = entry.decision.problem, {"stock": op.stock.run, "other": entry.candidate.run}
    before, inside.active = inside.active, True

    try:
        with randomness.untouched():
            calls = {name: op.trial(run, problem, args) for name, run in runs.items()}
            found = timer.compare(calls, min_time=_SAMPLE, rounds=(1, 1))
    except Exception:
        _log.debug("could not look at %s", problem, exc_info=True)
        return 0.0
    finally:
        inside.active = before
    ratio = found["other"].ratio
    return ratio if math.isfinite(ratio) else 0.0
