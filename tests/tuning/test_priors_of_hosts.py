"""cost_model.py with other hosts: they tell what is likely, by likeness, and this host's measurements correct them."""

from __future__ import annotations

import math

import pytest
from autokern.tuning.cost_model import CostModel, Kin

from autokern.core.problem import Features, Problem
from autokern.tuning import cost_model
from autokern.tuning.profile import Profile, Timing, Trial

SIZES = (16, 32, 64, 128, 256, 512)


def square(n: int) -> Problem:
    return Problem(op="toy", m=n, n=n)


@pytest.fixture
def op(make_op):
    made = make_op("toy", features=lambda p: Features(calls=1, flops=float(p.m * p.n)))
    for name in ("stock", "fast", "ours"):
        made.candidate(name)(lambda a: 2 * a)
    return made


def told(sizes=SIZES, scale=1.0, **ratios: float) -> Profile:
    trials = []
    for n in sizes:
        seconds = scale * (1e-5 + 1e-9 * n * n)
        timings = {name: Timing(seconds * ratio, ratio, 0.01, 5) for name, ratio in ratios.items()}
        trials.append(Trial(square(n), {"stock": Timing(seconds), **timings}))
    return Profile(trials=trials)


def model(*others: tuple[Profile, float], own: Profile | None = None) -> CostModel:
    kin = [Kin(CostModel(profile), likeness) for profile, likeness in others]
    return CostModel(own or Profile(), lambda device: kin)


def fast(found: CostModel, op, n: int = 90):
    return found.estimate(op, square(n), op.candidates)["fast"]


def test_an_equal_host_tells_the_ratio_but_is_no_measurement(op):
    found = model((told(fast=0.5), 1.0))
    assert fast(found, op).log_ratio == pytest.approx(math.log(0.5), abs=0.05)
    assert fast(found, op).sigma >= cost_model._EXPECTED_OF_KIN
    assert fast(found, op).distance == math.inf
    assert not found.knows(square(64))
    assert not found.measured("fast", square(64))


def test_unlike_hosts_are_believed_less(op):
    sigmas = [fast(model((told(fast=0.5), alike)), op).sigma for alike in (1.0, 0.6, 0.1)]
    assert sigmas == sorted(sigmas)
    assert sigmas[2] > 2 * sigmas[0]


def test_hosts_count_by_their_likeness(op):
    one, other = told(fast=0.5), told(fast=1.0)
    even, first, second = (
        fast(model((one, a), (other, b)), op).log_ratio for a, b in ((0.8, 0.8), (0.8, 0.2), (0.2, 0.8))
    )
    assert even == pytest.approx(0.5 * math.log(0.5), abs=0.03)
    assert first == pytest.approx(0.8 * math.log(0.5), abs=0.03)
    assert second == pytest.approx(0.2 * math.log(0.5), abs=0.03)


def test_where_hosts_disagree_the_deviation_is_larger(op):
    agreed = fast(model((told(fast=0.5), 0.8), (told(fast=0.5), 0.8)), op).sigma
    disputed = fast(model((told(fast=0.25), 0.8), (told(fast=1.0), 0.8)), op).sigma
    half = math.log(2.0)
    assert disputed == pytest.approx(math.hypot(agreed, half), rel=0.05)


def test_a_host_counts_where_it_has_measured(op):
    near, far = told(sizes=(80, 90, 100), fast=0.5), told(sizes=(2**14,), fast=1.0)
    assert fast(model((near, 0.5), (far, 0.5)), op).log_ratio < 0.7 * math.log(0.5)


def test_own_measurements_override_other_hosts_and_reach_as_far_as_they_are_alike(op):
    elsewhere = told(fast=0.5)
    here = model((elsewhere, 1.0), own=told(sizes=(64, 90), fast=1.5))
    assert fast(here, op, 90).log_ratio == pytest.approx(math.log(1.5), abs=0.05)
    assert fast(here, op, 90).sigma < 0.1
    assert fast(here, op, 90).distance == pytest.approx(0.0)
    assert math.log(0.5) < fast(here, op, 600).log_ratio < math.log(1.5)
    assert fast(here, op, 2**20).log_ratio == pytest.approx(math.log(0.5), abs=0.3)
    assert fast(here, op, 2**20).sigma > fast(here, op, 600).sigma > fast(here, op, 90).sigma


def test_a_slower_machine_shifts_all_its_times_and_no_ratio(op):
    here = model((told(fast=0.5), 0.9), own=told(sizes=(16, 64), scale=3.0, fast=0.5))
    found = here.estimate(op, square(512), op.candidates)
    expected = 3.0 * (1e-5 + 1e-9 * 512 * 512)
    assert found["stock"].seconds == pytest.approx(expected, rel=0.25)
    assert found["fast"].log_ratio == pytest.approx(math.log(0.5), abs=0.05)


def test_what_no_other_host_measured_is_fitted_here(op):
    here = model((told(fast=0.5), 0.9), own=told(ours=0.7, fast=0.5))
    found = here.estimate(op, square(90), op.candidates)
    assert found["ours"].log_ratio == pytest.approx(math.log(0.7), abs=0.05)
    assert set(model((told(fast=0.5), 0.9)).estimate(op, square(90), op.candidates)) == {"stock", "fast"}


def test_hosts_of_another_device_tell_nothing(op):
    found = CostModel(Profile(), lambda device: [Kin(CostModel(told(fast=0.5)), 1.0)] if device == "cpu" else [])
    assert found.estimate(op, square(64).replace(device="cuda"), op.candidates) == {}
    assert found.estimate(op, square(64), op.candidates)


def test_never_won_needs_many_trials_elsewhere_and_none_here(op):
    lost, won = told(fast=1.2), told(sizes=(99,), fast=0.9)
    assert model((lost, 0.5)).never_won("fast", square(64), len(SIZES))
    assert not model((lost, 0.5)).never_won("fast", square(64), len(SIZES) + 1)
    assert model((lost, 0.5), (lost, 0.5)).never_won("fast", square(64), 2 * len(SIZES))
    assert not model((lost, 0.5), (won, 0.5)).never_won("fast", square(64), len(SIZES))
    assert not model((lost, 0.5), own=won).never_won("fast", square(64), len(SIZES))
    assert model((told(fast=1.02), 0.5)).never_won("fast", square(64), 1) is False, "as fast as any"
