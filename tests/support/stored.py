"""Profiles of a made-up host that tests keep in a store, told by the sizes of their problems."""

from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.tuning import store
from autokern.tuning.profile import Profile, Timing, Trial

HOST = "0123456789abcdef" * 2


def profile(*sizes: int, fingerprint: str = HOST, **timing: float) -> Profile:
    timings = {"stock": Timing(1e-3, **timing), "cpu": Timing(5e-4)}
    trials = [Trial(Problem(op="qr", m=n, n=n), timings) for n in sizes]
    return Profile(host={"cpu": "test"}, fingerprint=fingerprint, trials=trials, levels={"qr@cpu": "quick"})


def kept(settings: Settings, host: str = HOST) -> set[int] | None:
    """The sizes in the profile that is loaded."""
    found = store.load(settings, host)
    return found and {trial.problem.n for trial in found.trials}
