"""An op that only has a name, with candidates of every kind, its problems, timings of them, and profiles in a store."""

from collections.abc import Callable, Iterable
from typing import Any

from autokern.core.op import Op
from autokern.core.problem import Features, Problem
from autokern.core.settings import Settings
from autokern.system import host
from autokern.tuning import store
from autokern.tuning.chooser import fitted
from autokern.tuning.profile import Profile, Timing, Trial

SIZES = (16, 32, 64, 128, 256, 512, 1024)
Ratio = float | Callable[[int], float]


def square(n: int, op: str = "synthetic", tall: int = 1, **more: Any) -> Problem:
    return Problem(op=op, m=tall * n, n=n, **more)


def flops(problem: Problem) -> Features:
    return Features(calls=1, flops=float(problem.m * problem.n * problem.n))


def with_candidates(make_op: Any, **options: Any) -> Op:
    """An op whose stock takes flops, with candidates of every kind."""
    made = make_op("synthetic", features=flops, **options)
    for name in ("stock", "fast", "other"):
        made.candidate(name)(lambda a: a)
    made.candidate("exact", accuracy="better")(lambda a: a)
    made.candidate("sloppy", accuracy="approximate")(lambda a: a)
    made.candidate("slow-start", compiles=True)(lambda a: a)
    made.candidate("tall-only", unsupported=lambda p: None if p.m >= 2 * p.n else "not tall")(lambda a: a)
    return made


def seconds_of_stock(n: int) -> float:
    """A microsecond and 1e-11 seconds per flop."""
    return 1e-6 + 1e-11 * n**3


def timed(ratios: dict[str, float], seconds: float = 1e-3, noise: float = 0.005) -> dict[str, Timing]:
    """Timings of stock, which takes so many seconds, and of candidates by their ratios to it; `sloppy` is rough."""
    found = {"stock": Timing(seconds)}
    for name, r in ratios.items():
        found[name] = Timing(seconds * r, r, noise, 5, relative_error=1e-4 if name == "sloppy" else None)
    return found


def trials(ratios: dict[str, Ratio], sizes: Iterable[int] = SIZES, noise: float = 0.005, **more: Any) -> list[Trial]:
    """Trials of problems by ratios to stock: numbers, or functions of the size."""
    numbers = {n: {name: r(n) if callable(r) else r for name, r in ratios.items()} for n in sizes}
    return [Trial(square(n, **more), timed(found, seconds_of_stock(n), noise)) for n, found in numbers.items()]


def measured(ratios: dict[str, Ratio], *places: Any, **more: Any) -> Profile:
    """A profile of this host with such trials, and trees fitted to them."""
    here = host.current()
    known = Profile(host=here.fields, fingerprint=here.fingerprint, trials=trials(ratios, *places, **more))
    return fitted(known)


HOST = "0123456789abcdef" * 2


def profile(*sizes: int, fingerprint: str = HOST, **timing: float) -> Profile:
    """A profile of a made-up host, told by the sizes of its problems."""
    timings = {"stock": Timing(1e-3, **timing), "cpu": Timing(5e-4)}
    trials = [Trial(Problem(op="qr", m=n, n=n), timings) for n in sizes]
    return Profile(host={"cpu": "test"}, fingerprint=fingerprint, trials=trials, levels={"qr@cpu": "quick"})


def kept(settings: Settings, host: str = HOST) -> set[int] | None:
    """The sizes in the profile that is loaded."""
    found = store.load(settings, host)
    return found and {trial.problem.n for trial in found.trials}
