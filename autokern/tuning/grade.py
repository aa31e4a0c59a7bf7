"""Grades: how far the measurements of a group can be trusted, from what a profile holds of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import msgspec

from autokern.tuning.profile import ENOUGH, Profile, Timing, Trial, group_key

__all__ = ["GRADES", "WORTHLESS", "Grade", "grades", "trusted"]

GRADES = {
    "good": "measured quietly, and often enough",
    "noisy": "the times scatter, or were taken in one round each",
    "disturbed": "other programs used the cores meanwhile",
    "few": "too few problems were measured to count as known",
}
"""The grades, best first, and their meaning."""

WORTHLESS = 0.3
"""Share of waiting for a core above which a timing is not kept."""
_MANY_DISTURBED = 1 / 3
_NOISY = 0.2
"""Standard error of the log ratio of the best candidate, median over trials: that of a single round is 0.25."""


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """How far the measurements of one op, dtype and device can be trusted.

    Parameters
    ----------
    grade : str
        One of `GRADES`.
    problems, disturbed : int
        Number of problems measured, and of those among them that were disturbed.
    noise : float
        Median over them of the standard error of the log ratio of the fastest candidate to stock.
    """

    grade: str
    problems: int
    disturbed: int
    noise: float


def trusted(timings: Mapping[str, Timing]) -> dict[str, Timing]:
    """Return the timings that tell something: none where stock itself was disturbed, or no other is left."""
    kept = {name: t for name, t in timings.items() if t.disturbed <= WORTHLESS}
    return kept if "stock" in kept and len(kept) > 1 else {}


def grades(profile: Profile) -> dict[str, Grade]:
    """Return the grade of each op, dtype and device, by ``"op/dtype@device"``."""
    groups: dict[str, list[Trial]] = {}
    for trial in profile.trials:
        groups.setdefault(group_key(*trial.problem.group), []).append(trial)
    return {key: _grade(trials, key in profile.levels) for key, trials in sorted(groups.items())}


def _grade(trials: list[Trial], complete: bool) -> Grade:
    disturbed = sum(trial.disturbed for trial in trials)
    noise = statistics.median(map(_noise, trials))
    word = "good"
    if len(trials) < ENOUGH and not complete:
        word = "few"
    elif disturbed > _MANY_DISTURBED * len(trials):
        word = "disturbed"
    elif noise > _NOISY:
        word = "noisy"
    return Grade(grade=word, problems=len(trials), disturbed=disturbed, noise=noise)


def _noise(trial: Trial) -> float:
    others = [t for name, t in trial.timings.items() if name != "stock"]
    return min(others, key=lambda t: t.ratio).noise if others else 0.0
