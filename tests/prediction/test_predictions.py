"""Predictions of exact models: what is read of them, gradients, and what is computed, against stock."""

import contextlib
import copy
import functools
import pickle
import warnings
from unittest import mock

import gpytorch
import pytest
import torch
from gpytorch import kernels, settings
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.operators import AddedDiagLinearOperator, ConstantDiagLinearOperator, DenseLinearOperator
from linear_operator.utils.warnings import NumericalWarning
from support import exact_models
from support.exact_models import BATCH, Regression, Several, assert_close, at, moments, ours, points, regression, values
from support.fakes import unpickled_without_autokern

from autokern.core.registry import get
from autokern.hooks import memory
from autokern.hooks import prediction as seam
from autokern.prediction.inverse_factor import Conditioned
from autokern.prediction.lazy_covariance import PosteriorCovariance

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The input matches the stored training data"),
]
CANDIDATES = get("predict").names()
SMALL = [name for name in CANDIDATES if name != "rows"]
each_candidate = pytest.mark.parametrize("candidate", SMALL)
each_of_all = pytest.mark.parametrize("candidate", CANDIDATES)
each_way = pytest.mark.parametrize("fast", [False, True], ids=["solve", "fast"])
either_cache = pytest.mark.parametrize("detached", [True, False], ids=["detached", "attached"])


@pytest.mark.parametrize("fixed", [True, False])
@each_candidate
@exact_models.stock_s()
def test_noise_with_a_batch_that_the_kernel_has_not(fixed, candidate):
    x, levels = points(30), torch.tensor([[0.1], [0.4]]).double()
    noise = FixedNoiseGaussianLikelihood(levels.expand(2, 30).clone()) if fixed else None
    model = Regression(x, torch.stack((values(x), -values(x))), None, noise, BATCH)
    with settings.fast_pred_var():  # without it stock fails below 512 points
        posterior, again = model(points(9, seed=1)), model(points(9, seed=1))
        first, density = model(points(9, seed=1))[0], again.log_prob(values(points(9, seed=2)))
        return moments(posterior), density, moments(first)


@pytest.mark.thin
@each_way
@each_of_all
def test_no_prediction_writes_a_setting(fast, candidate, monkeypatch):
    """Threads share settings: a block of ours within a block of another thread's would leave it changed."""
    model = regression()
    with settings.fast_pred_var(fast), ours(candidate):
        monkeypatch.setattr(settings.fast_pred_var, "_set_state", None)
        moments(model(at(model, 9)))
        moments(model(at(model, 11)))
        monkeypatch.undo()


@exact_models.stock_s(rtol=1e-05, atol=1e-06)
def test_structured_solves_keep_the_settings_of_the_call():
    model = Several("kronecker")
    with settings.max_cholesky_size(10), settings.eval_cg_tolerance(1e-8):
        posterior = model(points(600, seed=4))
    return posterior.mean, posterior.variance


@each_of_all
@pytest.mark.parametrize("where", ["targets", "points", "test points", "test points of a known factor"])
def test_what_is_no_number_raises_as_in_stock_where_it_iterates(candidate, where):
    def read():
        x, z = points(820)[:, :1], points(5, seed=2)[:, :1]
        y, bad = torch.sin(6 * x[:, 0]), z.clone()
        bad[1] = torch.nan
        if where in ("targets", "points"):
            (y if where == "targets" else x)[3] = torch.nan
        model = Regression(x, y, ScaleKernel(kernels.MaternKernel(2.5)))
        if "known" in where:
            assert model(z).variance.isfinite().all()
        with pytest.raises(RuntimeError) as raised:
            model(bad if "test" in where else z).variance
        if "test" in where:
            assert model(z).variance.isfinite().all()
        return raised.type

    with torch.no_grad():
        exact_models.assert_stock(read, candidate)


@each_of_all
def test_a_covariance_without_a_factor_is_predicted_from_where_stock_iterates(candidate):
    def read():
        x = points(820).float()[:, :1]
        model = Regression(x, torch.sin(6 * x[:, 0]), ScaleKernel(RBFKernel()))
        model.covar_module.outputscale, model.covar_module.base_kernel.lengthscale = 1e6, 2.0
        model.likelihood.noise = 2e-4
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)
            return model(points(5, seed=2).float()[:, :1]).mean.isfinite()

    with torch.no_grad():
        exact_models.assert_stock(read, candidate)


