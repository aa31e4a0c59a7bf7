"""Drift: whether a candidate that was measured to be faster still is. Some calls are timed beside stock while served.

Machines change: other neighbours, other clocks, a newer driver. A candidate that falls behind stock in several
successive checks gives way to it for the rest of the process; none is ever promoted in its place. Checks come at 1,000
calls of a key, 2,000, 4,000 and so on, sooner only under suspicion, so that they cost next to nothing.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from autokern.core.settings import Settings
from autokern.runtime import beside
from autokern.runtime.memo import NEVER, Entry, LargeEntry
from autokern.system import host
from autokern.tuning import timer

__all__ = ["check", "due", "is_due"]

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


def is_due(entry: Entry) -> bool:
    """Whether an entry has served so often that it is checked."""
    return entry.count >= _FIRST


def _may_drift(entry: Entry, settings: Settings) -> bool:
    """Whether a measurement, here or elsewhere, chose the candidate, and stock could take its place without harm."""
    measured = entry.decision.source in ("learnt", "measured", "interpolated", "extrapolated", "other hosts")
    harmless = not (isinstance(entry, LargeEntry) or entry.candidate.compiles)
    here = entry.decision.problem.device == "cpu"  # on a GPU the check would have to wait for all that is queued
    free = not settings.deterministic and settings.profile is None and not host.multi_rank()
    replaceable = entry.candidate is not entry.op.stock and "stock" not in entry.decision.excluded
    return measured and harmless and here and free and replaceable


def check(entry: Entry, args: tuple[Any, ...], settings: Settings) -> bool:
    """Time the candidate of an entry beside stock on the arguments of a call; let stock serve if it fell behind.

    Returns
    -------
    bool
        Whether stock serves from now on.
    """
    behind = _ratio(entry, args, settings) > _BEHIND * _allowed(entry)
    entry.check_at(entry.count + _SOON if behind else 2 * entry.count)
    demoted = entry.struck(behind) == _STRIKES
    if demoted:
        reason = f"{entry.candidate.name} was measured to be faster; in {_STRIKES} successive checks it was slower"
        _log.info("%s runs stock from now on: %s", entry.decision.problem, reason)
        entry.demote(entry.op.stock, reason, "measured")
    return demoted


def _allowed(entry: Entry) -> float:
    """Return how many times stock's time the candidate of an entry may take."""
    return entry.op.may_cost(entry.decision.problem) if entry.candidate.accuracy == "better" else 1.0


def _ratio(entry: Entry, args: tuple[Any, ...], settings: Settings) -> float:
    """Return the time of the candidate over stock's, backward pass included; 0 where timing fails."""
    op, problem, name = entry.op, entry.decision.problem, entry.candidate.name
    if not beside.harmless(args):
        return 0.0
    try:
        with beside.unseen(settings, args):
            found = timer.compare(beside.trials(op, problem, ["stock", name], args), min_time=_SAMPLE, rounds=(1, 1))
    except Exception:
        _log.debug("could not check %s for drift", problem, exc_info=True)
        return 0.0
    ratio = found[name].ratio
    return ratio if math.isfinite(ratio) else 0.0
