"""The store without the rest of the package, which brings torch along: for tortures of thousands of processes."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import types
import warnings
from pathlib import Path

if "autokern" not in sys.modules:
    _found = importlib.util.find_spec("autokern")
    assert _found is not None
    _package = types.ModuleType("autokern")
    _package.__path__ = list(_found.submodule_search_locations or [])
    sys.modules["autokern"] = _package

from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.tuning import store
from autokern.tuning.profile import Profile, Timing, Trial

HOST = "0123456789abcdef" * 2
OLD, NEW = {8, 16}, {16, 32}
"""Sizes in the profile that is kept, and in the one that is published."""


def at(home: Path) -> Settings:
    """Settings with a home."""
    return Settings(home=home)


def profile(*sizes: int, fingerprint: str = HOST, seconds: float = 1e-3) -> Profile:
    """A profile with one trial for each size."""
    trials = [Trial(Problem(op="qr", m=n, n=n), {"stock": Timing(seconds), "cpu": Timing(seconds / 2)}) for n in sizes]
    return Profile(host={"cpu": "test"}, fingerprint=fingerprint, trials=trials, levels={"qr@cpu": "quick"})


def sizes(found: Profile | None) -> set[int]:
    """Sizes of the trials of a profile; empty if there is none."""
    return set() if found is None else {trial.problem.n for trial in found.trials}


def saved(home: Path, wanted: Profile) -> Path | None:
    """Save a profile, warnings of trouble left aside."""
    store._reported.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return store.save(at(home), wanted)


def leftovers(home: Path, suffix: str) -> list[str]:
    """Names in a home that end so."""
    return sorted(path.name for path in home.iterdir() if path.name.endswith(suffix)) if home.is_dir() else []


class Rewritten:
    """A home in a folder that is as it was before every publish; what is in `before` it begins with."""

    def __init__(self, folder: Path) -> None:
        self.before, self.home = folder / "before", folder / "home"

    def restore(self) -> None:
        """Put it back as it was."""
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.copytree(self.before, self.home)

    def publish(self) -> int:
        """Publish `NEW`; return an exit status."""
        return 0 if saved(self.home, profile(*NEW)) else 1

    def held(self) -> set[int]:
        """Sizes in the profile that is kept."""
        return sizes(store.load(at(self.home), HOST))

    def next_publish(self) -> set[int] | None:
        """Publish once more; return what is kept then beyond what was, or None if nothing could be written."""
        kept = self.held()
        return None if saved(self.home, profile(64)) is None else self.held() ^ kept
