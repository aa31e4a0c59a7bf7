"""Predictions of models that are not factorised: means by iterations, what variances need when they are read."""

import pickle

import gpytorch
import pytest
import torch
from linear_operator.utils.errors import NotPSDError
from support.models import points, rough
from support.outcomes import count

import autokern
from autokern.core.decision import collecting
from autokern.density import systems
from autokern.hooks import memory
from autokern.prediction import factor_cache

N = 1100
MANY, FEW = 40, 4
"""Test points of which variances are read by a factor, and by iterations."""


@pytest.fixture(autouse=True)
def large(monkeypatch, fresh):
    """Few points are as many here as take iterations."""
    monkeypatch.setattr(memory, "_ITERATED", 1000)


def made(dtype=torch.float64, n=N):
    return rough(n, dtype, 1e-3).eval()


def exact(read, m, dtype=torch.float64):
    with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
        return read(made()(points(m, seed=1)))


def factor_of(model):
    return factor_cache.found(model.prediction_strategy)


def close(found, expected, atol=1e-4):
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fast", [False, True])
def test_a_mean_needs_no_factor_and_variances_make_one_when_they_are_read(dtype, fast):
    expected = exact(lambda posterior: (posterior.mean, posterior.variance), MANY)
    with autokern.enabled(), torch.no_grad(), gpytorch.settings.fast_pred_var(fast):
        model = made(dtype)
        seen = []
        with collecting(seen.extend):
            posterior = model(points(MANY, seed=1, dtype=dtype))
            close(posterior.mean, expected[0], atol=1e-3)
        assert factor_of(model) is None
        assert seen[-1].residual <= (1e-4 if dtype is torch.float32 else 1e-5)
        close(posterior.variance, expected[1], atol=1e-5)
        assert factor_of(model) is not None
        again = model(points(MANY, seed=1, dtype=dtype))
        close(again.mean, expected[0], atol=1e-3)
        close(again.variance, expected[1], atol=1e-5)


@pytest.mark.parametrize(
    ("m", "read"),
    [
        (FEW, lambda posterior: torch.stack((posterior.mean, posterior.variance))),
        (MANY, lambda posterior: posterior.covariance_matrix),
        (MANY, lambda posterior: torch.stack(posterior.confidence_region())),
        (MANY, lambda posterior: posterior[3:9].covariance_matrix),
        (MANY, lambda posterior: pickle.loads(pickle.dumps(posterior.lazy_covariance_matrix)).to_dense()),
    ],
)
def test_every_reading_is_that_of_a_factor_which_few_variances_do_without(m, read):
    expected = exact(read, m)
    with autokern.enabled(), torch.no_grad():
        model = made()
        close(read(model(points(m, seed=1))), expected, atol=1e-6 if m == FEW else 1e-4)
        assert (factor_of(model) is None) == (m == FEW)


@pytest.mark.parametrize("change", ["lengthscale", "data", "nothing"])
def test_variances_read_late_are_those_of_the_call(change):
    expected = exact(lambda posterior: posterior.variance, MANY)
    with autokern.enabled(), torch.no_grad():
        model = made()
        posterior = model(points(MANY, seed=1))
        if change == "lengthscale":
            model.covar_module.base_kernel.lengthscale = 0.1
        if change == "data":
            model.set_train_data(points(N, seed=5), torch.ones(N, dtype=torch.float64))
        close(posterior.variance, expected, atol=1e-5)


def test_covariances_without_a_factor_are_iterated(monkeypatch):
    def fails(strategy):
        raise NotPSDError("no factor")

    expected = exact(lambda posterior: posterior.variance, MANY)
    with autokern.enabled(), torch.no_grad():
        posterior = made()(points(MANY, seed=1))
        monkeypatch.setattr(factor_cache, "of", fails)
        close(posterior.variance, expected, atol=1e-5)


def test_gradients_by_test_points_are_those_of_a_factor():
    def slopes():
        x = points(MANY, seed=1).requires_grad_()
        made()(x).mean.sum().backward()
        return x.grad

    with gpytorch.settings.fast_computations(False, False, False):
        expected = slopes()
    with autokern.enabled():
        close(slopes(), expected, atol=1e-2)


def test_a_matrix_that_leaves_no_room_for_a_factor_is_not_formed(monkeypatch):
    monkeypatch.setattr(memory, "_ITERATED", 10**9)
    with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
        expected = made(n=3000)(points(MANY, seed=1)).mean
    with autokern.enabled(), autokern.using(memory="170MiB"), torch.no_grad():  # the matrix takes 69
        before = count("kernel_matmul")
        seen = []
        with collecting(seen.extend):
            close(made(n=3000)(points(MANY, seed=1)).mean, expected)
        assert seen[-1].preconditioner in ("pivoted", "vecchia")
        assert count("kernel_matmul") > before


def test_systems_on_which_iterations_fail_are_factorised(monkeypatch):
    monkeypatch.setattr(systems, "LONGEST", 1)
    expected = exact(lambda posterior: posterior.mean, MANY)
    with autokern.enabled(), torch.no_grad():
        close(made()(points(MANY, seed=1)).mean, expected, atol=1e-8)
