"""Predictions and online learning at the level of models: what users read is stock's, at a fraction of the work."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from unittest import mock

import gpytorch
import psutil
import pytest
import torch
from gpytorch.kernels import MaternKernel, MultitaskKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, MultitaskGaussianLikelihood
from linear_operator.operators import AddedDiagLinearOperator, ConstantDiagLinearOperator, DenseLinearOperator
from linear_operator.utils.warnings import NumericalWarning
from support.fakes import unpickled_without_autokern

import autokern
from autokern.core.registry import get
from autokern.gp import factor_cache
from autokern.gp.lazy_covariance import PosteriorCovariance
from autokern.hooks import memory

pytestmark = [
    pytest.mark.usefixtures("one_thread", "stock_posteriors"),
    pytest.mark.filterwarnings("ignore:Sparse invariant"),
]

WAYS = get("predict").names()
F64 = {"dtype": torch.float64}


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel=None, likelihood=None):
        super().__init__(x, y, likelihood or GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel or ScaleKernel(MaternKernel(2.5, ard_num_dims=x.shape[-1]))
        self.to(x)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Tasks(gpytorch.models.ExactGP):
    def __init__(self, x, y):
        super().__init__(x, y, MultitaskGaussianLikelihood(num_tasks=2))
        self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks=2)
        self.covar_module = MultitaskKernel(RBFKernel(), num_tasks=2, rank=1)
        self.to(x)

    def forward(self, x):
        return gpytorch.distributions.MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


def points(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), **F64)


def made(n: int = 30, d: int = 2, **options) -> Model:
    x = points(n, d)
    model = Model(x, (5 * x).sin().sum(-1), **options)
    if not options.get("likelihood"):
        model.likelihood.noise = 0.01
    return model.eval()


def multitask() -> Tasks:
    x = points(20, 2)
    torch.manual_seed(3)
    return Tasks(x, torch.stack(((5 * x).sin().sum(-1), x.sum(-1)), -1)).eval()


def batched() -> Model:
    x = points(2, 25, 2)
    two = torch.Size([2])
    kernel = ScaleKernel(RBFKernel(batch_shape=two), batch_shape=two)
    model = Model(x, x.sum(-1).sin(), kernel, GaussianLikelihood(batch_shape=two))
    model.mean_module = gpytorch.means.ConstantMean(batch_shape=two).double()
    return model.eval()


MODELS = {
    "matern": made,
    "rbf": lambda: made(kernel=RBFKernel()),
    "periodic": lambda: made(d=1, kernel=ScaleKernel(PeriodicKernel())),
    "sum": lambda: made(kernel=ScaleKernel(RBFKernel()) + ScaleKernel(MaternKernel(1.5))),
    "product": lambda: made(kernel=ScaleKernel(RBFKernel(active_dims=[0]) * RQKernel(active_dims=[1]))),
    "spectral": lambda: made(kernel=gpytorch.kernels.SpectralMixtureKernel(num_mixtures=2, ard_num_dims=2)),
    "linear": lambda: made(kernel=ScaleKernel(gpytorch.kernels.LinearKernel())),
    "fixed noise": lambda: made(likelihood=FixedNoiseGaussianLikelihood(0.01 + 0.1 * points(30, seed=2))),
    "batch": batched,
    "multitask": multitask,
}


def new(model, m: int = 9) -> torch.Tensor:
    return points(m, model.train_inputs[0].shape[-1], seed=4)


def read(posterior) -> list[torch.Tensor]:
    return [
        posterior.mean, posterior.variance, *posterior.confidence_region(), posterior.covariance_matrix,
        posterior.lazy_covariance_matrix.diagonal(dim1=-2, dim2=-1),
    ]  # fmt: skip


def close(found, expected, rtol=1e-7, atol=1e-8):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.thin("name fast", "way fast")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_all_that_is_read_is_stock(name, fast, way):
    def everything():
        torch.manual_seed(0)
        model = MODELS[name]()
        found = []
        with gpytorch.settings.fast_pred_var(fast), warnings.catch_warnings():
            warnings.simplefilter("ignore", gpytorch.utils.warnings.GPInputWarning)
            for x in (new(model), new(model, 300), model.train_inputs[0]):
                found += [t.detach() for t in read(model(x))]
                extra = [x] if name == "fixed noise" else []
                options = {"noise": torch.full_like(x[..., 0], 0.1)} if extra else {}
                noisy = model.likelihood(model(x), *extra, **options)
                found += [noisy.mean.detach(), noisy.variance.detach()]
        return found

    expected = everything()
    with autokern.enabled(), autokern.using(force={"predict": way}):
        close(everything(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", ["lazy", "eager"])
def test_the_distribution_is_a_whole_one(way):
    def everything():
        posterior = made()(new(made(), 12))
        torch.manual_seed(5)
        parts = [posterior[..., 3:9], posterior.add_jitter(1e-3), posterior * 2.0]
        found = [t.detach() for part in parts for t in (part.mean, part.variance, part.covariance_matrix)]
        found += [posterior.rsample(torch.Size([3])).detach(), posterior.log_prob(posterior.mean + 0.1).detach()]
        found += [posterior[..., [1, 4]].covariance_matrix.detach()]
        operator = posterior.lazy_covariance_matrix
        found += [(operator @ torch.ones(12, 1, **F64)).detach(), operator.cholesky().to_dense().detach()]
        return [*found, (operator + operator).to_dense().detach(), operator.unsqueeze(0).to_dense().detach()]

    expected = everything()
    with autokern.enabled(), autokern.using(force={"predict": way}):
        close(everything(), expected)


@pytest.mark.parametrize("policy", ["mask", "fill"])
def test_missing_observations(policy):
    def everything():
        model = made()
        model.train_targets[3] = torch.nan
        with gpytorch.settings.observation_nan_policy(policy), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return [t.detach() for t in read(model(new(model)))]

    expected = everything()
    with autokern.enabled(), autokern.using(force={"predict": "lazy"}):
        close(everything(), expected)


def test_exact_above_the_limit():
    model, x = made(820), new(made())
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(10**4):
        expected = [t.detach() for t in read(made(820)(x))]
    with torch.no_grad(), autokern.enabled(), autokern.using(force={"predict": "lazy"}):
        close(read(model(x)), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["targets", "points", "test points", "test points of a known factor"])
def test_what_is_no_number_raises_as_in_stock_where_it_iterates(way, where):
    def everything():
        x, z = points(820, 1), points(5, 1, seed=2)
        y, bad = torch.sin(6 * x[:, 0]), z.clone()
        bad[1] = torch.nan
        if where in ("targets", "points"):
            (y if where == "targets" else x)[3] = torch.nan
        model = Model(x, y).eval()
        if "known" in where:
            assert model(z).variance.isfinite().all()
        with pytest.raises(RuntimeError) as raised:
            model(bad if "test" in where else z).variance
        if "test" in where:
            assert model(z).variance.isfinite().all()
        return type(raised.value)

    with torch.no_grad():
        expected = everything()
        with autokern.enabled(), autokern.using(force={"predict": way}):
            assert everything() is expected


@pytest.mark.parametrize("way", WAYS)
def test_a_covariance_without_a_factor_is_predicted_from_where_stock_iterates(way):
    def everything():
        x = points(820, 1).float()
        model = Model(x, torch.sin(6 * x[:, 0]), ScaleKernel(RBFKernel()))
        model.covar_module.outputscale, model.covar_module.base_kernel.lengthscale = 1e6, 2.0
        model.likelihood.noise = 2e-4
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)
            return model.eval()(points(5, 1, seed=2).float()).mean

    with torch.no_grad():
        expected = everything()
        with autokern.enabled(), autokern.using(force={"predict": way}):
            assert everything().isfinite().equal(expected.isfinite())


def test_no_variances_where_none_are_wanted():
    with autokern.enabled(), gpytorch.settings.skip_posterior_variances():
        model = made()
        assert not model(new(model)).covariance_matrix.any()


# --- work -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", [made, multitask])
@pytest.mark.parametrize("way", ["lazy", "rows"])
def test_the_joint_covariance_is_never_built_for_variances(maker, way):
    m, largest, plain = 3000, 0, memory._stock_evaluate_kernel

    def watched(self):
        nonlocal largest
        largest = max(largest, min(self.shape[-2:]))
        return plain(self)

    model = maker()
    with (
        torch.no_grad(),
        autokern.enabled(),
        autokern.using(force={"predict": way}),
        mock.patch.object(memory, "_stock_evaluate_kernel", watched),
    ):
        posterior = model.likelihood(model(new(model, m)))
        assert posterior.mean.shape[0] == m
        posterior.confidence_region()
    assert largest < m / 2


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("fast", [False, True])
def test_one_factorisation(fast):
    count, plain = 0, torch.linalg.cholesky_ex

    def counted(matrix, *args, **options):
        nonlocal count
        count += matrix.shape[-1] == 30
        return plain(matrix, *args, **options)

    model = made()
    with (
        torch.no_grad(),
        autokern.enabled(),
        gpytorch.settings.fast_pred_var(fast),
        mock.patch.object(torch.linalg, "cholesky_ex", counted),
    ):
        for seed in (6, 7):
            read(model(points(5, 2, seed=seed)))
        model.prediction_strategy.covar_cache
        model.prediction_strategy.mean_cache
    assert count == 1


@pytest.mark.usefixtures("trusted")
def test_a_solve_is_differentiated_with_its_own_factor():
    def gradients():
        x = points(20, 2)
        k, noise = torch.exp(-torch.cdist(x, x)).requires_grad_(), torch.tensor([0.1], requires_grad=True, **F64)
        operator = AddedDiagLinearOperator(DenseLinearOperator(k * 1), ConstantDiagLinearOperator(noise, 20))
        with mock.patch.object(torch.linalg, "cholesky_ex", wraps=torch.linalg.cholesky_ex) as factorise:
            found = torch.autograd.grad(operator.solve(x).sin().sum(), (k, noise))
        return factorise.call_count, found

    stock, expected = gradients()
    with autokern.enabled():
        ours, found = gradients()
    assert (stock, ours) == (2, 1)
    close(found, expected)


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.thin("way", "detach")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("detach", [False, True])
def test_gradients_by_points_and_hyperparameters(way, detach):
    def gradients(m):
        model, found = made(), []
        with gpytorch.settings.detach_test_caches(detach):
            for _ in range(2):
                x = new(model, m).requires_grad_()
                posterior = model(x)
                value = posterior.mean.sin().sum() + (posterior.variance * torch.arange(m, **F64)).sum()
                value = value + posterior.covariance_matrix.square().sum()
                found += torch.autograd.grad(value, [x, *model.parameters()], allow_unused=True)
                model.train().eval()
        return [t for t in found if t is not None]

    for m in (5, 300):
        expected = gradients(m)
        with autokern.enabled(), autokern.using(force={"predict": way}):
            close(gradients(m), expected, rtol=1e-6, atol=1e-6)


def test_no_graph_from_without():
    model = made()
    with autokern.enabled(), autokern.using(force={"predict": "lazy"}):
        with torch.no_grad():
            posterior = model(new(model))
        assert not posterior.variance.requires_grad
        assert not posterior.covariance_matrix.requires_grad


# --- what changes in between ------------------------------------------------------------------------------------------


def test_what_is_read_late_has_the_old_hyperparameters():
    model, x = made(), new(made())
    expected = [t.detach() for t in read(model(x))]
    model = made()
    with autokern.enabled(), autokern.using(force={"predict": "lazy"}):
        posterior = model(x)
        assert isinstance(posterior.lazy_covariance_matrix, PosteriorCovariance)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        close([t.detach() for t in read(posterior)], expected)


@pytest.mark.parametrize("what", ["parameters", "inputs", "targets"])
def test_caches_are_renewed_when_anything_changes(what):
    def change(model):
        with torch.no_grad():
            if what == "parameters":
                model.covar_module.raw_outputscale.add_(1.0)
            else:
                (model.train_inputs[0] if what == "inputs" else model.train_targets).mul_(0.5)

    x = new(made())
    fresh, model = made(), made()
    change(fresh)
    expected = [t.detach() for t in read(fresh(x))]
    with autokern.enabled():
        read(model(x))
        change(model)
        close([t.detach() for t in read(model(x))], expected)


def test_models_and_distributions_are_packed_without_autokern():
    model = made()
    with autokern.enabled(), autokern.using(force={"predict": "lazy"}), torch.no_grad():
        posterior = model(new(model))
        read(posterior)
        grown = model.get_fantasy_model(new(model, 2), torch.ones(2, **F64))
        for thing in (model, posterior, grown):
            assert unpickled_without_autokern(pickle.dumps(thing)) is not None
        twin = copy.deepcopy(posterior)
    torch.testing.assert_close(twin.covariance_matrix, posterior.covariance_matrix)


def test_nothing_outlives_a_model():
    with autokern.enabled(), torch.no_grad():
        model = made()
        read(model(new(model)))
        strategy = weakref.ref(model.prediction_strategy)
        del model
        gc.collect()
    assert strategy() is None


# --- fantasies --------------------------------------------------------------------------------------------------------


def refit(model) -> Model:
    fresh = made()
    fresh.load_state_dict(model.state_dict())
    fresh.set_train_data(*model.train_inputs, model.train_targets, strict=False)
    return fresh.eval()


@pytest.mark.parametrize("way", ["rows", "stock"])
@pytest.mark.parametrize(
    ("inputs", "targets"),
    [((1, 2), (1,)), ((5, 2), (5,)), ((3, 2, 2), (3, 2)), ((2, 2), (4, 2)), ((3, 1, 2), (4, 3, 1))],
)
def test_fantasies_are_stock(inputs, targets, way):
    def everything():
        model, x = made(), new(made())
        with gpytorch.settings.fast_pred_var():
            read(model(x))
            grown = model.get_fantasy_model(points(*inputs, seed=8), points(*targets, seed=9))
            again = grown.get_fantasy_model(points(*inputs, seed=10), points(*targets, seed=11))
            found = [t.detach() for one in (grown, again) for t in read(one(x.expand(*targets[:-1], *x.shape)))]
        return [*found, *(t.detach() for t in read(model(x)))]

    expected = everything()
    with autokern.enabled(), autokern.using(force={"fantasy": way}):
        close(everything(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("detached", [True, False])
def test_gradients_of_fantasies_of_fantasies(detached):
    def gradients():
        model, x, y = made(), new(made(), 2).requires_grad_(), points(4, 2, seed=9).requires_grad_()
        with gpytorch.settings.detach_test_caches(detached):
            model(x)
        for shift in (0.0, 0.1):
            model = model.get_fantasy_model(x + shift, y)
            with gpytorch.settings.detach_test_caches(False):
                posterior = model(points(4, 3, 2, seed=12))
                value = posterior.mean.sum() + posterior.variance.square().sum()
        return torch.autograd.grad(value, (x, y))

    expected = gradients()
    with autokern.enabled():
        close(gradients(), expected, rtol=1e-6, atol=1e-8)


def test_a_long_stream_stays_exact_and_its_models_stay_apart():
    x, ahead = points(300, 2, seed=13), new(made())
    with autokern.enabled(), torch.no_grad():
        model = made(30)
        before = [t.clone() for t in read(model(ahead))]
        first, latest = model, model
        for i in range(200):
            latest = latest.get_fantasy_model(x[i, None], x[i, None].sum(-1))
        other = first.get_fantasy_model(x[250, None], x[250, None].sum(-1))
        close(read(latest(ahead)), read(refit(latest)(ahead)), rtol=1e-9, atol=1e-10)
        close(read(other(ahead)), read(refit(other)(ahead)), rtol=1e-9, atol=1e-10)
        close(read(first(ahead)), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_point_that_adds_nothing_is_factorised_anew(dtype):
    """The same point again with almost no noise: the update would lose all digits."""

    def everything(model):
        model.likelihood.noise_covar.register_constraint("raw_noise", gpytorch.constraints.GreaterThan(1e-12))
        model.likelihood.noise = 1e-9 if dtype is torch.float64 else 1e-4
        model = model.to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gpytorch.utils.warnings.NumericalWarning)
            ahead = new(model).to(dtype)
            read(model(ahead))
            x = model.train_inputs[0][:1]
            grown = model.get_fantasy_model(x, model.train_targets[:1])
            return factor_cache.found(grown.prediction_strategy), [t.detach() for t in read(grown(ahead))]

    with autokern.enabled():
        there, found = everything(made(12, kernel=ScaleKernel(RBFKernel())))
    assert there is None
    assert all(t.isfinite().all() for t in found)


def test_structured_models_stay_stock():
    def everything():
        model = MODELS["linear"]()
        x = new(model)
        read(model(x))
        grown = model.get_fantasy_model(points(2, 2, seed=8), points(2, seed=9))
        return [t.detach() for t in read(grown(x))]

    expected = everything()
    with autokern.enabled():
        close(everything(), expected, rtol=1e-6, atol=1e-7)


def test_a_kernel_keeps_the_matrix_that_it_returns():
    kept = torch.eye(30, **F64) + 0.5

    class Table(gpytorch.kernels.Kernel):
        def forward(self, x1, x2, diag=False, **params):
            rows = kept[: x1.shape[-2], : x2.shape[-2]]
            return rows.diagonal() if diag else (kept if rows.shape == kept.shape else rows)

    with autokern.enabled(), torch.no_grad(), autokern.using(force={"predict": "lazy"}):
        model = made(kernel=Table())
        model(new(model)).variance
    torch.testing.assert_close(kept, torch.eye(30, **F64) + 0.5, rtol=0, atol=0)


def test_noise_of_one_update_stays_with_it():
    """A Gaussian likelihood has no place for it, so that it must not be computed anew."""

    def everything():
        model, x, y = made(), points(1, 2, seed=8), torch.ones(1, **F64)
        read(model(x))
        grown = model.get_fantasy_model(x, y, noise=torch.full((1,), 1e-5, **F64))
        grown.prediction_strategy._memoize_cache.pop(("mean_cache", ("ignore",), pickle.dumps({})), None)
        return [t.detach() for t in read(grown(x))]

    expected = everything()
    with autokern.enabled():
        close(everything(), expected, rtol=1e-6, atol=1e-7)


def test_kernel_and_data_of_two_dtypes():
    def everything():
        model = made()
        model.covar_module.float()
        torch.manual_seed(1)
        posterior = model(new(model))
        return [posterior.mean.detach(), posterior.variance.detach(), posterior.rsample().detach()]

    expected = everything()
    with autokern.enabled(), autokern.using(force={"predict": "lazy"}):
        close(everything(), expected, rtol=1e-5, atol=1e-6)


def test_inference_mode():
    with autokern.enabled(), torch.inference_mode():
        model = made()
        x = new(model)
        read(model(x))
        grown = model.get_fantasy_model(points(1, 2, seed=8), torch.ones(1, **F64))
        close(read(grown(x)), read(refit(grown)(x)), rtol=1e-9, atol=1e-10)
    with autokern.enabled(), torch.no_grad():
        later = grown.get_fantasy_model(points(1, 2, seed=9), torch.ones(1, **F64))
        close(read(later(x)), read(refit(later)(x)), rtol=1e-9, atol=1e-10)


def test_a_strategy_of_the_users_is_left_alone():
    class Own(gpytorch.models.exact_prediction_strategies.DefaultPredictionStrategy):
        pass

    with autokern.enabled():
        model = made()
        model(new(model))
        old = model.prediction_strategy
        own = Own(old.train_inputs, old.train_prior_dist, old.train_labels, old.likelihood)
        model.prediction_strategy = own
        with torch.no_grad():
            model.covar_module.raw_outputscale.add_(1.0)
        read(model(new(model)))
        assert model.prediction_strategy is own


def test_structured_solves_keep_the_settings_of_the_call():
    def everything():
        model = multitask()
        with gpytorch.settings.max_cholesky_size(10), gpytorch.settings.eval_cg_tolerance(1e-8):
            posterior = model(new(model, 600))
        return [posterior.mean.detach(), posterior.variance.detach()]

    expected = everything()
    with autokern.enabled():
        close(everything(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_memory_is_flat_over_updates_that_are_dropped():
    process, resident = psutil.Process(), []
    with autokern.enabled(), torch.no_grad():
        model = made(200)
        read(model(new(model)))
        for i in range(300):
            grown = model.get_fantasy_model(points(1, 2, seed=i), points(1, seed=i))
            grown(new(model)).variance
            del grown
            if i % 20 == 0:
                gc.collect()
                resident.append(process.memory_info().rss)
    assert max(resident[8:]) - resident[7] < 8 * 2**20
