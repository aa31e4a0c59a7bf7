"""forest.py: what leaves hold of trials: measured, left out as hopeless, never measured, unable, noisy, and none."""

from __future__ import annotations

import math

import msgspec
import pytest
from support.bases import fit_base
from support.synthetic import square, with_candidates

from autokern.core.problem import Problem
from autokern.tuning.forest import Forest, fit_own
from autokern.tuning.profile import Timing, Trial

SIZES = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@pytest.fixture
def op(make_op):
    return with_candidates(make_op)


def trial(problem: Problem, noise: float = 0.005, **ratios: float) -> Trial:
    timings = {"stock": Timing(1e-3)}
    for name, ratio in ratios.items():
        rough = 1e-4 if name == "sloppy" else None
        timings[name.replace("_", "-")] = Timing(1e-3 * ratio, ratio, noise, 5, relative_error=rough)
    return Trial(problem, timings)


def host(sizes=SIZES, more=None, **ratios) -> list[Trial]:
    """The trials of one host: ratios are numbers, or functions of the size."""
    numbers = [{name: r(n) if callable(r) else r for name, r in ratios.items()} for n in sizes]
    return [trial(square(n, **(more or {})), **found) for n, found in zip(sizes, numbers, strict=True)]


def ratio(forest: Forest, problem: Problem, name: str = "fast") -> float | None:
    found = forest.estimates(problem).get(name)
    return None if found is None else math.exp(found.log_ratio)


def test_a_tree_follows_the_sizes(op):
    found = fit_base(op, [host(fast=lambda n: 0.5 if n < 100 else 1.1)] * 3)
    assert [ratio(found, square(n)) for n in (20, 64, 130, 700)] == pytest.approx([0.5, 0.5, 1.1, 1.1], rel=0.01)
    assert any(96 <= size < 128 for size in found.sizes)


def test_hosts_that_never_measured_a_candidate_say_nothing_of_it(op):
    """One that lacks a library measured stock and others; that is no sign that the library is slow."""
    found = fit_base(op, [host(fast=0.5, other=0.8), host(other=0.8), host(other=0.8)])
    assert ratio(found, square(64)) == pytest.approx(0.5, rel=0.01)


def test_a_candidate_that_a_host_left_out_stays_pessimistic(op):
    """It was left out where other hosts had found it hopeless; only the others are measured there."""
    left_out = [t if t.problem.n < 100 else trial(t.problem, other=1.0) for t in host(fast=0.5, other=1.0)]
    found = fit_base(op, [left_out] * 2)
    assert ratio(found, square(32)) == pytest.approx(0.5, rel=0.05)
    assert ratio(found, square(700)) == pytest.approx(1.3, rel=0.01)
    slower = [t if t.problem.n < 100 else trial(t.problem, other=2.0) for t in host(fast=0.5, other=1.0)]
    assert ratio(fit_base(op, [slower] * 2), square(700)) == pytest.approx(2.0, rel=0.01), "no better than the worst"


def test_problems_that_a_candidate_cannot_serve_say_nothing_of_it(op):
    tall = [trial(square(n).replace(m=4 * n), fast=1.0, tall_only=0.5) for n in SIZES]
    found = fit_base(op, [[*tall, *host(fast=1.0)]])
    assert ratio(found, square(64).replace(m=256), "tall-only") == pytest.approx(0.5, rel=0.01)
    assert ratio(found, square(64), "tall-only") in (None, pytest.approx(0.5, rel=0.01))


def test_noisy_trials_weigh_less(op):
    """Quiet ones tell of sizes, and more distinct but noisy ones of dtypes: there is room for one split."""
    trials = []
    for dtype, other in (("float32", 0.9), ("float64", 0.3)):
        for n, ratio_here in ((20, 0.5), (21, 0.5), (600, 0.8), (700, 0.8)):
            trials.append(trial(square(n, dtype=dtype), fast=ratio_here, other=1.0))
        trials += [trial(square(n, dtype=dtype), 1.0, fast=other, other=1.0) for n in (22, 650)]
    noiseless = [trial(t.problem, fast=t.timings["fast"].ratio, other=1.0) for t in trials]
    assert fit_base(op, [trials]).base.feature[0] in (0, 1, 2, 6)
    assert fit_base(op, [noiseless]).base.feature[0] == 7, "the dtype"