@pytest.mark.parametrize(
    "make", [regression, exact_models.batched, lambda: Several("kronecker")], ids=["one", "batch", "tasks"]
)
def test_models_and_distributions_are_pickled_and_copied_without_autokern(make):
    with ours("lazy"):
        model = make()
        mll = ExactMarginalLogLikelihood(model.likelihood, model).train()
        mll(model(*model.train_inputs), model.train_targets).sum().backward()
        with torch.no_grad():
            prior, posterior = model(*model.train_inputs), model.eval()(points(300, seed=5))
            targets = torch.ones(model.train_targets[..., :2].shape)
            grown = model if isinstance(model, Several) else exact_models.fantasy(model, points(2), targets)
    with ours("lazy"), torch.no_grad():
        for one in (model, grown):
            packed = pickle.dumps(one)
            assert unpickled_without_autokern(packed) is not None
            assert_close(pickle.loads(packed)(points(9)).variance, one(points(9)).variance)
        likely = model.likelihood(posterior)
        for distribution in (prior, posterior, likely, posterior.add_jitter(1e-3), posterior * 2):
            packed, twin = pickle.dumps(distribution), copy.deepcopy(distribution)
            _ = distribution.variance
            for data in (packed, pickle.dumps(distribution)):  # before it was read, and afterwards
                assert unpickled_without_autokern(data) is not None
                for other in (pickle.loads(data), twin):
                    assert_close(other.variance, distribution.variance)
                    assert_close(other.covariance_matrix, distribution.covariance_matrix)


