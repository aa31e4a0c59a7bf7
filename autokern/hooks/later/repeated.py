"""A function that an optimiser evaluates again and again: it is recorded once, and replayed where that is faster.

An evaluation of a small model is several hundred small operations, whose modules, autograd nodes and dispatch take most
of the time. One is recorded (`core.replay`). The library and the replay compute the next two. If the results agree and
the replay is faster, it serves. Every 32nd evaluation is compared again.

Recording and comparing take some 30 ms, a replay half the time of an evaluation. Recording starts after 60 ms, later
after as many calls as repaid it before (the ski-rental problem), at once if those were exceeded, again once it paid.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import numpy as np
import torch

from autokern.core.errors import caught, raised_again, unless_it_fails
from autokern.core.replay import Held, Ran
from autokern.core.replay.operations import ChangedError, Replay
from autokern.core.replay.recording import Recorder
from autokern.core.state import inside
from autokern.hooks.bypass import may_replay
from autokern.runtime import dispatch
from autokern.system import host

_EAGER, _COMPARED, _EVERY = 2, 2, 32  # evaluations before the recorded one, compared after it, and between comparisons
_SPENT = 0.06  # seconds of evaluations before one is recorded, if their number is unknown; more after refusals
_AGREE = 1e-9  # the largest difference between a replay and the library, relative to the largest compared value
_SINGLE = 1e-4  # the same in single precision, in which BLAS rounds products of fewer sets differently
_GAIN = 0.9  # the largest part of an evaluation's time that a replay may take
_MISSES, _UNFIT = 3, 8  # consecutive replays at another branch, and calls that do not fit, until a recording is dropped
_histories: dict[tuple[Any, ...], _History] = {}  # by kind, whose classes it does not keep alive
_log = logging.getLogger("autokern")


class _History:
    """Statistics of a process's optimisations of one kind."""

    count = longest = refused = 0
    seconds = repaid = 0.0  # of an evaluation, as `_spent` counts them; replays that gain the cost of a recording
    shrinks = True  # whether a replay of a smaller call is faster

    def spent(self) -> float:
        """Return the seconds of evaluations of the next optimisation before one is recorded."""
        self.longest, self.count = max(self.longest, self.count), 0
        lasts = 0.0 < self.repaid < self.longest - _EAGER - 1 - _COMPARED
        return 0.0 if lasts else max(_SPENT * 4 ** min(self.refused, 9), self.repaid * self.seconds)


