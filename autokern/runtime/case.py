"""A case of learning: the problems that share a decision, the times that were measured on their calls, the verdict."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from autokern.core.decision import Decision
from autokern.core.op import Op
from autokern.core.problem import Problem
from autokern.runtime.memo import Entry
from autokern.tuning import timer
from autokern.tuning.contenders import ENOUGH, NOISE
from autokern.tuning.policy import FEWER_THREADS
from autokern.tuning.profile import Timing, Trial

__all__ = ["Case"]

_UNKNOWN = 1e-3
"""Seconds of a call that nothing is known of."""
_SLOWER = 10.0
"""Times of the current candidate's seconds that another one is expected to take of which nothing is known."""
_FEW, _MANY, _GAP = 5, 8, 0.15
"""Rounds below which nothing changes; below the second number, only where all of them show a gap of that, in log units:
some that agree by chance are not rare."""
_SURE, _LIKELY = 3.0, 2.0
"""Standard errors by which a winner must be faster than required, and by which a loser is known to be none."""
_CLEAR = 0.5
"""Candidates slower by more than this, in log units, are not timed further."""
_MOST = 4 * ENOUGH
"""Rounds after which a case is closed."""


class Gap(NamedTuple):
    """Median and largest log of a candidate's time over the current one's, standard error, and number of rounds."""

    median: float
    error: float
    rounds: int
    most: float = 0.0

    def shows(self, required: float) -> bool:
        """Whether the candidate is faster by what is required."""
        enough = self.rounds >= (_FEW if self.most < -_GAP else _MANY)
        return enough and self.median + _SURE * self.error <= required


