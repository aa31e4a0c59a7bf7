"""Honest timing: candidates take turns, every time is paired with stock's of the same round, and noise is reported.

Where others use the cores, threads wait. The undisturbed time lies between a sample's time and its time less that wait:
their geometric mean counts, half their distance in log units is doubt; samples without a wait are preferred.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from autokern.system.load import Waited
from autokern.tuning.profile import DISTURBED, QUIET, Timing

_HOPELESS = 1.6  # a candidate slower than the best by this factor is not timed further
_ABSURD = 3.0  # a candidate slower than the reference by this factor is timed once
_TRIES = 3  # most tries of a disturbed sample
_ALL = 0.99  # largest share of a sample that counts as waiting
_LONGER = 3  # a comparison of mostly disturbed samples may take this multiple of the seconds, and twice the rounds
_LONGEST = 0.02  # a sample of more seconds is cut short, not repeated if disturbed, and not preceded by a warm-up call
_DOUBT = 0.25  # standard error of a single value, in log units; n values lessen it by n to the power 1.5
_TIE = 0.02  # stop early once every gap to stock is known to this accuracy, in log units
_CLEAN = 3  # from this many undisturbed rounds on, disturbed rounds are ignored
_FEW, _CLEAR = 5, 0.2  # fewer rounds settle only if each shows a wider log gap: three may agree by chance


class _Sample(NamedTuple):
    wall: float  # seconds of one call
    lost: float  # share of them in which threads waited for a core

    def less(self, power: float) -> float:  # its wait: 1 for the least time, 0.5 for the likely one
        return self.wall * math.pow(1 - self.lost, power)


class _Pairs:
    """Samples of a candidate and of stock in common rounds: only the undisturbed ones, if enough, else all."""

    def __init__(self, found: list[_Sample], stock: list[_Sample]) -> None:
        pairs = list(zip(found, stock, strict=False))
        clean = [pair for pair in pairs if max(pair[0].lost, pair[1].lost) <= DISTURBED]
        self.pairs, self.is_stock = clean if len(clean) >= _CLEAN else pairs, found is stock
        self.ratios = [math.log(a.less(0.5) / b.less(0.5)) for a, b in self.pairs]
        self.lost = statistics.median(max(a.lost, b.lost) for a, b in self.pairs)

    def settled(self) -> bool:
        """Whether the gap between the candidate and stock is known well enough."""
        error, clear = standard_error(self.ratios), min(self.ratios) > _CLEAR or max(self.ratios) < -_CLEAR
        enough = clear or len(self.ratios) >= _FEW
        known = enough and (error <= _TIE or abs(statistics.median(self.ratios)) >= 4 * error + _TIE)
        return self.is_stock or known

    def timing(self) -> Timing:
        doubt = statistics.median(-0.5 * math.log((1 - a.lost) * (1 - b.lost)) for a, b in self.pairs)
        return Timing(
            seconds=statistics.median(a.less(0.5) for a, _ in self.pairs),
            ratio=math.exp(statistics.median(self.ratios)),
            noise=0.0 if self.is_stock else math.hypot(standard_error(self.ratios), doubt),
            rounds=len(self.pairs),
            disturbed=round(self.lost, 3) if self.lost > DISTURBED else QUIET,
        )


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
    """Time functions against each other; the first one is the reference of all ratios, hopeless ones have fewer rounds.

    No round after the first begins that would exceed `seconds`; at least ``rounds[0]`` run if they fit undisturbed. A
    sample lasts at least `min_time`. Functions without the seconds of a `warm` call are warmed up first.
    """
    began, reference, first = time.perf_counter(), next(iter(calls)), dict(warm or {})
    for name, call in calls.items():
        if name not in first:
            call()
            first[name] = once(call, synchronize)
    repeats = {name: max(1, math.ceil(min_time / max(first[name], 1e-7))) for name in calls}
    samples: dict[str, list[_Sample]] = {name: [] for name in calls}
    alive, collecting = list(calls), gc.isenabled()

    def fastest(name: str) -> float:
        return min([first[name], *(sample.wall for sample in samples[name])])  # each may be disturbed

    try:
        gc.disable()
        with Waited() as waited:
            for turn in range(2 * rounds[1]):
                shift = turn // 2 % len(alive)
                order = alive[shift:] + alive[:shift]  # then its reverse, so that no place favours a candidate
                for name in order[::-1] if turn % 2 else order:
                    lead = repeats[name] > 1 or fastest(name) < _LONGEST
                    samples[name].append(_sample(calls[name], repeats[name], synchronize, waited, lead))
                now = time.perf_counter()
                usual = sum(repeats[n] * fastest(n) for n in alive)
                if turn == 0:
                    seen = {n: min(samples[n][0].less(1), first[n]) for n in alive}
                    most = _ABSURD * fastest(reference)
                else:
                    seen = {n: statistics.median(s.less(1) for s in samples[n]) for n in alive}
                    most = _HOPELESS * min(statistics.median(s.wall for s in samples[n]) for n in alive)
                alive = [n for n in alive if n == reference or seen[n] < most]
                known = [_Pairs(samples[n], samples[reference]) for n in alive]
                disturbed = any(pairs.lost > DISTURBED for pairs in known)
                enough = turn + 1 >= rounds[0] or usual * rounds[0] > seconds
                over = now - began + usual > (_LONGER * seconds if disturbed else seconds)
                if (enough and over) or alive == [reference]:
                    break
                if disturbed or turn + 1 < rounds[0]:
                    continue
                if turn + 1 >= rounds[1] or all(pairs.settled() for pairs in known):
                    break
    finally:
        if collecting:
            gc.enable()
    return {name: _Pairs(found, samples[reference]).timing() for name, found in samples.items()}


def standard_error(values: list[float]) -> float:
    """Return a robust standard error of the median, with a lower bound for few values on a busy machine."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(v - middle) for v in values)
    return float(max(spread * 1.2533 / len(values) ** 0.5, _DOUBT / len(values) ** 1.5))


def _sample(
    call: Callable[[], Any], repeats: int, synchronize: Callable[[], None], waited: Waited, lead: bool
) -> _Sample:
    """Return a sample, repeated if it was disturbed; with `lead`, a call before it warms the caches."""
    best = _Sample(math.inf, 0.0)
    for _ in range(_TRIES):
        if lead:
            call()
        synchronize()
        before = waited()
        start = now = time.perf_counter()
        done = 0
        while done < repeats and now - start < _LONGEST:
            call()
            done += 1
            now = time.perf_counter()
        synchronize()
        now = time.perf_counter()
        lost = min(max(waited() - before, 0.0) / max(now - start, 1e-9), _ALL)
        best = min(best, _Sample((now - start) / done, lost))
        if lost <= DISTURBED or now - start > _LONGEST:
            break
    return best