@pytest.fixture
def shipped(op):
    return fit_base(op, [host(fast=0.8, other=1.2)] * 2)


def test_own_trials_correct_the_base(op, shipped):
    own = fit_own(op, host(SIZES[::2], fast=0.4, other=1.2), shipped)
    for n in (16, 24, 40, 64, 200, 1024):
        assert ratio(own, square(n)) == pytest.approx(0.4, rel=0.02)
        assert ratio(own, square(n), "other") == pytest.approx(1.2, rel=0.02)
    assert own.estimates(square(64))["fast"].source == "measured"
    assert own.trials == {"float64": 7}
    assert own.base == shipped.base
    assert own.is_whole


def test_a_candidate_that_is_gone_is_no_obstacle(op, shipped):
    gone = msgspec.structs.replace(shipped, candidates=[*shipped.candidates, "gone"])
    trials = [trial(square(n), fast=0.5, **({"gone": 0.1} if n < 100 else {})) for n in SIZES]
    assert ratio(fit_own(op, trials, gone), square(64)) == pytest.approx(0.5, rel=0.02)


def test_a_candidate_that_own_trials_left_out_is_no_faster_than_the_base_says(op, shipped):
    """Left out as hopeless: what other hosts found of it holds on, or is not pessimistic enough."""
    own = fit_own(op, host(fast=0.8), shipped)
    assert own.estimates(square(64))["other"] == shipped.estimates(square(64))["other"], "never measured here"
    some = [*host(SIZES[::2], fast=0.8, other=0.9), *host(SIZES[1::2], fast=0.8)]
    own = fit_own(op, some, shipped)
    assert ratio(own, square(SIZES[2]), "other") == pytest.approx(0.9, rel=0.02)
    assert ratio(own, square(SIZES[3]), "other") >= 1.19


@pytest.mark.parametrize("name", ["sloppy", "slow_start"])
def test_a_candidate_that_only_some_calibrations_measure_is_not_hopeless_in_the_others(op, shipped, name):
    """A quick one measures nothing that compiles, and a usual one nothing of lower precision."""
    trials = [*host(SIZES[::2], fast=0.8, **{name: 0.3}), *host(SIZES[1::2], fast=0.8)]
    own = fit_own(op, trials, shipped)
    for n in SIZES[:-1]:
        assert ratio(own, square(n), name.replace("_", "-")) in (None, pytest.approx(0.3, rel=0.02))
    assert ratio(own, square(SIZES[0]), name.replace("_", "-")) == pytest.approx(0.3, rel=0.02)


def test_no_trials_and_trials_that_compare_nothing_give_nothing(op, shipped):
    alone, none = Trial(square(64), {"stock": Timing(1.0)}), Trial(square(64), {})
    without = Trial(square(64), {"fast": Timing(1.0), "other": Timing(1.0)})
    unknown = Trial(square(64), {"stock": Timing(1.0), "gone": Timing(1.0)})
    for trials in ([], [alone], [none], [without], [unknown], [alone, none, without, unknown]):
        assert fit_base(op, [trials]) is None
        assert fit_own(op, trials, None) is None
        assert fit_own(op, trials, shipped) is shipped
    assert fit_base(op, []) is fit_base(op, [[], []]) is None


def test_a_single_trial_is_enough_for_its_like_and_for_nothing_far_off(op, shipped):
    base, own = fit_base(op, [[trial(square(64), fast=0.5)]]), fit_own(op, [trial(square(64), fast=0.5)], None)
    for forest in (base, own):
        assert ratio(forest, square(64)) == pytest.approx(0.5, rel=0.01)
        assert forest.estimates(square(256)) == {}
        assert forest.is_whole
        assert forest.sizes == set()
    assert base.estimates(square(64))["fast"].sigma > 0.2, "one trial of one host tells little"
    assert ratio(fit_own(op, [trial(square(64), fast=0.5)], shipped), square(64)) == pytest.approx(0.5, rel=0.01)