class Case:
    """Problems that share a decision.

    Parameters
    ----------
    decision : Decision
        Of one of them.

    Attributes
    ----------
    current : str
        The candidate that the decision chose.
    names : list of str
        Candidates that are still compared: the current one, stock, contenders.
    served, spent : float
        Seconds that calls have taken, as predicted or measured, and that comparisons have taken.
    rounds : list of dict
        Seconds of each candidate in each round.
    warm : set of str
        Candidates that have run before.
    calls : int
        Calls on whose arguments candidates were compared.
    problem : Problem
        The problem of the last one.
    open : bool
        Whether it is not known yet what is fastest.
    reference : bool
        Whether stock is timed only as the unit of the ratios, since it gives something else.
    winner, told : str
        The candidate that took the place of the current one, and the reason; empty for none.
    """

    def __init__(self, decision: Decision) -> None:
        self.current, self.problem = decision.candidate, decision.problem
        self.names = list(dict.fromkeys((self.current, "stock", *decision.contenders)))
        self._contenders = set(decision.contenders)
        self._predicted = dict(decision.predicted)
        self._entries: deque[Entry] = deque(maxlen=8)
        self.served = self.spent = 0.0
        self.rounds: list[dict[str, float]] = []
        self.warm: set[str] = set()
        self.calls, self.open, self.reference, self.winner, self.told = 0, True, False, "", ""

    def meet(self, entry: Entry) -> None:
        """Count what this entry and others have served since they were met last."""
        if entry not in self._entries:
            self._entries.append(entry)
        calls = 0
        for known in self._entries:
            calls, known.seen = calls + max(0, known.count - known.seen), known.count
        self.served += calls * self.seconds(self.current)

    def seconds(self, name: str) -> float:
        """Return the seconds of one call, as measured here or else as predicted."""
        measured = [found[name] for found in self.rounds if name in found]
        if measured:
            return statistics.median(measured)
        if name in self._predicted:
            return self._predicted[name]
        return _UNKNOWN if name == self.current else _SLOWER * self.seconds(self.current)

    def drop(self, name: str) -> None:
        """Compare a candidate no more."""
        self.names = [known for known in self.names if known != name]
        self._contenders.discard(name)

    def gap(self, name: str) -> Gap | None:
        """Return how much slower than the current one a candidate is, None if they were not compared."""
        ratios = [math.log(found[name] / found[self.current]) for found in self.rounds if name in found]
        if name == self.current or not ratios:
            return None
        return Gap(statistics.median(ratios), timer.standard_error(ratios), len(ratios), max(ratios))

    def verdict(self, op: Op) -> str:
        """Drop candidates that are known not to be faster; return one that is known to be, or nothing.

        The case is closed if either all are dropped or it has taken long.
        """
        best, least, undecided = "", 0.0, False
        for name in [name for name in self.names if name != self.current]:
            found = self.gap(name)
            if found is None:
                undecided = undecided or name in self._contenders
                continue
            required = -NOISE - (FEWER_THREADS if op[self.current].threads and not op[name].threads else 0.0)
            if self.reference and name == "stock":
                required = -math.inf
            if found.shows(required) and found.median < least:
                best, least = name, found.median
            if found.median - _LIKELY * found.error <= required:
                undecided = True
            elif found.median > _CLEAR or name != "stock":
                self.drop(name)
        self.open = undecided and not best and len(self.rounds) < _MOST
        return best

    def changed(self, winner: str, reason: str = "") -> None:
        """Let another candidate serve from now on."""
        found = self.gap(winner)
        gain = "" if found is None else f": {math.exp(-found.median):.2f} times as fast as {self.current}"
        self.winner, self.open = winner, False
        self.told = reason or f"learnt from {self.calls} of your calls{gain}"

    def decided(self, decision: Decision) -> Decision:
        """Return a decision with the winner as its choice."""
        timings = self._timings()
        found = timings.get(self.winner)
        return msgspec.structs.replace(
            decision,
            candidate=self.winner,
            reason=self.told,
            source="learnt" if self.calls else "measured",
            margin=1.0 if found is None else 1 / found.ratio,
            uncertainty=0.0 if found is None else found.noise,
            order=(self.winner, *(name for name in decision.order if name != self.winner)),
            contenders=(),
            review=0,
        )

    def _timings(self) -> dict[str, Timing]:
        """Return what is known of all candidates, with ratios to stock; empty if stock was not timed."""
        gaps = {name: self.gap(name) for found in self.rounds for name in found}
        gaps[self.current] = Gap(0.0, 0.0, len(self.rounds))
        known = {name: found for name, found in gaps.items() if found is not None and found.rounds}
        stock = known.get("stock")
        if stock is None:
            return {}
        timings = {}
        for name, found in known.items():
            ratio, noise = math.exp(found.median - stock.median), math.hypot(found.error, stock.error)
            own = Timing(self.seconds(name), ratio, noise, found.rounds)
            timings[name] = Timing(self.seconds(name), rounds=found.rounds) if name == "stock" else own
        return timings

    def trial(self, before: Callable[[Problem], Trial | None]) -> Trial | None:
        """Return what the profile keeps, with what was learnt before of the same problem; None if that is nothing."""
        timings = self._timings() if self.calls else {}
        if len(timings) < 2:
            return None
        earlier = before(self.problem)
        if earlier is None:
            return Trial(self.problem, timings, self.calls)
        both = {name: _together(earlier.timings[name], t) for name, t in timings.items() if name in earlier.timings}
        return Trial(self.problem, {**earlier.timings, **timings, **both}, earlier.calls + self.calls)


def _together(one: Timing, other: Timing) -> Timing:
    """Return two timings of one candidate as one, each as heavy as it is exact."""
    if not one.noise or not other.noise:
        return msgspec.structs.replace(other, rounds=one.rounds + other.rounds)
    weights = one.noise**-2, other.noise**-2
    total = sum(weights)
    ratio = math.exp((weights[0] * math.log(one.ratio) + weights[1] * math.log(other.ratio)) / total)
    return msgspec.structs.replace(
        other, ratio=ratio, noise=total**-0.5, rounds=one.rounds + other.rounds, error=one.error
    )
