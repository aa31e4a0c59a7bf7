"""Quiet: whether other programs use the cores, and whether what a calibration measured beside them can be trusted."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from autokern.system import threads
from autokern.system.load import Load, Watch
from autokern.tuning.profile import Profile, Trial

_LOOK = 0.25
"""Seconds in which the load is read."""


def look() -> Load:
    """Measure how busy other programs keep the cores."""
    watch = Watch()
    time.sleep(_LOOK)
    return watch.reading()


def warn(say: Callable[[str], object]) -> None:
    """Say so if other programs use the cores."""
    if (found := look()).crowded(threads.current()):
        say(f"{found}; measuring with what is free: what is disturbed too much is not kept")


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
