"""plans.py: the next trial removes most expected regret per second, and has the candidates that may win."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from autokern.tuning.cost_model import CostModel, Kin
from autokern.tuning.plans import Pool

from autokern.core.problem import Features, Problem
from autokern.tuning import plans
from autokern.tuning.profile import Profile, Timing, Trial

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)


def features(problem):
    return Features(calls=1, flops=float(problem.m * problem.n), bytes=8.0 * problem.m * problem.n)


@pytest.fixture
def make(make_op):
    """Return a maker of an op on square matrices with candidates of these accuracies."""

    def make(**classes: str):
        op = make_op(
            "toy",
            features=features,
            grid=lambda level, dtype, device: [square(n, dtype=dtype, device=device) for n in SIZES],
        )
        for name, accuracy in {"stock": "same", **classes}.items():
            op.candidate(name, accuracy=accuracy)(lambda a: 2 * a)
        return op

    return make


def square(n: int, **more) -> Problem:
    return Problem(op="toy", m=n, n=n, **more)


def told(sizes=SIZES, noise=0.01, scale=1.0, **ratios: float) -> Profile:
    """Return a profile in which each candidate takes one ratio of stock's time everywhere."""
    trials = []
    for n in sizes:
        seconds = scale * (1e-5 + 1e-9 * n * n)
        timings = {name: Timing(seconds * ratio, ratio, noise, 5) for name, ratio in ratios.items()}
        trials.append(Trial(square(n), {"stock": Timing(seconds), **timings}))
    return Profile(trials=trials)


def kin_of(*profiles: Profile, likeness: float = 1.0):
    return lambda device: [Kin(CostModel(profile), likeness) for profile in profiles]


class Given(Pool):
    sizes: tuple[int, ...] = ()

    def _drawn(self) -> list[Problem]:
        return [square(n) for n in self.sizes]


def pool_of(op, sizes=SIZES, **options) -> Pool:
    return type("Given", (Given,), {"sizes": sizes})(op, "cpu", "quick", ["float64"], **options)


