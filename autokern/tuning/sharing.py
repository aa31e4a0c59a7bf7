"""Sharing: what of a profile goes into a file for others, and what comes in from one.

A file holds the description of its host, timings and bans. Results of trying tools stay behind, for they may name
paths.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from autokern.core.errors import ProfileError
from autokern.core.registry import registered
from autokern.core.settings import Settings
from autokern.system.host import fingerprint_of
from autokern.tuning import store
from autokern.tuning.profile import Profile, Timing, Trial

__all__ = ["Import", "absorb", "judged", "shareable"]


class Import(msgspec.Struct, frozen=True):
    """What became of a file.

    Parameters
    ----------
    file : str
        The file.
    kept_in : str
        The profile that it was added to.
    fingerprint, cpu : str
        The host that was measured.
    own : bool
        Whether that is this host, so that the measurements are in force; else they are a prior.
    problems, new : int
        Number of its problems, and of those that were not known.
    """

    file: str
    kept_in: str
    fingerprint: str
    cpu: str
    own: bool
    problems: int
    new: int


def shareable(profile: Profile, ops: Collection[str] | None = None) -> Profile:
    """Return what of a profile others can use, with times of five digits; of all ops or of some."""
    for op in {trial.problem.op for trial in profile.trials} | {op.name for op in registered()}:
        profile = profile if ops is None or op in ops else profile.without(op)
    trials = [Trial(t.problem, {name: _rounded(timing) for name, timing in t.timings.items()}) for t in profile.trials]
    return msgspec.structs.replace(profile, trials=trials, tools={}, fruitless={})


def _rounded(timing: Timing) -> Timing:
    seconds, ratio, noise = (float(f"{x:.5g}") for x in (timing.seconds, timing.ratio, timing.noise))
    error, relative = float(f"{timing.error:.3g}"), timing.relative_error
    relative = relative if relative is None else float(f"{relative:.3g}")
    return Timing(seconds, ratio, noise, timing.rounds, error, relative)


def judged(path: Path) -> Profile:
    """Return the profile in a file that came from elsewhere.

    Raises
    ------
    ProfileError
        If the file cannot be read, holds no measurements, or does not tell what they were made on.
    """
    profile, fault = store.read_file(path), ""
    if not profile.trials:
        fault = "it holds no measurements"
    elif not profile.host or profile.fingerprint != fingerprint_of(profile.host):
        fault = "its fingerprint is not that of the machine it describes"
    if fault:
        advice = "Export it again on the machine that was measured: `autokern profile export FILE`"
        raise ProfileError(f"asked to import {path}; found: {fault}. {advice}")
    return profile


def absorb(settings: Settings, profile: Profile, path: Path, fingerprint: str) -> Import:
    """Add the measurements of a file to the profile of their host in the home folder; what is known there stays.

    Raises
    ------
    ProfileError
        If the home folder cannot be read or written.
    """
    strict = msgspec.structs.replace(settings, strict=True)
    known = store.load(settings, profile.fingerprint)
    there = {trial.problem for trial in known.trials} if known is not None else set()
    kept_in = store.save(strict, msgspec.structs.replace(profile, tools={}, fruitless={}), kept_wins=True)
    cpu = profile.host.get("cpu")
    return Import(
        file=str(path),
        kept_in=str(kept_in),
        fingerprint=profile.fingerprint,
        cpu=str(cpu.get("model", "")) if isinstance(cpu, dict) else "",
        own=profile.fingerprint == fingerprint,
        problems=len(profile.trials),
        new=len({trial.problem for trial in profile.trials} - there),
    )
