"""What is kept serves only the values it was made of, also in fantasies; what is read late is that of its call."""

import copy
import pickle
import threading
from unittest import mock

import gpytorch
import pytest
import torch
from gpytorch import settings
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.models import exact_gp
from support import exact_models
from support.exact_models import assert_close, at, fantasy, moments, ours, points, predicted, refitted, regression
from support.outcomes import both
from support.threads import in_threads

import autokern
from autokern.core.registry import get
from autokern.prediction.inverse_factor import Conditioned
from autokern.runtime import dispatch

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


LATE_MODELS = exact_models.MODELS | {
    "sum of operators": lambda: regression(form=lambda k, x: k(x) + k(x)),
    "jitter in forward": lambda: regression(form=lambda k, x: k(x).add_jitter(1e-3)),
    # of a Kronecker product stock forgets the old values itself
    "independent": lambda: exact_models.Several("independent"),
    "hadamard": lambda: exact_models.Several("hadamard"),
}


@pytest.mark.thin("make")
@pytest.mark.parametrize("make", LATE_MODELS.values(), ids=LATE_MODELS)
def test_what_is_read_late_is_of_the_values_at_the_call(make):
    """Other changes, and another candidate: `read_after` of the differential table."""

    def read(how):
        with torch.no_grad():
            model = make()
            x, *task = exact_models.several_at(getattr(model, "kind", ""), 600)
            one, other = (model(x.to(model.train_targets), *task) for _ in range(2))
            how(model)
            return one.mean, one.variance, other.covariance_matrix

    expected = read(lambda model: None)
    with ours("lazy"):
        assert_close(read(exact_models.change), expected)


def counting(strength):
    """A constraint with a function of the user's, and its calls."""
    calls = []

    def transform(value):
        calls.append(1)
        return torch.nn.functional.softplus(value) * strength[0]

    return gpytorch.constraints.Positive(transform=transform, inv_transform=lambda y: y.expm1().log()), calls


@pytest.mark.parametrize("m", [20, 700])
@exact_models.stock_s()
def test_functions_of_the_users_in_kernels_of_the_library(m):
    strength = [1.0]
    constraint, calls = counting(strength)
    model = regression(kernel=ScaleKernel(RBFKernel(lengthscale_constraint=constraint)))
    first, posterior = model(points(m, seed=5)), model(points(m, seed=6))
    found = [first.mean, first.variance]
    strength[0] = 2.0
    return [*found, posterior.variance, model(points(m, seed=7)).variance, len(calls)]


def test_a_function_of_the_users_that_transforms_a_parameter_is_called_as_documented():
    def counted():
        constraint, calls = counting([1.0])
        model, found = regression(30, kernel=RBFKernel(lengthscale_constraint=constraint)), []
        mll, (x,) = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model), model.train_inputs
        for run in (
            lambda: mll(model(x), model.train_targets).backward(),
            lambda: model(x[:5] + 1).variance,
            lambda: model(x + 1).mean,
        ):
            model.train(not found)
            calls.clear()
            run()
            found.append(len(calls))
        return found

    (step, *predictions), (own, *more) = both(counted)
    assert own == step
    assert all(0 <= one - other <= 2 for one, other in zip(more, predictions, strict=True)), (more, predictions)


@each_candidate
@pytest.mark.parametrize("m", [3, 300])
@pytest.mark.parametrize("name", ["exact_predictive_mean", "exact_predictive_covar"])
@exact_models.stock_s()
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

    def predicted(dtype, whole=None, part=None):
        x, new = points(150) + 5000, (points(20, seed=5) + 5000).to(dtype)
        model = exact_models.Regression(x.to(dtype), exact_models.values(x - 5000).to(dtype))
        model.likelihood.noise = 1e-2
        with torch.no_grad():
            if whole:
                with autokern.using(force={"kernel_matrix": whole}):
                    model(new[:1]).mean
            with autokern.using(force={"kernel_matrix": part} if part else None):
                found = model(new)
            return torch.stack((found.mean, found.variance)).double()

    true = predicted(torch.float64)
    limits = (predicted(torch.float32) - true).abs().amax(-1)
    with ours():
        errors = (predicted(torch.float32, whole, part) - true).abs().amax(-1)
    assert (errors < 2 * limits).all()


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


@exact_models.stock_s(rtol=1e-06, atol=1e-07)
def test_noise_of_one_update_stays_with_it():
    """A Gaussian likelihood has no place for it, so that it must not be computed anew."""
    model = predicted(regression())
    grown = fantasy(model, points(1, seed=8), noise=torch.full((1,), 1e-5).double())
    grown.prediction_strategy._memoize_cache.pop(("mean_cache", ("ignore",), pickle.dumps({})), None)
    return moments(grown(points(1, seed=8)))


@pytest.mark.parametrize("model", ["ard", "float32", "batch"])
def test_a_long_stream_is_as_good_as_a_refit_and_its_models_stay_apart(model):
    with ours(), torch.no_grad():
        first = latest = predicted(exact_models.MODELS[model]())
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
    mean, covariance = exact_models.truth(refitted(imagined), x)
    assert_close(found, [mean, covariance.diagonal(), covariance], rtol=0, atol=1e-6)


def test_a_fantasy_keeps_the_hyperparameters_that_its_parent_had():
    with ours(), torch.no_grad():
        parent = predicted(regression())
        imagined = fantasy(parent, points(2, seed=7))
        expected = moments(refitted(imagined)(points(6, seed=8)))
        exact_models.change(parent)
        predicted(parent)
        assert_close(moments(imagined(points(6, seed=8))), expected)


def test_the_copies_that_fantasies_make_are_those_of_copy():
    """Containers that modules share stay shared, and subclasses of containers stay theirs."""
    model = regression()
    kernel = model.covar_module
    kernel.kept = kernel.raw_outputscale_constraint.kept = shared = []
    kernel.odd, kernel.held = Odd(), {"of": shared}
    kernel.register_forward_hook(print)

    def copied():
        found = exact_gp.deepcopy(model)
        of = found.covar_module
        assert of.kept is of.raw_outputscale_constraint.kept is of.held["of"] is not shared
        assert type(of.odd) is Odd
        parts = [(type(one), sorted(vars(one)), len(one._forward_hooks)) for one in found.modules()]
        return parts, [*map(type, vars(of).values())], dict(found.state_dict())

    theirs, ours = both(copied)
    assert_close(ours[2], theirs[2])
    assert ours[:2] == theirs[:2]
    with autokern.enabled():
        assert exact_gp.deepcopy is not copy.deepcopy
        assert exact_gp.deepcopy({"a": []}) == {"a": []}


class Odd(dict):
    """A container of a user's own."""


class Dropping(RBFKernel):
    """A kernel that drops a cache when it is copied."""

    def __getstate__(self):
        self.cache = None
        return {name: value for name, value in vars(self).items() if name != "cache"}

    def named_modules(self, *args, **kwargs):
        self.asked = getattr(self, "asked", 0) + 1
        return super().named_modules(*args, **kwargs)


@pytest.mark.parametrize("empty", [dict, list, set])
def test_containers_that_are_dropped_during_a_copy(empty):
    """Their addresses may be those of the next objects."""
    model = regression()
    kernel = model.covar_module.base_kernel = Dropping().double()

    def run():
        kernel.cache, kernel.asked = empty(), 0
        found = exact_gp.deepcopy(model)
        return sorted(vars(found.covar_module.base_kernel)), kernel.asked

    theirs, ours = both(run)
    assert theirs == ours