@pytest.mark.parametrize("mean", [-2.0, -0.1, 0.0, 0.3, 5.0])
@pytest.mark.parametrize("sigma", [0.0, 1e-3, 0.2, 1.5])
def test_the_gain_that_is_expected(mean, sigma):
    if sigma == 0:
        assert plans._exceeding(mean, sigma) == max(mean, 0.0)
        return
    x = np.linspace(mean - 12 * sigma, mean + 12 * sigma, 200_001)
    density = np.exp(-0.5 * ((x - mean) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
    exact = float((np.maximum(x, 0) * density).sum() * (x[1] - x[0]))
    assert plans._exceeding(mean, sigma) == pytest.approx(exact, rel=1e-6, abs=1e-9)


def test_nothing_promises_much_where_much_is_known_and_everything_where_nothing_is(make):
    op, problem = make(fast="same"), pool_of
    known, none = CostModel(told(fast=0.5)), CostModel(Profile())
    assert pool_of(op).expected_regret(none) == plans._UNKNOWN
    assert problem(op).expected_regret(known) < 1e-3
    close = CostModel(told(fast=0.99, noise=0.3))
    assert pool_of(op).expected_regret(known) < pool_of(op).expected_regret(close) < plans._UNKNOWN


def test_the_first_trial_removes_most_regret_per_second_and_the_next_ones_leave_out_what_it_tells(make):
    op, model = make(fast="same"), CostModel(Profile())
    asks = pool_of(op).asks(model, {}, math.inf, count=100)
    assert {ask.problem for ask in asks} == set(map(square, SIZES))
    assert all(a.promise >= b.promise > 0 for a, b in itertools.pairwise(asks))
    alone = {p: pool_of(op, [p.n]).asks(model, {}, math.inf)[0] for p in (a.problem for a in asks)}
    assert asks[0].removed > alone[asks[0].problem].removed, "it tells of its neighbours too"
    assert asks[-1].removed < alone[asks[-1].problem].removed, "its neighbours have told of it"


def test_a_measured_neighbour_takes_the_promise(make):
    op = make(fast="same")
    model = CostModel(told(sizes=(16, 32, 64), fast=0.5))
    (ask,) = pool_of(op).asks(model, {square(n): {"stock", "fast"} for n in (16, 32, 64)}, math.inf)
    assert ask.problem.n > 64


def test_a_trial_that_does_not_fit_the_time_is_left_out(make):
    op, model = make(fast="same"), CostModel(told(fast=0.9, noise=0.2))
    every = pool_of(op).asks(model, {}, math.inf, count=100)
    middle = sorted(ask.seconds for ask in every)[4]
    some = pool_of(op).asks(model, {}, middle, count=100)
    assert 0 < len(some) < len(every)
    assert all(ask.seconds <= middle for ask in some)
    assert [ask.seconds for ask in sorted(every, key=lambda a: a.problem.n)] == sorted(a.seconds for a in every)


def test_what_was_disturbed_is_asked_again_once(make):
    op, model = make(fast="same"), CostModel(Profile())
    pool = pool_of(op, (16, 32))
    pool.skipped.update(map(square, (16, 32)))
    assert not pool.was_disturbed
    assert pool.asks_again(model, {}, math.inf) == []
    pool.disturbed.append(square(16))
    assert pool.was_disturbed
    assert [ask.problem for ask in pool.asks_again(model, {}, math.inf)] == [square(16)]
    pool.skipped.add(square(16))
    pool.disturbed.append(square(16))
    assert pool.asks_again(model, {}, math.inf) == []
    assert pool.was_disturbed


def drawn(op, model, **options):
    pool = Pool(op, "cpu", "quick", ["float64"], **options)
    return {c.name for ask in pool.asks(model, {}, math.inf, count=100) for c in ask.candidates}


def test_a_candidate_without_a_chance_has_no_place_in_a_trial(make):
    op = make(fast="same", slow="same")
    model = CostModel(told(fast=0.9, slow=3.0, noise=0.3))
    assert drawn(op, model) == {"stock", "fast"}
    assert drawn(op, CostModel(told(fast=0.5, slow=3.0))) == set(), "nothing is left to learn"
    assert "slow" in drawn(op, CostModel(told(sizes=(16,), fast=0.5, slow=1.05, noise=0.5)))
    assert drawn(op, CostModel(Profile())) == {"stock", "fast", "slow"}


def test_what_never_won_elsewhere_is_measured_only_on_request(make):
    op = make(fast="same", loser="same")
    sizes = range(100, 100 + plans._NEVER)
    kin = kin_of(told(sizes=sizes, fast=0.97, loser=1.04, noise=0.2), likeness=0.3)
    model = CostModel(Profile(), kin)
    assert model.never_won("loser", square(64), plans._NEVER)
    assert drawn(op, model) == {"stock", "fast"}
    assert drawn(op, model, thorough=True) == {"stock", "fast", "loser"}
    few = CostModel(Profile(), kin_of(told(sizes=sizes[1:], fast=0.97, loser=1.04), likeness=0.3))
    assert drawn(op, few) == {"stock", "fast", "loser"}, "too few trials to tell"
    here = CostModel(told(sizes=(64,), fast=1.0, loser=0.8), kin)
    assert not here.never_won("loser", square(64), plans._NEVER), "it has won here"


def test_lower_precision_takes_no_place_of_candidates_within_the_bound(make):
    op = make(fast="same", other="same", rough="approximate")
    model = CostModel(told(fast=0.5, other=0.51, noise=0.1, rough=0.1))
    found = drawn(op, model, accuracy="approximate")
    assert {"stock", "fast", "other"} <= found, "they are what is chosen by default"
    assert drawn(op, model) == {"stock", "fast", "other"}
    unknown = CostModel(told(fast=0.5, other=0.9))
    assert "rough" in drawn(op, unknown, accuracy="approximate")
    rough = Pool(op, "cpu", "quick", ["float64"], accuracy="approximate")
    assert rough.expected_regret(CostModel(told(fast=0.5, other=0.9, rough=0.1))) < 1e-3, "a clear gain is no regret"


def test_what_is_banned_promises_nothing(make):
    op = make(fast="same")
    kin = kin_of(told(fast=0.9, noise=0.5), likeness=0.1)
    banned: set[str] = set()
    pool = Pool(op, "cpu", "quick", ["float64"], banned=lambda candidate, problem: candidate.name in banned)
    model = CostModel(Profile(), kin)
    assert pool.asks(model, {}, math.inf)
    assert pool.expected_regret(model) > 0
    banned.add("fast")
    assert pool.asks(model, {}, math.inf) == []
    assert pool.expected_regret(model) == pool.expected_regret(CostModel(Profile())) == 0.0


def test_the_problem_at_hand_comes_first_and_what_is_near_to_it_counts(make):
    op, near = make(fast="same"), square(300)
    pool = pool_of(op, near=near)
    first, second, *rest = pool.asks(CostModel(Profile()), {}, math.inf, count=100)
    assert first.problem == near
    assert len(rest) == len(SIZES) - 1
    assert second.problem.n in (128, 256, 512)
    large = square(5000)
    slow = pool_of(op, [16], near=large).asks(CostModel(told(fast=0.9, noise=0.3)), {}, 1e-2)
    assert [ask.problem for ask in slow] == [square(16)], "the one at hand does not fit the time"


def test_an_op_without_a_choice_has_no_plan(make):
    pool = Pool(make(), "cpu", "quick", ["float64"])
    assert pool.able == {}
    assert pool.asks(CostModel(Profile()), {}, math.inf) == []
    assert pool.expected_regret(CostModel(Profile())) == 0.0


def test_a_measured_problem_is_open_again_for_a_candidate_that_is_new_and_may_win(make):
    """A package that is installed later is measured too, and so are candidates that compile in a full calibration."""
    op = make(fast="same", slow="same")
    pool, model = Pool(op, "cpu", "quick", ["float64"]), CostModel(told(fast=0.5, slow=3.0))
    known = {problem: {"stock", "fast"} for problem in pool.able}
    assert pool.asks(model, known, math.inf) == [], "the slow one has no chance"
    op.candidate("new")(lambda a: 2 * a)
    pool = Pool(op, "cpu", "quick", ["float64"])
    (ask,) = pool.asks(model, {problem: {"stock", "fast"} for problem in pool.able}, math.inf)
    assert {c.name for c in ask.candidates} == {"stock", "fast", "new"}
    assert pool.asks(model, {problem: {"stock", "fast", "new"} for problem in pool.able}, math.inf) == []