class Repeated(abc.ABC):
    """Evaluations of one function; subclasses define the library's call and its results."""

    name: str
    repeatable = True  # whether a replay may run twice for one call
    lasting = False  # whether state that an evaluation leaves in its modules is read later, so a replay must leave it
    second = False  # whether the recorded evaluation is not the call's own
    watched = True  # whether the user's program runs between two calls, and may replace functions then
    seeding: CodeType | bool | None = None  # the code that draws a seed, False for none; None if nothing may be drawn
    _held: Held
    _replay: Replay | None = None

    def __init__(self, kind: tuple[Any, ...], dtypes: Iterable[torch.dtype]) -> None:
        weak = tuple(weakref.ref(one) if isinstance(one, type) else one for one in kind)
        self._history = _histories.setdefault(weak, _History())
        self._until, self._spent = self._history.spent(), 0.0
        self.draws = False  # whether a replay draws random numbers, from the generator's state at the call
        self.state: torch.Tensor | None = None
        self._count = self.unfit = 0  # calls, and consecutive calls that the recording did not fit
        self.start_anew()
        self._ran, self._sizes = Ran(), list[float]()
        self.agreement = _SINGLE if torch.float32 in dtypes else _AGREE
        self.serves, self.unlike = True, False  # `unlike`: the call is the first of another kind than those compared
        self.earlier = 0.0  # seconds of a replay that pass before the call

    def start_anew(self, larger: float = 0.0) -> None:
        """Forget the recording, so that the next call is recorded, and measure replays and the library anew."""
        self._anew, self.larger = self._replay is not None, larger
        self._seconds = self._running = self._around = self.price = math.inf
        self._cost, self._replay, self._same = 0.0, None, False
        self._compared = self._misses = self.replays = 0

    @abc.abstractmethod
    def library(self, *call: Any) -> Any:
        """Evaluate by the library."""

    def stock(self, *call: Any) -> Any:
        """Evaluate without any candidate; None if only `numbers` returns the result."""
        return self.library(*call)

    @abc.abstractmethod
    def consists(self, *call: Any) -> Held | str:
        """Return the objects on which the function depends, or why it cannot be recorded."""

    @abc.abstractmethod
    def evaluated(self, *call: Any) -> tuple[tuple[torch.Tensor, ...], Callable[[], Iterable[torch.Tensor]]]:
        """Return the inputs, and a function that computes the results as the library does."""

    def outgrown(self, *call: Any) -> bool:
        """Whether calls have become so much smaller than the recorded one that another recording pays."""
        return False

    def made(self, recorder: Recorder) -> Replay:
        """Return the replay that computes the results."""
        return recorder.replay(*self._results)

    def is_unchanged(self) -> bool:
        """Whether functions, objects and settings are as they were recorded."""
        return (not self.watched or self._ran.is_as_before()) and self._held.is_as_before()

    @abc.abstractmethod
    def put(self, *call: Any) -> bool:
        """Copy a call's numbers into the inputs; false if the recording does not fit the call."""

    @abc.abstractmethod
    def result(self, results: tuple[torch.Tensor, ...], *call: Any) -> Any:
        """Return the library's result from the results of the recording; None where the library would raise."""

    @abc.abstractmethod
    def numbers(self, found: Any) -> Iterable[Any]:
        """Return the arrays that are compared."""

    def call(self, *call: Any) -> Any:
        """Evaluate, by the library or by a replay."""
        with inside.having(repeated=inside.repeated or self.serves):
            return self._chosen(*call)

    def _chosen(self, *call: Any) -> Any:
        self._count, self._history.count = self._count + 1, self._history.count + 1
        if not self.serves or not may_replay():
            return self.library(*call)
        began = time.thread_time()
        if self._replay is None and (self._count <= _EAGER or self._spent < self._until):
            found = self.library(*call)
            took = time.thread_time() - began
            self._seconds, self._spent = min(self._seconds, took), self._spent + took
            return found
        if self._replay is None or self.outgrown(*call):
            found = self._recorded(*call)
            self._cost += time.thread_time() - began
            return found
        before = self.state = torch.get_rng_state() if self.draws else None
        ours = self._by_replay(*call)
        serves = ours is not None and self._compared >= _COMPARED and not self.unlike and self._count % _EVERY
        if before is not None and not serves:
            after = torch.get_rng_state()
            torch.set_rng_state(before)
        if ours is None:
            found = self.library(*call)
            if self._same and not self.lasting:  # nothing had changed before the library cached results of its call
                self._held.renew()
            return found
        if serves:
            dispatch.session().past["optimised function", "replay"] += 1
            return ours
        numbers = [np.array(values) for values in self.numbers(ours)]
        with inside.having(active=True):  # the replay computes as stock does
            repeated = time.thread_time()
            with contextlib.nullcontext() if self._compared else self._ran:
                found = self.stock(*call)
            self._seconds = min(self._seconds, time.thread_time() - repeated)
            if self.watched and not self._compared:
                self._ran.keep(self._held.kinds())
        changed = self.lasting and not self._held.is_as_before()
        self._held.renew()
        self._compared += 1
        if not self._ran.seen:
            self.end("a tracer is active")
        elif self._ran.has_warned:
            self.end("a warning")
        elif changed:
            self.end("an evaluation changes what it consists of")
        elif before is not None and not torch.equal(after, torch.get_rng_state()):
            self.end("an evaluation draws other random numbers than its replay")
        elif not self._agree(numbers, [np.asarray(values) for values in self.numbers(found)]):
            self.end("an evaluation differs from its replay")
        elif self._compared <= _COMPARED:
            self._cost += time.thread_time() - began
            if self._compared == _COMPARED:
                self._judge()
        if found is None and (self.second or not self.serves):
            torch.set_rng_state(torch.get_rng_state() if before is None else before)
            found = self.library(*call)
        return ours if found is None else found

    def _judge(self) -> None:
        """End if a replay is not faster; else note the cost of the recording and the gain of a replay."""
        if self.repeatable and self.lasting:
            self._run()  # the first run touched new memory
        if self._replayed() > _GAIN * self._seconds:
            return self.end("a replay is not faster")
        history, self.price = self._history, self._cost - (1 + _COMPARED) * self._seconds
        if self.larger:  # seconds of a replay of the larger calls that were recorded before
            history.shrinks = self._running < _GAIN * self.larger
        if not self._anew:
            history.repaid, history.refused = self.price / (self._seconds - self._replayed()), 0
            history.seconds = self._spent / (self._count - 1 - _COMPARED)

    def _replayed(self) -> float:
        """Return how long a call by a replay takes, at least."""
        return self.earlier + self._running + self._around

    def _agree(self, ours: list[np.ndarray], theirs: list[np.ndarray], within: float = 0.0) -> bool:
        """Whether results agree; for products of another size, as after points were dropped, rounding differs."""
        sizes = [float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) for values in theirs]
        self._sizes = list(map(max, sizes, self._sizes or sizes))
        agreement = within or self.agreement
        return len(ours) == len(theirs) and all(
            one.shape == other.shape and np.allclose(one, other, rtol=0.0, atol=agreement * size, equal_nan=True)
            for one, other, size in zip(ours, theirs, self._sizes, strict=True)
        )

    @unless_it_fails
    def _prepared(self, *call: Any) -> tuple[Recorder, Callable[[], Iterable[torch.Tensor]]] | str:
        """Return a recorder and a function that computes the results, or why they cannot be recorded."""
        held = self.consists(*call)
        if isinstance(held, str):
            return held
        self._held = held
        inputs, compute = self.evaluated(*call)
        return Recorder(*inputs, seeding=self.seeding), compute

    def _recorded(self, *call: Any) -> Any:
        """Evaluate as stock does, and record it."""
        self.drawn, prepared = {}, self._prepared(*call) or "it cannot be read"
        if isinstance(prepared, str):
            self.end(prepared)
            return self.library(*call)
        (recorder, compute), before, found = prepared, host.random_states(), None
        self.drawn = recorder.drawn
        try:
            with recorder:
                self._results = tuple([t.detach() for t in compute()])
            self._held.renew()
            found = self.result(self._results, *call)
            self._replay, self.draws, self.copies = self.made(recorder), recorder.draws, recorder.copies
            recorder.limit(self)
        except raised_again(Exception) as reason:
            self.end(str(reason) or repr(reason))
        if found is None or self.second:
            recorder.undo()
        if found is None:
            host.take_random_states(before, self.drawn)
            return self.library(*call)
        return found

    def _run(self) -> float:
        replay, began = self._replay, time.thread_time()
        if replay is None:
            raise ChangedError("another thread has dropped the recording")
        replay.run()
        self._running = min(self._running, took := time.thread_time() - began)
        return took

    def _by_replay(self, *call: Any) -> Any:
        """Return the result by the recording, None if the library must evaluate the call."""
        try:
            began = time.thread_time()
            self._same = self.is_unchanged()
            if not (self._same and self.put(*call)):
                self.misfits()
                return None
            self.unfit = 0
            running = self._run()
            found = self.result(self._results, *call)
            self._around = min(self._around, time.thread_time() - began - running)
            self._misses, self.replays = 0, self.replays + 1
            return found
        except caught(Exception) as reason:
            self._misses += 1
            if not isinstance(reason, ChangedError):
                self.end(str(reason))
            elif self._misses >= _MISSES:  # at another branch from now on
                repaid = self.replays * (self._seconds - self._replayed()) > self.price
                self.start_anew() if repaid else self.end(str(reason))
            return None

    def misfits(self) -> None:
        """Count a call that the recording does not fit."""
        self.unfit += 1
        if self.unfit == _UNFIT:
            self.end("calls differ from the recorded one")

    def forget(self) -> None:
        """Leave all further evaluations to the library."""
        self.serves, self._replay = False, None

    def end(self, why: str) -> None:
        """Forget the recording; each such end lets later optimisations of the kind wait longer."""
        self.forget()
        self._history.refused += not self._anew
        _log.info("an optimiser's %s is evaluated by the library from now on: %s", self.name, why)
