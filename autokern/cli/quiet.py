"""Quiet: before `autokern calibrate` measures, it waits for a while if other programs use the cores, and says so.

Waiting takes a share of the budget. After a calibration on a busy machine, the measurements are judged; if they cannot
be trusted, the command exits with status 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from autokern.system import threads
from autokern.system.load import Load, Watch
from autokern.tuning.profile import Profile, Trial

_SHARE, _LONGEST = 0.25, 60.0
"""Largest part of the budget, and most seconds, that waiting takes."""
_LOOK, _STEP = 0.25, 1.0
"""Seconds of the first reading of the load, and of each further one."""


def look(seconds: float = _LOOK) -> Load:
    """Measure for so many seconds how busy other programs keep the cores."""
    watch = Watch()
    time.sleep(seconds)
    return watch.reading()


def wait(budget: float, waits: bool, say: Callable[[str], object]) -> float:
    """Wait for other programs to leave the cores, at most a quarter of the budget or a minute; return the rest."""
    began, count = time.perf_counter(), threads.current()
    found = look(min(_LOOK, 0.1 * budget))
    if not found.crowded(count):
        return budget
    most = min(_LONGEST, _SHARE * budget)
    if waits:
        say(f"{found}; waiting up to {most:.0f} s for quiet (--no-wait measures at once)")
        while time.perf_counter() - began < most:
            if not look(min(_STEP, most)).crowded(count):
                return budget - (time.perf_counter() - began)
    say(f"{found}; measuring with what is free: what is disturbed too much is not kept")
    return budget - (time.perf_counter() - began)


def verdict(before: Profile, after: Profile, ops: Collection[str] | None, found: Load) -> tuple[str, bool]:
    """Judge a calibration by the load during it; `before` and `after` are the profiles.

    Return a message to the user, empty if the machine was quiet, and whether the ops' measurements can be trusted.
    """
    if not found.crowded(threads.current()):
        return "", True
    known = {trial.problem: trial for trial in before.trials}
    own = [trial for trial in after.trials if ops is None or trial.problem.op in ops]
    new = [trial for trial in own if trial != known.get(trial.problem)]
    told = f"meanwhile {found}: {len(new)} problems measured, {sum(t.disturbed for t in new)} disturbed; "
    told += "`autokern calibrate` measures again when the machine is quiet"
    trusted = bool(own) and not disturbed(new or own)
    return told if trusted else f"nothing trustworthy was measured: {told}", trusted


def disturbed(trials: Sequence[Trial]) -> bool:
    """Whether other programs disturbed more than a third of the trials."""
    return 3 * sum(trial.disturbed for trial in trials) > len(trials)