@pytest.mark.parametrize("op", ["predict", "fantasy"])
def test_equal_keys_mean_equal_problems(op, monkeypatch):
    known, x = {}, points(30)
    real = getattr(seam, f"_dispatch_{op}")

    def noted(*args):
        key, problem = get(op).key(*args), get(op).problem_of(*args)
        assert known.setdefault(key, problem) == problem
        return real(*args)

    monkeypatch.setattr(seam, f"_dispatch_{op}", noted)
    makes = [*exact_models.MODELS.values(), *(functools.partial(Several, kind) for kind in exact_models.KINDS)]
    for batch in (exact_models.NONE, BATCH):  # of the kernel alone
        kernel = functools.partial(ScaleKernel, RBFKernel(batch_shape=batch), batch_shape=batch)
        y = torch.stack((values(x), -values(x)))
        makes.append(lambda kernel=kernel, y=y: Regression(x, y, kernel(), None, BATCH))
    with ours("rows", "fantasy"), settings.fast_pred_var(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for make in makes:
            model = make()
            inputs, *task = exact_models.several_at(getattr(model, "kind", ""), 9)
            model(inputs.to(model.train_targets), *task)
            with contextlib.suppress(RuntimeError, ValueError):  # stock's, where these points do not fit
                exact_models.fantasy(model, points(2, seed=7), torch.ones(*model.train_targets.shape[:-1], 2))
    assert len(known) > 3


@pytest.mark.parametrize("reading", ["mean", "variance"])
@pytest.mark.parametrize("between", ["disabled", "changed"])
def test_a_backward_pass_is_that_of_the_forward_pass(reading, between):
    """Blocks that are evaluated again see neither hooks nor hyperparameters that are others by then."""

    def loss():
        model, x = regression(), points(300, seed=5).requires_grad_()
        found = getattr(model(x), reading).sum()
        exact_models.change(model, 0.7 if between == "changed" else 0.0)
        return found, x

    expected = torch.autograd.grad(*loss())
    with ours("lazy"):
        found = loss()
        if between == "changed":
            found = torch.autograd.grad(*found)
    assert_close(torch.autograd.grad(*found) if between == "disabled" else found, expected, rtol=1e-6)


@pytest.mark.usefixtures("trusted")
def test_a_solve_is_differentiated_with_its_own_factor():
    def gradients():
        x = points(20)
        k, noise = torch.exp(-torch.cdist(x, x)).requires_grad_(), torch.tensor([0.1]).double().requires_grad_()
        operator = AddedDiagLinearOperator(DenseLinearOperator(k * 1), ConstantDiagLinearOperator(noise, 20))
        with mock.patch.object(torch.linalg, "cholesky_ex", wraps=torch.linalg.cholesky_ex) as factorise:
            found = torch.autograd.grad(operator.solve(x).sin().sum(), (k, noise))
        return factorise.call_count, found

    stock, expected = gradients()
    with ours():
        own, found = gradients()
    assert (stock, own) == (2, 1)
    assert_close(found, expected)


@contextlib.contextmanager
def evaluated():
    """The shapes of kernel matrices that are evaluated, and of posterior covariances that are formed."""
    shapes = []
    with contextlib.ExitStack() as stack:
        for kind, name in ((memory, "_stock_evaluate_kernel"), (PosteriorCovariance, "formed")):
            real = getattr(kind, name)

            def watched(self, *args, real=real, **kwargs):
                shapes.append(tuple(self.shape[-2:]))
                return real(self, *args, **kwargs)

            stack.enter_context(mock.patch.object(kind, name, functools.wraps(real)(watched)))
        yield shapes


@pytest.mark.thin("make candidate", "fast")
@pytest.mark.parametrize(
    ("make", "candidate"),
    [
        *((regression, candidate) for candidate in ("lazy", "rows")),
        (exact_models.batched, "lazy"),
        (lambda: Several("kronecker"), None),
        (exact_models.MODELS["linear"], None),
    ],
    ids=["lazy", "rows", "batch", "tasks", "linear"],
)
@each_way
def test_the_covariance_of_all_test_points_is_not_formed_for_variances(make, candidate, fast):
    model, m = make(), 3000
    graph = torch.set_grad_enabled(candidate != "rows")  # blocks that are not kept serve no gradients
    with graph, ours(candidate), settings.fast_pred_var(fast), evaluated() as shapes:
        posterior = model(points(m, seed=5))
        for distribution in (posterior, model.likelihood(posterior)):
            distribution.mean, distribution.variance, distribution.confidence_region()
        candidate and posterior[..., 5:9].covariance_matrix
    assert shapes
    assert not [shape for shape in shapes if min(shape) >= m]


@pytest.mark.usefixtures("trusted")
@pytest.mark.thin
@each_way
@either_cache
@pytest.mark.parametrize("candidate", [None, *SMALL])
def test_a_model_is_factorised_once(fast, candidate, detached):
    real, sizes = torch.linalg.cholesky_ex, []
    counting = mock.patch("torch.linalg.cholesky_ex", lambda a, *r, **k: sizes.append(a.shape[-1]) or real(a, *r, **k))
    with ours(candidate), counting, settings.fast_pred_var(fast), settings.detach_test_caches(detached):
        model = regression(120)
        for seed in (5, 6):
            posterior = model(points(30, seed=seed))
            posterior.mean, posterior.variance, posterior.covariance_matrix
        model.prediction_strategy.covar_cache, model.prediction_strategy.mean_cache
        exact_models.fantasy(model, points(2, seed=7))(points(5)).variance
    assert sizes.count(120) == 1
    assert max(sizes) == 120


@pytest.mark.parametrize("graph", [False, True])
def test_a_covariance_without_gradients_takes_the_memory_of_what_the_data_explain(graph):
    made, real = [], Conditioned.explained_covariance
    keeps = mock.patch.object(Conditioned, "explained_covariance", lambda *args: made.append(real(*args)) or made[-1])
    with ours("lazy"), torch.set_grad_enabled(graph), keeps, settings.fast_pred_var():
        found = regression()(points(700, seed=5)).lazy_covariance_matrix.to_dense()
    assert (found.data_ptr() == made[0].data_ptr()) is not graph
    assert_close(found, regression()(points(700, seed=5)).covariance_matrix)


def test_a_kernel_keeps_the_matrix_that_it_returns():
    kept = torch.eye(30).double() + 0.5

    class Table(gpytorch.kernels.Kernel):
        def forward(self, x1, x2, diag=False, **params):
            rows = kept[: x1.shape[-2], : x2.shape[-2]]
            return rows.diagonal() if diag else (kept if rows.shape == kept.shape else rows)

    with ours("lazy"), torch.no_grad():
        regression(30, kernel=Table())(points(9, seed=4)).variance
    assert kept.equal(torch.eye(30).double() + 0.5)
