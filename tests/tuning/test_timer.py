"""timer.py, on a clock that only the timed functions move: what is measured is known, and nothing waits."""

import contextlib
import functools
import gc
import itertools
import math
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from autokern.tuning import measuring, timer
from autokern.tuning.timer import compare, once, standard_error


class Clock:
    """A clock, and functions that take a known time by it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.calls: list[str] = []
        self.queued = 0.0
        self.waited = 0.0

    @property
    def known(self) -> bool:
        """Whether threads have waited for a core."""
        return self.waited > 0

    def __call__(self) -> float:
        return self.waited

    def work(self, name: str, seconds: float, noise: float = 0.0, seed: int = 0):
        generator = random.Random(seed)

        def call() -> None:
            self.calls.append(name)
            self.now += seconds * math.exp(noise * generator.gauss(0, 1))

        return call

    def waiting(self, seconds: float, waits):
        """A function of so many seconds that waits for a core in addition, each call as long as the iterator says."""

        def call() -> None:
            wait = next(waits)
            self.now += seconds + wait
            self.waited += wait

        return call

    def counts(self) -> tuple[int, ...]:
        """How often each function was called since this was asked last."""
        found = tuple(Counter(self.calls).values())
        self.calls.clear()
        return found

    def queue(self, seconds: float) -> None:
        self.queued += seconds

    def synchronize(self) -> None:
        self.now += self.queued
        self.queued = 0.0


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=lambda: made.now))
    monkeypatch.setattr(timer, "Waited", lambda: contextlib.nullcontext(made))
    return made


def test_once_takes_the_queue_of_the_device_along(clock):
    clock.queued = 5.0  # of somebody before
    assert once(lambda: clock.queue(2.0), clock.synchronize) == 2.0


def test_work_that_is_queued_counts_as_often_as_it_is_called(clock):
    calls = {"stock": lambda: clock.queue(0.52e-3), "queued": lambda: clock.queue(0.45e-3)}
    calls["waiting"] = lambda: clock.queue(0.45e-3) or clock.synchronize()
    found = compare(calls, synchronize=clock.synchronize, min_time=1e-3)
    assert found["stock"].seconds == pytest.approx(0.52e-3)
    assert found["queued"].ratio == pytest.approx(found["waiting"].ratio)
    assert found["queued"].ratio == pytest.approx(0.45 / 0.52)


def test_seconds_and_ratios_are_those_of_the_clock(clock):
    found = compare({"stock": clock.work("stock", 1e-3), "fast": clock.work("fast", 8e-4)}, min_time=0)
    assert list(found) == ["stock", "fast"]
    assert found["stock"].seconds == pytest.approx(1e-3)
    assert (found["stock"].ratio, found["stock"].noise) == (1.0, 0.0)
    assert found["fast"].seconds == pytest.approx(8e-4)
    assert found["fast"].ratio == pytest.approx(0.8)
    assert 0 < found["fast"].noise < 0.1  # three rounds tell little, however well they agree


def test_every_function_is_warmed_up_unless_that_was_done_and_repeated_until_a_sample_lasts(clock):
    calls = {"stock": clock.work("stock", 1e-3), "other": clock.work("other", 1e-3)}
    compare(calls, rounds=(1, 1), min_time=0)
    assert clock.counts() == (4, 4)  # to warm up, to guess, to lead, and one that counts
    compare(calls, rounds=(1, 1), min_time=0, warm=dict.fromkeys(calls, 1e-3))
    assert clock.counts() == (2, 2)
    calls = {"stock": clock.work("stock", 1e-5), "slow": clock.work("slow", 2e-4)}
    found = compare(calls, rounds=(1, 1), min_time=1e-4, warm={"stock": 1e-5, "slow": 2e-4})
    assert clock.counts() == (pytest.approx(11, abs=1), 2)  # one of them leads
    assert found["stock"].seconds == pytest.approx(1e-5)
    compare({"stock": clock.work("stock", 1e-9)}, rounds=(1, 1), min_time=1e-4, warm={"stock": 1e-9})
    assert clock.counts() <= (1002,)  # one of them to warm up


@pytest.mark.parametrize("many", [2, 3, 4])
def test_every_place_of_a_round_is_everybodys_as_often(clock, many):
    calls = {name: clock.work(name, 1e-3, 0.2, seed) for seed, name in enumerate("sabc"[:many])}
    turns = 2 * many
    compare(calls, rounds=(turns, turns), min_time=0, warm=dict.fromkeys(calls, 1e-3))
    assert clock.calls[::2] == clock.calls[1::2]  # each call that counts follows one of its own
    rounds = [clock.calls[i : i + 2 * many : 2] for i in range(0, 2 * many * turns, 2 * many)]
    assert [order[::-1] for order in rounds[::2]] == rounds[1::2]
    for place in range(many):
        assert {name: [r[place] for r in rounds].count(name) for name in calls} == dict.fromkeys(calls, 2)


def cached(clock: Clock, warm: float, cold: float):
    """Two names for one function, which takes longer in the caches of another one."""
    last = ""

    def work(name: str) -> None:
        nonlocal last
        clock.now += warm if last == name else cold
        last = name

    return {name: functools.partial(work, name) for name in ("stock", "same")}


@pytest.mark.parametrize("min_time", [0.0, 2e-4])
def test_what_the_last_function_left_in_the_caches_does_not_count(clock, min_time):
    calls = cached(clock, 1e-5, 9e-5)
    found = compare(calls, rounds=(2, 2), min_time=min_time, warm={"stock": 1e-5, "same": 1e-5})
    assert found["stock"].seconds == found["same"].seconds == pytest.approx(1e-5)


def test_drift_that_all_share_cancels(clock):
    def drifting(seconds: float):
        def run() -> None:
            clock.calls.append("")
            clock.now += seconds * 1.025 ** len(clock.calls)

        return run

    calls = {"stock": drifting(1e-3), "half": drifting(7e-4)}
    found = compare(calls, rounds=(9, 9), min_time=0, warm={"stock": 1e-3, "half": 7e-4})
    assert found["half"].ratio == pytest.approx(0.7, rel=0.06)
    assert found["stock"].seconds > 1.3e-3


ROUNDS = [
    ({"stock": 1, "absurd": 9, "hopeless": 2.2, "near": 1.02}, 0.05, (7, 7), [7, 1, 2, 7]),
    ({"stock": 1, "slow": 2}, 0, (7, 7), [2, 2]),  # timing stops when only the reference is left
    ({"stock": 1, "slow": 9}, 0, (7, 7), [1, 1]),
    ({"stock": 1, "fast": 0.7}, 0, (3, 9), [3, 3]),  # a clear gap
    ({"stock": 1, "ahead": 0.85}, 0, (3, 9), [5, 5]),  # three that agree may do so by chance
    ({"stock": 1, "alike": 1}, 0.3, (3, 9), [9, 9]),
]


@pytest.mark.parametrize(("milliseconds", "noise", "rounds", "taken"), ROUNDS)
def test_hopeless_ones_and_clear_gaps_need_the_fewest_rounds(clock, milliseconds, noise, rounds, taken):
    calls = {name: clock.work(name, 1e-3 * ms, noise, seed) for seed, (name, ms) in enumerate(milliseconds.items())}
    found = compare(calls, rounds=rounds, min_time=0)
    assert [timing.rounds for timing in found.values()] == taken
    assert [timing.ratio for timing in found.values()] == pytest.approx(list(milliseconds.values()), rel=0.2)


def test_the_budget_is_obeyed(clock):
    calls = {"stock": clock.work("stock", 1.0, 0.2, 1), "other": clock.work("other", 1.0, 0.2, 2)}
    began = clock.now
    found = compare(calls, rounds=(50, 50), min_time=0, seconds=20.0, warm=dict.fromkeys(calls, 1.0))
    assert clock.now - began < 21.5
    assert 5 <= found["other"].rounds < 50


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("error", [None, RuntimeError])
def test_garbage_is_collected_afterwards_as_before(clock, before, error):
    def call() -> None:
        seen.append(gc.isenabled())
        clock.now += 1e-3
        if error:
            raise error

    seen = []
    (gc.enable if before else gc.disable)()
    try:
        with pytest.raises(error) if error else contextlib.nullcontext():
            compare({"stock": call}, min_time=0, warm={"stock": 1e-3})
        assert gc.isenabled() is before
    finally:
        gc.enable()
    assert not any(seen)


def test_a_sample_that_was_disturbed_is_taken_again(clock):
    waits = iter([2.5e-3, 0.5e-3, 2.5e-3, 4.5e-3, 2.5e-3, 1e-3])  # every other call leads and does not count

    def disturbed() -> None:
        clock.waiting(wait := next(waits), iter([wait]))()

    found = compare({"stock": disturbed}, rounds=(1, 1), min_time=0, warm={"stock": 1e-3})
    assert found["stock"].seconds == pytest.approx(1e-3 * math.sqrt(0.5))
    assert next(waits, None) is None


def test_a_reference_that_waits_for_a_core_gives_no_confident_ratio(clock):
    calls = {"stock": clock.waiting(2e-3, itertools.repeat(0.19)), "fast": clock.work("fast", 1e-3)}
    found = compare(calls, rounds=(1, 3), min_time=0, seconds=0.1, warm={"stock": 0.19, "fast": 1e-3})
    assert found["stock"].disturbed > 0.9
    assert found["fast"].disturbed > 0.9
    assert abs(math.log(found["fast"].ratio / 0.5)) < 1.7 * found["fast"].noise
    assert measuring.trusted(found) == {}


def test_undisturbed_rounds_count_where_there_are_enough(clock):
    waits = itertools.cycle([0.05, 0.05, 0.0])
    calls = {"stock": clock.waiting(2e-3, waits), "fast": clock.work("fast", 1e-3)}
    found = compare(calls, rounds=(5, 9), min_time=0, warm={"stock": 2e-3, "fast": 1e-3})
    assert found["fast"].ratio == pytest.approx(0.5)
    assert (found["stock"].disturbed, found["fast"].disturbed) == (0.0, 0.0)
    assert set(measuring.trusted(found)) == {"stock", "fast"}


def test_a_disturbed_comparison_takes_more_rounds_and_then_ends(clock):
    calls = {"stock": clock.waiting(2e-3, itertools.repeat(2e-3)), "fast": clock.work("fast", 1.9e-3)}
    found = compare(calls, rounds=(3, 5), min_time=0, warm={"stock": 2e-3, "fast": 1.9e-3})
    assert found["fast"].rounds == 10
    assert found["fast"].noise > 0.3


def test_what_waits_for_a_core_is_not_dropped_as_absurd(clock):
    waits = itertools.chain([0.05] * 3, itertools.repeat(0.0))
    calls = {"stock": clock.work("stock", 1e-3), "other": clock.waiting(9e-4, waits)}
    found = compare(calls, rounds=(5, 9), min_time=0, warm=dict.fromkeys(calls, 1.0))
    assert found["other"].ratio == pytest.approx(0.9)


def test_standard_error():
    assert standard_error([1.0]) >= 0.1
    assert standard_error([0.5] * 3) == pytest.approx(standard_error([1.0]) / 3**1.5)
    assert standard_error([0.5] * 300) < 1e-3
    generator = random.Random(1)
    for count in (9, 25, 100):
        medians = [standard_error([generator.gauss(0, 1) for _ in range(count)]) for _ in range(200)]
        assert sum(medians) / 200 == pytest.approx(1.2533 / math.sqrt(count), rel=0.2)
    assert standard_error([0.0] * 8 + [100.0]) < 0.02
