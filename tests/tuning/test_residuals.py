"""residuals.py: the Gaussian process on log times, its distances, and coefficients that are never negative."""

from __future__ import annotations

import math

import numpy as np
import pytest
from autokern.tuning.residuals import (
    Fit,
    correlation,
    distances,
    features_of,
    fit_coefficients,
    log_seconds,
    nearness,
    places_of,
    spread,
)

from autokern.core.problem import Features, Problem
from autokern.tuning import residuals


def places(*at: float) -> np.ndarray:
    found = np.zeros((len(at), 8))
    found[:, 0] = at
    return found


def fit(at, values, expected=0.09, noise=0.0, shift=0.0) -> Fit:
    count = len(at)
    like = correlation(distances(places(*at), places(*at)))
    return Fit(like, np.array(values), np.full(count, expected), np.full(count, noise), shift)


def asked(found: Fit, at, of, expected=0.09):
    return found.predict(distances(places(*at), places(*of)), np.full(len(at), expected))


def test_the_posterior_is_the_textbooks():
    at, new, values, shift, noise = (0.0, 1.0, 5.0), (0.5, 3.0), np.array([0.1, -0.2, 0.4]), 0.25, 0.05
    found = asked(fit(at, values, noise=noise, shift=shift), new, at)
    scale = (residuals._WORTH + (values**2 / 0.09).sum()) / (residuals._WORTH + 3)

    def covariance(a, b):
        r = math.sqrt(3) / residuals._LENGTHSCALE * np.abs(np.subtract.outer(a, b))
        return scale * 0.09 * (1 + r) * np.exp(-r) + shift

    inverse = np.linalg.inv(covariance(at, at) + (noise**2 + residuals.NUGGET**2) * np.eye(3))
    cross = covariance(new, at)
    assert found.mean == pytest.approx(cross @ inverse @ values)
    assert found.variance == pytest.approx(np.diag(covariance(new, new) - cross @ inverse @ cross.T))
    assert found.distance == pytest.approx([0.5, 2.0])


def test_near_a_measurement_it_is_the_measurement_and_far_away_the_expectation():
    found = asked(fit([0.0], [0.3]), [0.0, 1.0, 100.0], [0.0])
    assert found.mean[0] == pytest.approx(0.3, abs=0.01)
    assert 0 < found.mean[1] < found.mean[0]
    assert found.mean[2] == pytest.approx(0.0, abs=1e-9)
    assert math.sqrt(found.variance[0]) <= residuals.NUGGET
    assert found.variance[0] < found.variance[1] < found.variance[2]


def test_surprises_widen_what_is_expected_and_their_absence_narrows_it():
    at = [0.0, 20.0, 40.0, 60.0]
    calm, wild, one = (asked(fit(at[: len(v)], v), [500.0], at[: len(v)]) for v in ([0.0] * 4, [1.0, -1.0] * 2, [0.0]))
    assert calm.variance < one.variance < 0.09 < wild.variance


def test_a_shift_is_shared_by_all():
    found = asked(fit([0.0], [0.5], shift=0.25), [100.0], [0.0])
    assert found.mean[0] == pytest.approx(0.5 * 0.25 / (0.25 + 0.09), rel=0.35)
    assert asked(fit([0.0], [0.5]), [100.0], [0.0]).mean[0] == pytest.approx(0.0, abs=1e-9)


def test_noise_lets_go_of_the_measurement():
    one, other = (asked(fit([0.0], [0.3], noise=noise), [0.0], [0.0]) for noise in (0.0, 1.0))
    assert other.mean < 0.5 * one.mean
    assert other.variance > one.variance


def test_distances_are_in_octaves_with_words_apart(make_op):
    op = make_op("toy")
    base = Problem(op="toy", m=63, n=63, variant="rbf/same", grad="theta")
    changes = (
        {"variant": "rbf/same"},
        {"variant": "matern52/same"},
        {"variant": "matern52/cross"},
        {"grad": ""},
        {"dtype": "float32"},
    )
    found = distances(places_of(op, [base]), places_of(op, [base.replace(**change) for change in changes]))[0]
    word = residuals._WORD
    assert found == pytest.approx([0, word, word * math.sqrt(2), word, residuals._DTYPE])
    near = nearness(op, [base, *(base.replace(m=n, n=n) for n in (127, 511, 4095))])
    assert np.diag(near) == pytest.approx(1.0)
    assert near == pytest.approx(near.T)
    assert 1 > near[0, 1] > near[0, 2] > near[0, 3] > 0


def test_coefficients_are_found_again_and_never_negative(make_op):
    op = make_op("toy", features=lambda p: Features(calls=2, flops=float(p.m * p.n), bytes=8.0 * p.m))
    candidate = op.candidate("stock")(lambda a: a)
    stock, problems = op["stock"], [Problem(op="toy", m=m, n=n) for m in (1, 10, 1000) for n in (1, 100, 10_000)]
    assert candidate is not None
    truth = np.array([1e-6, 1e-9, 1e-8, 0.0])
    features = features_of(stock, problems)
    seconds = np.exp(log_seconds(truth, features))
    found = fit_coefficients(features, seconds)
    assert found == pytest.approx(truth, rel=1e-6)
    falling = fit_coefficients(features, seconds[::-1])
    assert falling.min() >= 0
    assert log_seconds(np.zeros(4), features) == pytest.approx(math.log(residuals._FLOOR))


def test_a_few_of_many_problems_are_spread_out(make_op):
    problems = [Problem(op="toy", m=n, n=n) for n in (8, 9, 10, 1000, 1001, 100_000)]
    op = make_op("toy")
    assert [problems[i].n for i in spread(op, problems, 3)] == [8, 1000, 100_000]
    assert spread(op, problems, 10) == list(range(6))
