"""Drift: whether a candidate that was measured to be faster still is. Some calls are timed beside stock while served.

Machines change: other neighbours, other clocks, a newer driver. A candidate that falls behind stock in several
successive checks gives way to it for the rest of the process; none is ever promoted in its place. Checks come at 1,000
calls of a key, 2,000, 4,000 and so on, sooner only under suspicion, so that they cost next to nothing.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from autokern.core.op import inside
from autokern.core.settings import Settings
from autokern.runtime.memo import NEVER, Entry, LargeEntry
from autokern.system import host, randomness
from autokern.tuning import timer
from autokern.tuning.trial import trial

__all__ = ["check", "due"]

_log = logging.getLogger("autokern")

_FIRST = 1000
"""Calls after which a key is checked."""
_SOON = 100
"""Calls after which it is checked again if it was behind."""
_BEHIND = 1.15
"""Times of stock's time from which a candidate is behind."""
_STRIKES = 3
"""Successive checks behind stock that end the service of a candidate."""
_SAMPLE = 5e-5
"""Seconds that one sample lasts at least."""


def due(entry: Entry, settings: Settings) -> int:
    """Return the call at which an entry is checked next: for a review of its decision, or for drift; else `NEVER`."""
    if entry.decision.review > entry.count:
        return entry.decision.review
    return max(_FIRST, 2 * entry.count) if _may_drift(entry, settings) else NEVER


def _may_drift(entry: Entry, settings: Settings) -> bool:
    """Whether a measurement chose the candidate, and stock could take its place and be timed without harm."""
    measured = entry.decision.source in ("measured", "interpolated", "extrapolated")
    harmless = not (isinstance(entry, LargeEntry) or entry.candidate.compiles)
    here = entry.decision.problem.device == "cpu"  # on a GPU the check would have to wait for all that is queued
    free = not settings.deterministic and settings.profile is None and not host.multi_rank()
    replaceable = entry.candidate is not entry.op.stock and "stock" not in entry.decision.excluded
    return measured and harmless and here and free and replaceable


def check(entry: Entry, args: tuple[Any, ...]) -> None:
    """Time the candidate of an entry beside stock on the arguments of a call; let stock serve if it fell behind."""
    behind = _ratio(entry, args) > _BEHIND
    entry.check_at(entry.count + _SOON if behind else 2 * entry.count)
    if entry.struck(behind) == _STRIKES:
        reason = f"{entry.candidate.name} was measured to be faster; in {_STRIKES} successive checks it was slower"
        _log.info("%s runs stock from now on: %s", entry.decision.problem, reason)
        entry.demote(entry.op.stock, reason, "measured")


def _ratio(entry: Entry, args: tuple[Any, ...]) -> float:
    """Return the time of the candidate over stock's, backward pass included; 0 where timing fails."""
    op, problem = entry.op, entry.decision.problem
    runs = {"stock": op.stock.run, "other": entry.candidate.run}
    before, inside.active = inside.active, True
    try:
        with randomness.untouched():
            calls = {name: trial(op, run, problem, args) for name, run in runs.items()}
            found = timer.compare(calls, min_time=_SAMPLE, rounds=(1, 1))
    except Exception:
        _log.debug("could not check %s for drift", problem, exc_info=True)
        return 0.0
    finally:
        inside.active = before
    ratio = found["other"].ratio
    return ratio if math.isfinite(ratio) else 0.0
