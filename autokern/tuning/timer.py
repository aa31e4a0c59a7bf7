"""Honest timing: candidates take turns, every time is paired with stock's of the same round, and noise is reported.

Identical functions timed one after the other differ by more than 5 % most of the time, because machines drift. Taking
turns and comparing within a round removes the drift that both share.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from autokern.tuning.profile import Timing

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows has no such count
    resource = None

_HOPELESS = 1.6
"""A candidate this many times slower than the best is not timed further."""
_ABSURD = 3.0
"""A candidate this many times slower than the reference is timed once."""
_TRIES = 3
"""Times that a disturbed sample is taken."""
_LONGEST = 0.02
"""Seconds after which a sample of many calls is cut short, and a disturbed one not repeated."""
_DOUBT = 0.25
"""Standard error of a single value, in log units; n values lessen it by n to the power 1.5."""
_TIE = 0.02
"""Stop early once every gap to stock is known to this accuracy, in log units."""
_FEW, _CLEAR = 5, 0.2
"""Fewer rounds than this settle only a gap that is wider, in log units, in each of them: three that agree by chance
are not rare."""


def once(call: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    """Return the seconds of one call, work queued on a device included."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def compare(
    calls: Mapping[str, Callable[[], Any]],
    *,
    synchronize: Callable[[], None] = lambda: None,
    seconds: float = math.inf,
    min_time: float = 2e-4,
    rounds: tuple[int, int] = (3, 9),
    warm: Mapping[str, float] | None = None,
) -> dict[str, Timing]:
    """Time functions against each other; the first one is the reference of all ratios.

    Parameters
    ----------
    calls : mapping
        Functions without arguments, by name; ``calls[first]`` is the reference (stock).
    synchronize : callable
        Waits until queued device work is done.
    seconds : float
        Budget; no round begins that would exceed it by the fastest calls. One round always runs, and the fewest rounds
        run if they fit undisturbed.
    min_time : float
        Seconds that one sample lasts at least; faster functions are called several times.
    rounds : tuple of int
        Fewest and most rounds.
    warm : mapping, optional
        Known seconds of a warm call by name; functions that it lacks are warmed up here.

    Returns
    -------
    dict
        A Timing by name; functions dropped as hopeless have fewer rounds.
    """
    began = time.perf_counter()
    reference = next(iter(calls))
    first = dict(warm or {})
    for name, call in calls.items():
        if name not in first:
            call()
            first[name] = once(call, synchronize)
    repeats = {name: max(1, math.ceil(min_time / max(first[name], 1e-7))) for name in calls}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    alive, collecting = list(calls), gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds[1]):
            for name in _order(alive, turn):
                samples[name].append(_sample(calls[name], repeats[name], synchronize))
            now = time.perf_counter()
            usual = sum(repeats[name] * min(*samples[name], first[name]) for name in alive)
            if turn == 0:
                seen = {n: min(samples[n][0], first[n]) for n in alive}
                most = _ABSURD * seen[reference]
            else:
                seen = {n: statistics.median(samples[n]) for n in alive}
                most = _HOPELESS * min(seen.values())
            alive = [n for n in alive if n == reference or seen[n] < most]
            enough = turn + 1 >= rounds[0] or usual * rounds[0] > seconds
            if (enough and now - began + usual > seconds) or alive == [reference]:
                break
            if turn + 1 >= rounds[0] and _settled(alive, reference, samples):
                break
    finally:
        if collecting:
            gc.enable()
    return {name: _timing(times, samples[reference]) for name, times in samples.items()}


def standard_error(values: list[float]) -> float:
    """Return a robust standard error of the median, with a lower bound for few values on a busy machine."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(v - middle) for v in values)
    return float(max(spread * 1.2533 / len(values) ** 0.5, _DOUBT / len(values) ** 1.5))


def _order(names: list[str], turn: int) -> list[str]:
    """Return the order of a round: each order is followed by its reverse, so that no place favours a candidate.

    The first call of a round finds the caches of the bookkeeping, which costs a call of 5 us several percent.
    """
    shift = turn // 2 % len(names)
    order = names[shift:] + names[:shift]
    return order if turn % 2 == 0 else order[::-1]


def _sample(call: Callable[[], Any], repeats: int, synchronize: Callable[[], None]) -> float:
    """Return seconds of one call; a sample that was preempted is repeated, and many calls follow an uncounted one."""
    best = math.inf
    for _ in range(_TRIES):
        if repeats > 1:
            call()
        switched = _switches()
        start = now = time.perf_counter()
        done = 0
        while done < repeats and now - start < _LONGEST:
            call()
            done += 1
            now = time.perf_counter()
        synchronize()
        now = time.perf_counter()
        best = min(best, (now - start) / done)
        if _switches() == switched or now - start > _LONGEST:
            break
    return best


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0


def _log_ratios(times: list[float], reference: list[float]) -> list[float]:
    return [math.log(a / b) for a, b in zip(times, reference, strict=False)]


def _settled(alive: list[str], reference: str, samples: dict[str, list[float]]) -> bool:
    for name in alive:
        if name == reference:
            continue
        ratios = _log_ratios(samples[name], samples[reference])
        if len(ratios) < _FEW and not (min(ratios) > _CLEAR or max(ratios) < -_CLEAR):
            return False
        error = standard_error(ratios)
        if error > _TIE and abs(statistics.median(ratios)) < 4 * error + _TIE:
            return False
    return True


def _timing(times: list[float], reference: list[float]) -> Timing:
    ratios = _log_ratios(times, reference)
    return Timing(
        seconds=statistics.median(times),
        ratio=math.exp(statistics.median(ratios)),
        noise=0.0 if times is reference else standard_error(ratios),
        rounds=len(times),
    )
