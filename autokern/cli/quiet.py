"""Quiet: a calibration from the command line notices that others use the cores, says so, and waits for a while.

Waiting takes a share of the budget. What is measured on a busy machine is judged, and a run of which nothing can be
trusted ends with a finding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Container, Iterable, Sequence

from autokern.core.registry import get, registered
from autokern.system import threads
from autokern.system.load import Load, Watch
from autokern.tuning.calibration import DTYPES
from autokern.tuning.drawing import measurable
from autokern.tuning.profile import ENOUGH, Profile, Timing, Trial, group_key

_SHARE, _LONGEST = 0.25, 60.0
"""Part of the budget, and most seconds, that waiting takes."""
_LOOK, _STEP = 0.25, 1.0
"""Seconds of the first look at the machine, and of each further one."""
_NOISY = 0.2
"""Standard error of the log ratio of the fastest candidate, median over trials: that of a single round is 0.25."""


def look(seconds: float = _LOOK) -> Load:
    """Return how busy others keep the cores, after so many seconds."""
    watch = Watch()
    time.sleep(seconds)
    return watch.reading()


def wait(budget: float, waits: bool, say: Callable[[str], object]) -> float:
    """Wait until others leave the cores, for a quarter of a budget and a minute at most; return what is left of it."""
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


def verdict(before: Profile, after: Profile, ops: Iterable[str] | None, found: Load) -> tuple[str, bool]:
    """Judge a calibration during which the machine was so busy.

    Return what the user should know, empty where it was quiet, and whether any group that was measured can be trusted,
    or nothing was left to measure.
    """
    if not found.crowded(threads.current()):
        return "", True
    names = {op.name for op in registered()} if ops is None else set(ops)
    known = {trial.problem: trial for trial in before.trials}
    groups: dict[tuple[str, str, str], list[Trial]] = {}
    for trial in after.trials:
        groups.setdefault(trial.problem.group, []).append(trial)
    settled = {
        group: of
        for group, of in groups.items()
        if (len(of) >= ENOUGH or group_key(*group) in after.levels) and not disturbed(of)
    }
    new = [t for t in after.trials if t.problem.op in names and t != known.get(t.problem)]
    if not new and all(_is_known(name, groups, settled) for name in names):
        return f"nothing was left to measure; meanwhile {found}", True
    told = f"meanwhile {found}: {len(new)} problems measured, {sum(t.disturbed for t in new)} disturbed; "
    told += "`autokern calibrate` measures again when the machine is quiet"
    good = {group for group, of in settled.items() if statistics.median(map(_noise, of)) <= _NOISY}
    if any(trial.problem.group in good for trial in new):
        return told, True
    return f"nothing trustworthy was measured: {told}", False


def disturbed(trials: Sequence[Trial]) -> bool:
    """Whether others disturbed more than a third of some trials."""
    return 3 * sum(trial.disturbed for trial in trials) > len(trials)


def _is_known(name: str, groups: Iterable[tuple[str, str, str]], settled: Container[tuple[str, str, str]]) -> bool:
    """Whether all groups of an op were measured often enough and undisturbed, or it leaves no choice."""
    if there := [group for group in groups if group[0] == name]:
        return all(group in settled for group in there)
    op = get(name)
    return all(len(measurable(op, problem, "quick")) < 2 for d in DTYPES for problem in op.grid("quick", d, "cpu"))


def _noise(trial: Trial) -> float:
    """Return the standard error of the log ratio of the fastest candidate."""
    others = (timing for name, timing in trial.timings.items() if name != "stock")
    return min(others, key=lambda timing: timing.ratio, default=Timing(1.0)).noise
