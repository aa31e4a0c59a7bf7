"""forest.py: what leaves hold of trials: measured, left out as hopeless, never measured, unable, noisy, and none."""

import math

import msgspec
import pytest
from support.bases import fit_base
from support.synthetic import square, timed, trials, with_candidates

from autokern.core.problem import Problem
from autokern.tuning.forest import Forest, fit_own
from autokern.tuning.profile import Timing, Trial

SIZES = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@pytest.fixture
def op(make_op):
    return with_candidates(make_op)


def host(sizes=SIZES, **ratios) -> list[Trial]:
    """The trials of one host: ratios are numbers, or functions of the size."""
    return trials(ratios, sizes)


SMALL, LARGE = ([n for n in SIZES if (n < 100) is small] for small in (True, False))


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


@pytest.mark.parametrize(("other", "pessimistic"), [(1.0, 1.3), (2.0, 2.0)], ids=["by a margin", "as the worst"])
def test_a_candidate_that_a_host_left_out_stays_pessimistic(op, other, pessimistic):
    """It was left out where other hosts had found it hopeless; only the others are measured there."""
    found = fit_base(op, [[*host(SMALL, fast=0.5, other=1.0), *host(LARGE, other=other)]] * 2)
    assert ratio(found, square(32)) == pytest.approx(0.5, rel=0.05)
    assert ratio(found, square(700)) == pytest.approx(pessimistic, rel=0.01)


def test_problems_that_a_candidate_cannot_serve_say_nothing_of_it(op):
    tall = [Trial(square(n).replace(m=4 * n), timed({"fast": 1.0, "tall-only": 0.5})) for n in SIZES]
    found = fit_base(op, [[*tall, *host(fast=1.0)]])
    assert ratio(found, square(64).replace(m=256), "tall-only") == pytest.approx(0.5, rel=0.01)
    assert ratio(found, square(64), "tall-only") in (None, pytest.approx(0.5, rel=0.01))


@pytest.mark.parametrize(("noise", "features"), [(1.0, (0, 1, 2, 6)), (0.005, (7,))], ids=["noisy", "quiet"])
def test_noisy_trials_weigh_less(op, noise, features):
    """Quiet ones tell of sizes, and more distinct but noisy ones of dtypes: there is room for one split."""
    told = []
    for dtype, other in (("float32", 0.9), ("float64", 0.3)):
        told += trials({"fast": lambda n: 0.5 if n < 100 else 0.8, "other": 1.0}, (20, 21, 600, 700), dtype=dtype)
        told += trials({"fast": other, "other": 1.0}, (22, 650), noise, dtype=dtype)
    assert fit_base(op, [told]).base.feature[0] in features


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
    own = fit_own(op, [*host(SMALL, fast=0.5, gone=0.1), *host(LARGE, fast=0.5)], gone)
    assert ratio(own, square(64)) == pytest.approx(0.5, rel=0.02)


def test_a_candidate_that_own_trials_left_out_is_no_faster_than_the_base_says(op, shipped):
    """Left out as hopeless: what other hosts found of it holds on, or is not pessimistic enough."""
    own = fit_own(op, host(fast=0.8), shipped)
    assert own.estimates(square(64))["other"] == shipped.estimates(square(64))["other"], "never measured here"
    own = fit_own(op, [*host(SIZES[::2], fast=0.8, other=0.9), *host(SIZES[1::2], fast=0.8)], shipped)
    assert ratio(own, square(SIZES[2]), "other") == pytest.approx(0.9, rel=0.02)
    assert ratio(own, square(SIZES[3]), "other") >= 1.19


@pytest.mark.parametrize("name", ["sloppy", "slow-start"])
def test_a_candidate_that_only_some_calibrations_measure_is_not_hopeless_in_the_others(op, shipped, name):
    """A quick one measures nothing that compiles, and a usual one nothing of lower precision."""
    own = fit_own(op, [*host(SIZES[::2], fast=0.8, **{name: 0.3}), *host(SIZES[1::2], fast=0.8)], shipped)
    found = [ratio(own, square(n), name) for n in SIZES[:-1]]
    assert found[0] == pytest.approx(0.3, rel=0.02)
    assert all(known in (None, pytest.approx(0.3, rel=0.02)) for known in found)


def test_no_trials_and_trials_that_compare_nothing_give_nothing(op, shipped):
    known = [{"stock"}, set(), {"fast", "other"}, {"stock", "gone"}]
    empty = [Trial(square(64), dict.fromkeys(names, Timing(1.0))) for names in known]
    for told in ([], *([one] for one in empty), empty):
        assert fit_base(op, [told]) is None
        assert fit_own(op, told, None) is None
        assert fit_own(op, told, shipped) is shipped
    assert fit_base(op, []) is fit_base(op, [[], []]) is None


def test_a_single_trial_is_enough_for_its_like_and_for_nothing_far_off(op, shipped):
    one = host([64], fast=0.5)
    base, own = fit_base(op, [one]), fit_own(op, one, None)
    for forest in (base, own):
        assert ratio(forest, square(64)) == pytest.approx(0.5, rel=0.01)
        assert forest.estimates(square(256)) == {}
        assert forest.is_whole
        assert forest.sizes == set()
    assert base.estimates(square(64))["fast"].sigma > 0.2, "one trial of one host tells little"
    assert ratio(fit_own(op, one, shipped), square(64)) == pytest.approx(0.5, rel=0.01)
