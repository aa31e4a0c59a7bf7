"""Fantasies of exact models: predictions, gradients, what they share with their parents, and what stays stock."""

from __future__ import annotations

import gc
import pickle
from unittest import mock

import psutil
import pytest
import torch
from support.exact_models import (
    MODELS,
    assert_close,
    at,
    change,
    fantasy,
    fixed_noise,
    moments,
    ours,
    points,
    predicted,
    refitted,
    regression,
    stock_s,
    truth,
)

from autokern.runtime import dispatch

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("candidate", ["stock", "rows"])
def test_noise_of_more_dimensions_than_points_is_refused_as_in_the_library(candidate):
    model = predicted(regression(likelihood=fixed_noise()))
    several = torch.full((5, 2), 0.1).double()
    with ours(candidate, "fantasy"), pytest.raises(RuntimeError, match="same number of dimensions"):
        fantasy(model, points(2, seed=7), several, noise=several)


@stock_s(rtol=1e-06, atol=1e-07)
def test_noise_of_one_update_stays_with_it():
    """A Gaussian likelihood has no place for it, so that it must not be computed anew."""
    model = predicted(regression())
    grown = fantasy(model, points(1, seed=8), noise=torch.full((1,), 1e-5).double())
    grown.prediction_strategy._memoize_cache.pop(("mean_cache", ("ignore",), pickle.dumps({})), None)
    return moments(grown(points(1, seed=8)))


@pytest.mark.parametrize("model", ["ard", "float32", "batch"])
def test_a_long_stream_is_as_good_as_a_refit_and_its_models_stay_apart(model):
    with ours(), torch.no_grad():
        first = latest = predicted(MODELS[model]())
        lead = first.train_inputs[0].shape[:-2]
        before = moments(first(at(first, 6, 8)))
        for seed in range(100 if model == "ard" else 30):
            latest = fantasy(latest, points(*lead, 1 + seed % 2, seed=100 + seed))
        other = fantasy(first, points(*lead, 1, seed=250))
        for one in (latest, other):
            assert_close(moments(one(at(one, 6, 8))), moments(refitted(one)(at(one, 6, 8))))
        assert_close(moments(first(at(first, 6, 8))), before, rtol=0, atol=0)
    assert "stock" not in dispatch.stats()["fantasy"]


@pytest.mark.usefixtures("trusted")
def test_fantasies_of_large_models_are_exact_and_take_no_qr():
    model, x = regression(850), points(12, seed=8)
    with ours(), torch.no_grad(), mock.patch("torch.linalg.qr", side_effect=AssertionError("QR")):
        imagined = fantasy(fantasy(predicted(model), points(2, seed=7)), points(1, seed=9))
        posterior = imagined(x)
        found = [posterior.mean, posterior.variance, posterior.covariance_matrix]
    mean, covariance = truth(refitted(imagined), x)
    assert_close(found, [mean, covariance.diagonal(), covariance], rtol=0, atol=1e-6)


def test_a_fantasy_keeps_the_hyperparameters_that_its_parent_had():
    with ours(), torch.no_grad():
        parent = predicted(regression())
        imagined = fantasy(parent, points(2, seed=7))
        expected = moments(refitted(imagined)(points(6, seed=8)))
        change(parent)
        predicted(parent)
        assert_close(moments(imagined(points(6, seed=8))), expected)


@pytest.mark.slow
def test_memory_is_flat_over_updates_that_are_dropped():
    process, resident = psutil.Process(), []
    with ours(), torch.no_grad():
        model = predicted(regression(200))
        for i in range(300):
            grown = fantasy(model, points(1, seed=i))
            grown(points(9, seed=4)).variance
            del grown
            if i % 20 == 0:
                gc.collect()
                resident.append(process.memory_info().rss)
    assert max(resident[8:]) - resident[7] < 8 * 2**20
