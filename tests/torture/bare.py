"""The store without the rest of the package, which brings torch along: for tortures of thousands of processes."""

from __future__ import annotations

import importlib.util
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


def at(home: Path) -> Settings:
    """Settings with a home."""
    return Settings(home=home)


def saved(home: Path, *sizes: int) -> Path | None:
    """Save a profile with one trial for each size, warnings of trouble left aside; return its file."""
    timings = {"stock": Timing(1e-3), "cpu": Timing(5e-4)}
    trials = [Trial(Problem(op="qr", m=n, n=n), timings) for n in sizes]
    store._reported.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return store.save(at(home), Profile(fingerprint=HOST, trials=trials, levels={"qr@cpu": "quick"}))


def kept(home: Path) -> set[int]:
    """Sizes of the trials of the profile that is kept; empty if there is none."""
    found = store.load(at(home), HOST)
    return set() if found is None else {trial.problem.n for trial in found.trials}
