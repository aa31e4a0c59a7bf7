"""What is kept serves only the values that it was made of, and what is read late is that of the call that made it."""

from __future__ import annotations

import threading

import gpytorch
import pytest
import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from support.exact_models import (
    MODELS,
    Regression,
    Several,
    assert_close,
    change,
    moments,
    ours,
    points,
    refitted,
    regression,
    several_at,
    stock_s,
    values,
)
from support.threads import in_threads

import autokern
from autokern.core.registry import get
from autokern.prediction.inverse_factor import Conditioned

pytestmark = pytest.mark.usefixtures("one_thread")
CANDIDATES = get("predict").names()
each_candidate = pytest.mark.parametrize("candidate", CANDIDATES)


def test_noise_written_through_data_is_not_seen_by_fast_variances():
    """As gpytorch's own tests want it: factor and covariances are of one time all the same."""
    with ours(), settings.fast_pred_var():
        model, x = regression(), points(7, seed=5)
        before = moments(model(x))
        model.likelihood.raw_noise.data.fill_(3.0)
        assert_close(moments(model(x)), before)
        with settings.fast_pred_var(False):
            assert_close(moments(model(x)), moments(refitted(model)(x)))


class Twice(Regression):
    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x) + self.covar_module(x))


class Jittered(Regression):
    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x).add_jitter(1e-3))


LATE_MODELS = MODELS | {
    "sum of operators": lambda: regression(kind=Twice),
    "jitter in forward": lambda: regression(kind=Jittered),
    "independent": lambda: Several("independent"),  # of a Kronecker product stock forgets the old values itself
    "hadamard": lambda: Several("hadamard"),
}


@pytest.mark.thin("make", "candidate")
@pytest.mark.parametrize("make", LATE_MODELS.values(), ids=LATE_MODELS)
@pytest.mark.parametrize("candidate", ["lazy", "lazy-product"])
def test_what_is_read_late_is_of_the_values_at_the_call(make, candidate):
    """Other changes, and other candidates: `read_after` of the differential table."""

    def read(how):
        with torch.no_grad():
            model = make()
            x, *task = several_at(getattr(model, "kind", ""), 600)
            one, other = (model(x.to(model.train_targets), *task) for _ in range(2))
            how(model)
            return one.mean, one.variance, other.covariance_matrix

    expected = read(lambda model: None)
    with ours(candidate):
        assert_close(read(change), expected)


@pytest.mark.parametrize("m", [20, 700])
@stock_s()
def test_functions_of_the_users_in_kernels_of_the_library(m):
    strength, calls = [1.0], []

    def transform(value):
        calls.append(1)
        return torch.nn.functional.softplus(value) * strength[0]

    constraint = gpytorch.constraints.Positive(transform=transform)
    model = regression(kernel=ScaleKernel(RBFKernel(lengthscale_constraint=constraint)))
    first, posterior = model(points(m, seed=5)), model(points(m, seed=6))
    found = [first.mean, first.variance]
    strength[0] = 2.0
    return [*found, posterior.variance, model(points(m, seed=7)).variance, len(calls)]


def test_a_function_of_the_users_that_transforms_a_parameter_is_called_as_documented():
    def counted():
        calls, found = [], []

        def transform(x):
            calls.append(1)
            return torch.nn.functional.softplus(x)

        constraint = gpytorch.constraints.GreaterThan(
            1e-4, transform=transform, inv_transform=lambda y: y.expm1().log()
        )
        model = regression(30, kernel=RBFKernel(lengthscale_constraint=constraint))
        mll, (x,) = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model), model.train_inputs
        for run in (
            lambda: mll(model(x), model.train_targets).backward(),
            lambda: model(x[:5] + 1).variance,
            lambda: model(x + 1).mean,
        ):
            model.train(not found)
            before = len(calls)
            run()
            found.append(len(calls) - before)
        return found

    step, *predictions = counted()
    with ours():
        own, *more = counted()
    assert own == step
    assert all(0 <= one - other <= 2 for one, other in zip(more, predictions, strict=True)), (more, predictions)


def test_a_strategy_of_the_users_is_left_alone():
    class Own(gpytorch.models.exact_prediction_strategies.DefaultPredictionStrategy):
        pass

    with ours():
        model = regression()
        model(points(9, seed=4))
        old = model.prediction_strategy
        own = Own(old.train_inputs, old.train_prior_dist, old.train_labels, old.likelihood)
        model.prediction_strategy = own
        change(model)
        moments(model(points(9, seed=4)))
        assert model.prediction_strategy is own


@each_candidate
@pytest.mark.parametrize("m", [3, 300])
@pytest.mark.parametrize("name", ["exact_predictive_mean", "exact_predictive_covar"])
@stock_s()
def test_a_function_that_is_put_on_one_strategy(candidate, m, name):
    model = regression()
    model(points(2))
    strategy = model.prediction_strategy
    stock = getattr(strategy, name)
    setattr(strategy, name, lambda *args: 2.0 * stock(*args))
    return moments(model(points(m, seed=5)))


@pytest.mark.thin("whole", "part")
@pytest.mark.parametrize("whole", ["stock", "gemm", "tiled"])
@pytest.mark.parametrize("part", ["stock", "gemm", "broadcast"])
def test_points_far_from_the_origin_whichever_candidates_serve(whole, part):
    """Covariances between training points, and of those with others, must err alike, or not at all."""

    def errors(force):
        found = []
        for dtype in (torch.float64, torch.float32):
            x, new = points(150) + 5000, points(20, seed=5) + 5000
            model = Regression(x, values(x - 5000))
            model.likelihood.noise = 1e-2
            model.to(dtype)
            model.set_train_data(x.to(dtype), values(x - 5000).to(dtype), strict=False)
            with autokern.using(force=force if dtype is torch.float32 else None), torch.no_grad():
                if force is None:
                    found.append(model(new.to(dtype)))
                    continue
                with autokern.using(force={"kernel_matrix": whole}):
                    model(new[:1].to(dtype)).mean
                found.append(model(new.to(dtype)))
        true, single = ([posterior.mean, posterior.variance] for posterior in found)
        return [((s.double() - t).abs().max() / t.abs().max()).item() for t, s in zip(true, single, strict=True)]

    limits = errors(None)
    with ours():
        for error, limit in zip(errors({"kernel_matrix": part}), limits, strict=True):
            assert error < 2 * limit


def test_one_alpha_for_all_threads_that_ask_at_once():
    k = torch.eye(300, dtype=torch.float64) * 2
    for _ in range(20):
        known = Conditioned(torch.linalg.cholesky(k), residual=torch.ones(300, dtype=torch.float64))
        barrier, found = threading.Barrier(4), []

        def ask(_, known=known, barrier=barrier, found=found):
            barrier.wait()
            found.append(known.alpha)

        in_threads(ask, range(4))
        for alpha in found:
            assert_close(alpha, torch.full_like(alpha, 0.5))
