"""The warnings and errors of docs/warnings.md, without autokern and with it."""

import contextlib
import warnings

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan
from linear_operator.utils import cholesky
from linear_operator.utils.warnings import NumericalWarning
from support.models import ExactModel, step

import autokern
from autokern.system import memory

pytestmark = pytest.mark.usefixtures("one_thread")

SIDES = pytest.mark.parametrize("on", [False, True])


def smooth(dtype: torch.dtype) -> ExactModel:
    """A model of 100 points that are nearly one, for its lengthscale, with little noise."""
    x = torch.linspace(0, 1, 100, dtype=dtype).unsqueeze(-1)
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=GreaterThan(1e-12))
    model = ExactModel(x, torch.sin(6 * x[:, 0]), likelihood=likelihood).to(dtype)
    likelihood.noise, model.covar_module.base_kernel.lengthscale = 1e-7, 2.0
    return model


@contextlib.contextmanager
def heard():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
        texts += [str(w.message) for w in told if issubclass(w.category, NumericalWarning)]


def served(on: bool) -> contextlib.AbstractContextManager[object]:
    return autokern.enabled() if on else contextlib.nullcontext()


def test_a_small_step_in_single_precision_needs_no_jitter():
    with heard() as told:
        stock = step(smooth(torch.float32))[0]
    assert any("A not p.d., added jitter" in text for text in told)
    double = smooth(torch.float64)
    double.load_state_dict(smooth(torch.float32).state_dict())
    truth = step(double)[0]
    with heard() as told, autokern.enabled(), autokern.using(force={"objective": "arrays"}):
        loss = step(smooth(torch.float32))[0]
        assert autokern.stats()["objective"] == {"arrays": 1}
    assert told == []
    assert abs(loss - truth) < 0.05 * truth.abs() < abs(stock - truth)


@SIDES
def test_variances_below_zero_are_floored_with_the_warning_of_the_library(on):
    model = smooth(torch.float32).eval()
    with served(on), heard() as told, torch.no_grad():
        variance = model(torch.linspace(0, 1, 50).unsqueeze(-1)).variance
    assert variance.min() == pytest.approx(1e-6)
    assert sum("Negative variance values detected" in text for text in told) == 1


@pytest.mark.skipif(not memory.has_huge(), reason="this system provides no huge pages")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_where_rounding_decides_on_jitter_a_factor_in_huge_pages_has_that_of_the_library(dtype):
    points = torch.rand(1024, 3, dtype=dtype, generator=torch.Generator().manual_seed(1))
    matrix, unit = points @ points.T, torch.finfo(dtype).eps * torch.eye(1024, dtype=dtype)
    low, high = 0.0, 1000.0  # between them, rounding starts to decide
    for _ in range(10):
        given = matrix + (low + high) / 2 * unit
        found = []
        for context in (contextlib.nullcontext(), autokern.using(force={"cholesky": "huge-pages"})):
            with served(len(found) > 0), context, heard() as told:
                found.append((cholesky.psd_safe_cholesky(given), told))
        (expected, stock), (lower, ours) = found
        assert stock == ours
        torch.testing.assert_close(lower, expected)
        low, high = ((low + high) / 2, high) if stock else (low, (low + high) / 2)


@SIDES
def test_a_mean_of_filled_observations_is_computed_and_told_of_once(on):
    x = torch.rand(20, 2)
    model = ExactModel(x, x.sum(-1).where(torch.arange(20) != 3, torch.nan)).eval()
    settings = gpytorch.settings
    with served(on), settings.observation_nan_policy("fill"), settings.fast_pred_var(), torch.no_grad():
        with pytest.warns(RuntimeWarning, match="policy .fill."):
            model(x[:3])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            _ = model(x[:3] + 0.1).variance, model(x[:3] + 0.2).mean
    assert told == []
