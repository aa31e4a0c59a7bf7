"""review.py: an op is measured once its calls have taken so long that measuring pays back."""

import contextlib
import time
from types import SimpleNamespace

import pytest
import sklearn.ensemble  # noqa: F401  (its import would count as spent, if these tests came first)
import torch
from support.fakes import as_if_of_autokern
from support.loads import busy

import autokern
from autokern.core.problem import Problem
from autokern.runtime import dispatch, review
from autokern.tuning import calibration, timer
from autokern.tuning.calibration import calibrate
from autokern.tuning.profile import Profile, Timing, Trial, dated


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the op's calls advance; first use and the memo see it, and the programs of a test start now."""
    made = SimpleNamespace(now=0.0)
    there = SimpleNamespace(perf_counter=lambda: made.now, time=time.time)
    for module in ("review", "memo"):
        monkeypatch.setattr(f"autokern.runtime.{module}.time", there)
    monkeypatch.delenv("AUTOKERN_CALIBRATE")
    dispatch.reset()
    return made


@pytest.fixture
def budgets(monkeypatch):
    """The budgets of the calibrations that began, which measure as ever."""
    seen, honest = [], calibration.calibrate

    def noted(ops, level, budget, *args, **more):
        seen.append((budget, more["near"]))
        return honest(ops, level, 20.0, *args, **more)

    monkeypatch.setattr(calibration, "calibrate", noted)
    return seen


@pytest.fixture
def call(make_op, clock):
    """An op whose call takes as many seconds as it is told, with another candidate that could serve."""
    op, seconds = make_op("double"), [0.1]

    def stock(a):
        clock.now += seconds[0]
        return 2 * a

    op.candidate("stock")(stock)
    op.candidate("fast")(lambda a: 2 * a)
    routed = dispatch.route(op)

    def calls(n, took, elsewhere=0.0, size=4):
        seconds[0] = took
        for _ in range(n):
            clock.now += elsewhere
            assert routed(torch.ones(size, size, dtype=torch.float64)).sum() == 2 * size * size

    return calls


@pytest.mark.parametrize("orders", [{}, {"exclude": ["broadcast"]}], ids=["", "in a block"])
def test_measuring_takes_a_twentieth_of_the_program_at_most_and_all_calls_are_reported(call, budgets, orders):
    with autokern.using(**orders):
        call(50, took=0.1)
        assert budgets == []
        call(100, took=0.1)
        call(7, took=0.1, size=5)
        assert sum(autokern.stats()["double"].values()) == sum(count for _, count in dispatch.decisions()) == 157
    ((budget, near),) = budgets
    assert 0.6 * 0.3 <= budget <= 0.05 * 10
    assert near.n == 4
    assert dispatch.session().profile.trials
    assert sum(autokern.stats()["double"].values()) == 157


@pytest.mark.parametrize(("budget", "elsewhere", "most"), [("0", False, 1), ("60", True, 59)])
def test_a_spent_budget_and_a_measurement_in_another_thread_are_not_asked_for_at_each_call(
    call, budgets, monkeypatch, budget, elsewhere, most
):
    asked, honest = [], review.FirstUse.measure

    def measure(self, *args):
        asked.append(1)
        if elsewhere:
            self._measuring.here().acquire(blocking=False)
        return honest(self, *args)

    monkeypatch.setattr(review.FirstUse, "measure", measure)
    monkeypatch.setenv("AUTOKERN_BUDGET", budget)
    dispatch.reset()
    call(2000, took=0.1)
    assert budgets == []
    assert 1 <= len(asked) <= most


def test_a_decision_that_fails_after_the_measurement_leaves_the_entry_in_service(call, budgets, monkeypatch):
    call(1, took=0.1)

    @as_if_of_autokern
    def failing(*_):
        raise UserWarning("a warning that is an error")

    monkeypatch.setattr(dispatch.session(), "decide_alike", failing)
    call(150, took=0.1)
    assert sum(autokern.stats()["double"].values()) == 151


def test_an_op_that_takes_little_of_a_long_program_is_not_measured(call, budgets):
    call(100, took=0.01, elsewhere=1.0)
    assert budgets == []
    call(150, took=0.01, elsewhere=1.0)
    assert len(budgets) == 1
    assert budgets[0][0] <= 0.2 * 2.5


def test_sizes_share_what_an_op_has_taken(call, budgets):
    for size in range(2, 12):
        call(10, took=0.1, size=size)
    assert len(budgets) == 1


@pytest.mark.parametrize("order", ["", "first-use"])
def test_nothing_is_measured_while_others_use_the_cores_though_it_is_ordered(call, budgets, monkeypatch, order):
    busy(2.0)
    monkeypatch.setenv("AUTOKERN_CALIBRATE", order)
    dispatch.reset()
    call(300, took=0.1)
    assert budgets == []
    assert autokern.stats()["double"] == {"stock": 300}
    busy(0.0)
    call(600, took=0.1)
    assert len(budgets) == 1


def test_an_op_of_a_few_trials_is_measured_in_a_later_process_and_not_in_each(call, budgets, monkeypatch):
    trial = Trial(Problem(op="double", m=4, n=4), {"stock": Timing(1e-6), "fast": Timing(1e-6)})
    few = Profile(trials=[trial])
    dispatch.session().adopt(few)
    call(100, took=0.1)
    assert len(budgets) == 1
    assert dispatch.session().profile.fruitless == {}, "the whole grid of three is known now"
    dispatch.reset().adopt(Profile(trials=[trial], fruitless={"double/float64@cpu": dated()}))
    call(100, took=0.1)
    assert len(budgets) == 1


def test_the_time_of_a_call_that_raises_counts(make_op, clock, budgets):
    op = make_op("double")

    def failing(a):
        clock.now += 1.0
        if len(a) == 3:
            raise ValueError("no")
        return a

    op.candidate("stock")(failing)
    op.candidate("other")(lambda a: a)
    routed = dispatch.route(op)
    for _ in range(7):
        with contextlib.suppress(ValueError):
            routed(torch.ones(3, 3, dtype=torch.float64))
    assert len(budgets) == 1


def test_a_calibration_near_a_problem_begins_with_it_and_goes_on_with_those_like_it(make_pair, monkeypatch):
    monkeypatch.setattr(timer, "compare", lambda calls, **_: dict.fromkeys(calls, Timing(1e-4)))
    op = make_pair("double")
    near = op.grid("quick", "float64", "cpu")[-1].replace(m=7, n=7)

    def measured(budget):
        found = calibrate([op], "quick", budget, ["cpu"], Profile(), dtypes=["float64"], near=near)
        return [trial.problem for trial in found.trials]

    first, *rest = measured(20.0)
    assert first == near
    assert len(rest) > 2
    assert near not in rest
    distances = [abs(op.coordinates(p)[0] - op.coordinates(near)[0]) for p in rest]
    assert distances == sorted(distances)
    assert measured(1e-6) == [], "a trial that takes longer than there is time does not begin"
