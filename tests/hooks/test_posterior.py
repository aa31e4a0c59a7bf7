"""Posteriors at a few points in one piece: the same values and gradients, and stock where anything is unknown."""

import contextlib
import copy
import gc
import itertools
import pickle
import signal
import weakref
from unittest import mock

import gpytorch
import pytest
import torch
from botorch.models import MultiTaskGP, SingleTaskGP, fully_bayesian
from botorch.sampling import SobolQMCNormalSampler
from botorch.settings import propagate_grads
from gpytorch.kernels import ConstantKernel, LinearKernel, PiecewisePolynomialKernel, RBFKernel, ScaleKernel
from linear_operator.utils.errors import NanError
from support.botorch_models import (
    F64,
    MODELS,
    OF_OTHER_KERNELS,
    OF_SAMPLES,
    ROUGH,
    D,
    data,
    moved,
    of_categories,
    of_samples,
    with_kernel,
)
from support.densities import weighted
from support.models import ExactModel
from support.outcomes import as_stock, assert_close, count, judged, outcome, serving
from torch.utils._python_dispatch import TorchDispatchMode

import autokern
from autokern.kernels.array_distances import Distances
from autokern.prediction import factor_cache
from autokern.prediction.array_posterior import Posterior

pytestmark = [pytest.mark.filterwarnings("ignore:Data .outcome observations. is not standardized")]
ONE = torch.float32


class Regression(ExactModel):
    def __init__(self, n=15, kernel=None):
        x, y = data(n)
        super().__init__(x, y[:, 0], kernel)
        self.double()


def points(*lead, seed=4):
    return torch.rand(*lead, D, generator=torch.Generator().manual_seed(seed), **F64)


def of_these_tasks(*tasks):
    """Return points of tasks that are named in the second column."""
    x = points(3, len(tasks), seed=8)
    return torch.cat([x[..., :1], torch.tensor(tasks, **F64).expand(3, -1)[..., None], x[..., 1:]], -1)


def arrays(least=1):
    return serving("posterior", "arrays", least)


def both(run, times=2, calls=1):
    """Return what stock gives and what arrays do, at least `calls` of them; None means that none may be."""
    expected = run()
    with arrays(calls * times):
        found = [run() for _ in range(times)]
    return expected, found[-1]


def stock_s(times=2, calls=1, **tolerance):
    """Let a test return by arrays what it returns by stock, or by stock alone where there are to be no calls."""
    return judged(lambda run, _: close(*reversed(both(run, times, calls)), **tolerance))


def close(found, expected, rtol=1e-10, atol=1e-10):
    assert_close(found, expected, rtol=rtol, atol=atol)


def gradients(value, x, model):
    for t in (x, *model.parameters()):
        t.grad = None
    value.backward()
    return [t.grad for t in (x, *model.parameters())]


def read(model, x, twice=False):
    """Moments, and the slopes of both by points and hyperparameters."""
    x = x.detach().clone().requires_grad_()
    first, posterior = (model.posterior(x) for _ in range(2)) if twice else (None, model.posterior(x))
    mean, covariance = posterior.mean, posterior.distribution.covariance_matrix
    slopes = gradients(weighted(mean) + weighted(covariance), x, model)
    found = [mean, covariance, posterior.variance, *([first.mean] if twice else []), *slopes]
    return [None if t is None else t.detach() for t in found]


CATEGORIES = of_categories()[0][:6].reshape(3, 2, D) + torch.tensor([0.1, 0, 0], **F64)
INDEXED = {
    **{f"tasks {at}": ("tasks of other values", of_these_tasks(*at)) for at in ((3, 7), (7,), (3.4, 7.9))},
    "indexed categories": ("categories", CATEGORIES),
    "indexed table": ("table", of_these_tasks(1, 2.7, 0)[..., :3]),
}
SHAPES = [(1,), (5, 1), (5, 4), (2, 3, 2)]
ALL = MODELS | OF_SAMPLES
EVERYWHERE = INDEXED | {f"{name} {shape}": (name, points(*shape)) for name in ALL for shape in SHAPES}


@pytest.mark.parametrize(("name", "x"), EVERYWHERE.values(), ids=EVERYWHERE)
def test_values_and_gradients_are_the_same(name, x):
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if name in ROUGH else {}
    close(*reversed(both(lambda: read(ALL[name](), x))), **tolerance)


SINGLE = ["usual", "known noise", "two outputs", "sum", "product", "normalised inputs", *OF_OTHER_KERNELS]
SOLVED = [pytest.param(k, points(5, 4), marks=[pytest.mark.slow] * (k not in SINGLE), id=k) for k in ALL]


@pytest.fixture
def solves(monkeypatch):
    """Turn off `fast_pred_var`, as in GPyTorch, not in BoTorch: the data's kernel matrix has gradients."""
    monkeypatch.setattr(gpytorch.settings.fast_pred_var, "_set_state", lambda state: None)


@pytest.mark.usefixtures("solves")
@pytest.mark.parametrize(("name", "x"), [*SOLVED, INDEXED["tasks (3.4, 7.9)"]])
def test_gradients_through_the_kernel_matrix_of_the_data(name, x):
    test_values_and_gradients_are_the_same(name, x)


IN_SINGLE = INDEXED | {f"{k} {at}": (k, points(*at)) for k in SINGLE for at in [(1,), (5, 4), (2, 3, 2)]}


@pytest.mark.filterwarnings("ignore:The model inputs are of type")
@pytest.mark.parametrize(("name", "x"), IN_SINGLE.values(), ids=IN_SINGLE)
def test_single_precision_is_no_further_from_double_precision_than_stock(name, x):
    stock, found = both(lambda: read(MODELS[name]().to(ONE), x.to(ONE)))
    for exact, one, other in zip(read(MODELS[name](), x), stock, found, strict=True):
        assert (exact is None) == (other is None)
        if exact is not None:
            assert other.dtype is ONE
            assert (other - exact).norm() <= 2 * (one - exact).norm() + 1e-4 * exact.norm()


BOUNDS = {"fidelity": (0, 1, -0.5, 1.5), "two fidelities": (0, 1, -0.5, 1.5), "fidelities by decay": (0, 1, 400.0)}


@pytest.mark.parametrize(("name", "values"), BOUNDS.items(), ids=BOUNDS)
def test_fidelities_at_their_bounds_and_beyond(name, values):
    x = points(len(values) ** 2, 2)
    x[..., 1:] = torch.cartesian_prod(*[torch.tensor(values, **F64)] * 2)[:, None]
    close(*reversed(both(lambda: read(MODELS[name](), x))))


@pytest.mark.parametrize("name", ["usual", "isotropic", "tasks of other values"])
def test_points_far_from_the_data(name):
    """Their covariances have the digits of their distances from each other."""
    x = of_these_tasks(3, 7) if "tasks" in name else points(5, 2)
    x[..., ::2] += 1e6  # tasks stand in the second column
    close(*reversed(both(lambda: read(MODELS[name](), x)[1])), rtol=1e-8)


@pytest.mark.filterwarnings("ignore:The model inputs are of type", "ignore:Data")
@pytest.mark.parametrize("away", [0, 1000])
def test_tasks_in_single_precision_far_from_the_origin(away):
    """The library's covariances have errors there that those of arrays have not, and a mean takes both."""
    torch.manual_seed(0)
    x, y = data()
    model = MultiTaskGP(torch.cat([x + away, torch.arange(15)[:, None] % 2], -1).float(), y.float(), -1).eval()
    with arrays(0 if away else 1):
        model.posterior(points(2).float() + away)


@pytest.mark.parametrize("lead", [(), (5,), (4, 1)], ids=str)
@pytest.mark.parametrize("shape", [(2,), (5, 2), (3, 5, 1), (2, 1, 1, 2), (2, 1, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ["usual", "isotropic", "two outputs", "two scaled outputs", "linear in a sum"])
def test_fantasies(name, shape, lead):
    def run():
        torch.manual_seed(0)
        with torch.no_grad():
            model = MODELS[name]().fantasize(points(*lead, 2, seed=7), SobolQMCNormalSampler(torch.Size([3]), seed=1))
        try:
            return read(model, points(*shape), twice=True)
        except (RuntimeError, ValueError) as error:  # shapes that do not belong together
            return type(error)

    expected, before = run(), count("posterior", "arrays")
    with autokern.enabled(), autokern.using(force={"posterior": "arrays"}):
        close(run(), expected, rtol=1e-8, atol=1e-8)
    apart = (lead, shape) == ((4, 1), (5, 2))  # more sets of points than models
    assert isinstance(expected, type) or apart or count("posterior", "arrays") > before


@pytest.mark.usefixtures("solves")
@pytest.mark.parametrize("name", ["usual", "two outputs"])
@pytest.mark.parametrize("trained", [True, False])
@stock_s(rtol=1e-8, atol=1e-8)
def test_the_kernel_matrix_of_a_fantasy_is_that_of_the_first_model(name, trained):
    torch.manual_seed(0)
    first = MODELS[name]().requires_grad_(trained)
    with torch.no_grad():
        fantasy = first.fantasize(points(5, 2, seed=7), SobolQMCNormalSampler(torch.Size([3]), seed=1))
    slopes = read(fantasy, points(2), twice=True)
    return [slopes, [p.grad for p in first.parameters()]]


@pytest.mark.parametrize("name", ["usual", "known noise", "normalised inputs", "two outputs", "tasks of other values"])
@pytest.mark.parametrize("graph", [False, True])
def test_the_factor_of_a_fantasy_grows(name, graph):
    """BoTorch writes into a fantasy once it is made; neither its factor nor its strategy is made anew for that."""

    def run():
        torch.manual_seed(0)
        base, at = MODELS[name](), points(5, 2) if "tasks" not in name else of_these_tasks(3, 7)
        at.requires_grad_(graph)
        with mock.patch.object(factor_cache, "_made", side_effect=factor_cache._made) as made, propagate_grads(graph):
            model = base.fantasize(at, SobolQMCNormalSampler(torch.Size([3]), seed=1), propagate_grads=graph)
            found = model.posterior(points(1, 2))
            slopes = torch.autograd.grad(weighted(found.mean), at) if graph else []
        assert {call.args[0].num_train for call in made.call_args_list} <= {15}
        return [found.mean.detach(), found.variance.detach(), *slopes]

    expected = run()
    with autokern.enabled():
        close(run(), expected, rtol=1e-8, atol=1e-8)


@contextlib.contextmanager
def quick():
    with gpytorch.settings.fast_pred_var(), gpytorch.settings.detach_test_caches():
        yield


@pytest.mark.parametrize("tasks", [(3, 4), (-3, 7), (3, float("nan")), (100, 7)], ids=str)
def test_tasks_that_there_are_not(tasks):
    model = MODELS["tasks of other values"]().eval()
    model.posterior(points(2))

    def run():
        return model(of_these_tasks(*tasks)).loc.sum()

    expected = outcome(run)
    with autokern.enabled(), autokern.using(force={"posterior": "arrays"}):
        assert outcome(run) == expected
    assert isinstance(expected[0], tuple)


@pytest.mark.parametrize("make", [MODELS["usual"], MODELS["two scaled outputs"], MODELS["sum"]])
def test_only_what_wants_gradients_gets_any(make):
    def run():
        model, x = make(), points(5, 2)
        p = next(t for name, t in model.named_parameters() if "lengthscale" in name)
        p.requires_grad_(False)
        known = gradients(weighted(model.posterior(x).mean), x, model)
        model.covar_module.requires_grad_(False)
        known += [torch.tensor(model.posterior(points(2)).variance.requires_grad)]
        model.requires_grad_(False)
        x.requires_grad_()
        return [*known, *gradients(weighted(model.posterior(x).mean), x, model), model.posterior(points(2)).mean]

    expected, found = both(run, calls=4)
    close(found, expected)
    assert not found[-1].requires_grad


TWICE = ["usual", "two outputs", "normalised inputs", "tasks of other values", "linear mean"]


@pytest.mark.parametrize(("name", "x"), [*((k, points(2, 2)) for k in TWICE), INDEXED["tasks (3.4, 7.9)"]])
@stock_s(rtol=1e-8, atol=1e-8)
def test_second_derivatives(name, x):
    """Stock has none of Matern kernels."""
    return twice_differentiated(name, x)


@pytest.mark.usefixtures("solves")
@pytest.mark.parametrize(("name", "x"), [*((k, points(2, 2)) for k in TWICE), INDEXED["tasks (3.4, 7.9)"]])
@stock_s(rtol=1e-8, atol=1e-8)
def test_second_derivatives_through_the_kernel_matrix_of_the_data(name, x):
    return twice_differentiated(name, x)


def twice_differentiated(name, x):
    model, x = MODELS[name](), x.clone().requires_grad_()
    posterior = model.posterior(x)
    value = weighted(posterior.mean) + weighted(posterior.distribution.covariance_matrix)
    p = next(t for name, t in model.named_parameters() if "lengthscale" in name)
    slopes = torch.autograd.grad(value, (x, p), create_graph=True)
    return gradients(sum(weighted(slope) for slope in slopes), x, model)[:1]


@pytest.mark.parametrize("name", ["usual", "known noise", "two outputs", "isotropic", "normalised inputs"])
@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("depends", ["ascent", "scaled", "moved"])
@stock_s(rtol=1e-08, atol=1e-08)
def test_points_that_depend_on_the_hyperparameters(name, create, depends):
    model = MODELS[name]()
    wanted = [p for p in model.parameters() if p is not getattr(model.likelihood.noise_covar, "raw_noise", None)]
    x = points(2, 1).requires_grad_()
    if depends == "ascent":
        for _ in range(2):
            x = x + 0.05 * torch.autograd.grad(model.posterior(x).mean.sum(), x, create_graph=True)[0]
    else:
        x = x * wanted[-1].mean().exp() if depends == "scaled" else x + wanted[0].sum()
    value = weighted(model.posterior(x).mean) + weighted(model.posterior(x).variance)
    slopes = torch.autograd.grad(value, wanted, create_graph=create)
    assert any(slope.requires_grad for slope in slopes) == create
    return [slope.detach() for slope in slopes]


@pytest.mark.parametrize("create", [False, True])
@stock_s(calls=0, rtol=1e-08, atol=1e-08)
def test_a_constant_that_the_kernel_has_too(create):
    kernel = ScaleKernel(RBFKernel())
    model = moved(Regression(kernel=kernel)).eval()
    kernel.raw_outputscale = model.mean_module.raw_constant
    x = points(2).requires_grad_()
    with quick():
        found = model(x)
        value = weighted(found.loc) + weighted(found.covariance_matrix)
        p = model.mean_module.raw_constant, kernel.base_kernel.raw_lengthscale, x
        return [t.detach() for t in torch.autograd.grad(value, p, create_graph=create)]


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has no such signal")
def test_a_signal_handler_differentiates_while_its_thread_does(monkeypatch):
    model, within = MODELS["scaled"]().eval(), []

    def slopes(seed):
        x = points(2, seed=seed).requires_grad_()
        with torch.enable_grad(), quick():
            found = model(x)
            value = weighted(found.mean) + weighted(found.covariance_matrix)
            return torch.autograd.grad(value, [x, *model.parameters()], allow_unused=True)

    def interrupted(*args):
        backward(*args)
        if not within:
            signal.raise_signal(signal.SIGUSR1)

    backward, before = Distances.backward, signal.signal(signal.SIGUSR1, lambda *_: within.extend(slopes(5)))
    try:
        with arrays():
            expected = [*slopes(4), *slopes(5)]
            monkeypatch.setattr(Distances, "backward", interrupted)
            found = slopes(4)
    finally:
        signal.signal(signal.SIGUSR1, before)
    close([*found, *within], expected, rtol=1e-8)


def test_nothing_runs_when_a_strategy_ends():
    """A Ctrl-C is lost in the callback of a weak reference."""
    with autokern.enabled(), gpytorch.settings.fast_pred_var():
        model = SingleTaskGP(*data()).eval()
        for m in (2, 80):
            assert model(points(m)).variance.isfinite().all()
        assert model.condition_on_observations(points(2), torch.zeros(2, 1, **F64)).posterior(points(2)) is not None
    references = weakref.getweakrefs(model.prediction_strategy)
    assert references
    assert [reference.__callback__ for reference in references] == [None] * len(references)


def test_input_transforms_that_renew_their_buffers_keep_the_factor():
    """BoTorch's detach them at each call."""
    model = MODELS["normalised inputs"]()
    with arrays():
        first = model.posterior(points(2)).mean
        strategy, before = model.prediction_strategy, model.input_transform._offset
        close([model.posterior(points(2)).mean], [first])
        assert model.prediction_strategy is strategy
        assert model.input_transform._offset is not before
        model.input_transform._offset = before + 1.0
        model.posterior(points(2))
        assert model.prediction_strategy is not strategy


def test_raw_tensors_that_change_after_the_call():
    """Gradients are those of the call; a derivative of them would be of something else, and says so as torch does."""
    model, x = MODELS["usual"](), points(5, 2).requires_grad_()
    with arrays():
        expected = torch.autograd.grad(weighted(model.posterior(x).mean), x)
        value = weighted(model.posterior(x).mean)
        with torch.no_grad():
            model.covar_module.raw_lengthscale.add_(1.0)
        close(torch.autograd.grad(value, x, retain_graph=True), expected)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(value, x, create_graph=True)


class Called(Regression):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


class Doubled(Regression):
    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), 2 * self.covar_module(x))


class Shifted(RBFKernel):
    def forward(self, x1, x2, **params):
        return 2 * super().forward(x1, x2, **params)


class Noted(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def of_one_dimension():
    model = Regression(kernel=RBFKernel(active_dims=[0]))
    model.set_train_data(data()[0][:, :1], strict=False)
    return model


UNSERVED = {
    "linear": with_kernel(LinearKernel),
    "no points": with_kernel(ConstantKernel),
    "not smooth": with_kernel(lambda: PiecewisePolynomialKernel(0)),
    "own call": Called,
    "own forward": Doubled,
    "own kernel": lambda: Regression(kernel=Shifted()),
    "one dimension": of_one_dimension,
}
CONTEXTS = {
    "prior": gpytorch.settings.prior_mode,
    "missing observations": lambda: gpytorch.settings.observation_nan_policy("mask"),
    "little memory": gpytorch.settings.memory_efficient,
    "gradients through caches": lambda: gpytorch.settings.detach_test_caches(False),
    "traced": gpytorch.settings.trace_mode,
    "dispatch mode": Noted,
    "forward differentiation": torch.autograd.forward_ad.dual_level,
    "autocast": lambda: torch.autocast("cpu", enabled=True),
}
POINTS = {
    "one dimension": torch.zeros(4, **F64),
    "none": torch.zeros(0, D, **F64),
    "too many": torch.zeros(512, D, **F64),
    "negated": torch.complex(points(4), -points(4)).conj().imag,
    "too few columns": points(2)[:, :2],
    "those of the data": data()[0],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted({*UNSERVED, *CONTEXTS, *POINTS, "in training"}))
def test_what_asks_for_something_else_runs_stock(name):
    def run():
        torch.manual_seed(0)
        model = UNSERVED.get(name, Regression)().train(name == "in training")
        with quick(), CONTEXTS.get(name, contextlib.nullcontext)():
            found = model(POINTS.get(name, points(4)))
            return [found.mean.detach(), found.covariance_matrix.detach()]

    close(*reversed(both(lambda: outcome(run), calls=0)), rtol=1e-4, atol=1e-5)


class Checked(fully_bayesian.SaasFullyBayesianSingleTaskGP):
    """A user's model, whose own code must run."""

    calls = 0

    def _check_if_fitted(self):
        Checked.calls += 1
        super()._check_if_fitted()


@stock_s(calls=0)
def test_a_check_of_the_user_s_runs_in_each_prediction():
    model = of_samples(Checked)
    before = Checked.calls
    return *read(model, points(3, 2)), torch.tensor(Checked.calls - before)


@stock_s()
def test_gradients_by_the_mean_alone_do_not_pass_the_covariance():
    """A confidence region writes into what its standard deviations are made of."""
    model = moved(SingleTaskGP(*data())).eval()
    with gpytorch.settings.fast_pred_var():
        posterior = model(points(3).requires_grad_())
        lower, upper = posterior.confidence_region()
        return torch.autograd.grad(lower.sum() + 2 * upper.sum(), posterior.mean)[0]


@pytest.mark.parametrize(("kind", "most"), [(Regression, 1), (lambda n: SingleTaskGP(*data()), 2)])
def test_a_model_that_may_predict_once_is_read_at_its_second_prediction(kind, most):
    """Reading takes longer than the prediction; BoTorch's models are asked many times."""
    model, x = kind(8).eval(), points(3)
    with autokern.enabled(), torch.no_grad():
        before = sum(autokern.stats().get("posterior", {}).values())
        model(x), model(x)
        assert sum(autokern.stats()["posterior"].values()) - before == most


def test_a_model_is_not_read_for_more_points_than_arrays_serve():
    model = Regression(8).eval()
    with torch.no_grad(), autokern.enabled():
        before, found = autokern.stats().get("posterior"), model(points(300)).mean
        assert autokern.stats().get("posterior") == before
        with arrays():
            torch.testing.assert_close(model(points(300)[:200]).mean, found[:200])


@as_stock()
def test_means_alone():
    """With `skip_posterior_variances`, arrays compute the mean, and the covariance is the library's zero."""
    model, found = Regression(8).eval(), []
    for grad, shape in itertools.product((False, True), ((5,), (3, 5), (1,))):
        x = points(*shape).requires_grad_(grad)
        for _ in range(3):
            with torch.set_grad_enabled(grad), gpytorch.settings.skip_posterior_variances():
                one = model(x)
            covariance = one.lazy_covariance_matrix
            found += [type(one), type(covariance), covariance.shape, covariance.dtype, one.mean.detach()]
        if grad:
            found += [torch.autograd.grad(one.mean.sum(), [x, *model.parameters()], allow_unused=True)]
    return found


def trained(model, i=0):
    model.train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    model.eval()


def loaded(model, i=0):
    model.load_state_dict({name: t + 0.1 if "raw" in name else t for name, t in model.state_dict().items()})


def observed(model, i=0):
    x, y = data(8 + i)
    model.set_train_data(x, y[:, 0], strict=False)


def predicted(model, grad=False, at=0):
    """A prediction, which holds its graph, and its moments, slopes and strategy."""
    x = points(3, seed=at).requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        one = model(x)
    found = [one.mean.detach(), one.covariance_matrix.detach(), type(model.prediction_strategy).__name__]
    if grad:
        value, tensors = weighted(one.mean) + weighted(one.covariance_matrix), [x, *model.parameters()]
        found += torch.autograd.grad(value, tensors, allow_unused=True, retain_graph=True)
    return one, found


def of_columns():
    return LinearKernel() + RBFKernel(active_dims=[0, 2])


@contextlib.contextmanager
def readings(most):
    counted, made = [], Posterior.__init__

    def read(self, *args):  # a mock would keep the arrays
        counted.append(args[0].__class__)
        made(self, *args)

    with autokern.enabled(), mock.patch.object(Posterior, "__init__", read):
        yield
    assert 0 < len(counted) <= most


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kernel", [RBFKernel, of_columns])
@pytest.mark.parametrize("change", [trained, loaded, observed])
def test_arrays_are_renewed_at_each_state_of_a_model(change, kernel, grad):
    """While a graph needs them, a second reading takes turns with the first."""

    def run():
        model, found, latest = Regression(8, kernel()).eval(), [], None
        for i in range(14):
            change(model, i)
            latest, one = predicted(model, grad, at=i)  # noqa: RUF059
            found += one
        return found

    expected = run()
    with readings(1 + grad):
        close(run(), expected, rtol=1e-9)


def shifted(self, inputs):
    prior = super(Regression, self)._get_train_prior_distribution(inputs)
    return gpytorch.distributions.MultivariateNormal(prior.mean + 1, prior.lazy_covariance_matrix)


def replaced(model, monkeypatch):
    model.covar_module = ScaleKernel(PiecewisePolynomialKernel()).double()


def bounded(model, monkeypatch):
    model.covar_module.register_constraint("raw_lengthscale", gpytorch.constraints.Interval(0.1, 4.0).double())


def with_a_prior(model, monkeypatch):
    model.covar_module.register_prior("prior", gpytorch.priors.GammaPrior(2.0, 3.0), "lengthscale")


def patched(model, monkeypatch):
    model.covar_module.forward = lambda *args, **kwargs: 2 * RBFKernel.forward(model.covar_module, *args, **kwargs)


def patched_in_its_class(model, monkeypatch):
    monkeypatch.setattr(Regression, "_get_train_prior_distribution", shifted, raising=False)


def of_another_class(model, monkeypatch):
    model.covar_module.__class__ = Shifted


def in_single_precision(model, monkeypatch):
    model.float().double()


def differentiable_data(model, monkeypatch):
    model.train_inputs[0].requires_grad_()


def noisier(model, monkeypatch):
    model.likelihood = gpytorch.likelihoods.GaussianLikelihood().double().eval()
    model.likelihood.noise = 3.0


CHANGES = [replaced, bounded, with_a_prior, patched, patched_in_its_class, of_another_class, in_single_precision,
           differentiable_data, noisier]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_another_than_at_an_earlier_state_is_noticed(change, monkeypatch):
    def run():
        model, found = Regression(8, RBFKernel()).eval(), []
        for i in range(9):
            trained(model)
            if i == 6:
                change(model, monkeypatch)
            found += predicted(model, grad=i > 6, at=i)[1]
        monkeypatch.undo()
        return found

    expected = run()
    with readings(1):
        close(run(), expected, rtol=1e-9)


def test_an_earlier_state_is_freed_or_put_back():
    model = Regression(8).eval()
    with readings(2):
        for _ in range(6):
            trained(model)
            before = predicted(model)[1]
        first, values = model.prediction_strategy, copy.deepcopy(model.state_dict())
        trained(model)
        predicted(model)
        model.load_state_dict(values)
        model.prediction_strategy = first
        close(predicted(model)[1], before)
        assert model.prediction_strategy is first
        freed = [weakref.ref(one) for one in (first, model.train_inputs[0], model)]
        del first
        observed(model)
        predicted(model)
        assert [one() is None for one in freed[:2]] == [True, True]
        copied = pickle.loads(pickle.dumps(model))
        close(predicted(copied)[1], predicted(model)[1])
    del model
    gc.collect()
    assert freed[2]() is None


def test_gradients_of_a_state_are_those_of_its_call():
    model, latest = Regression(8).eval(), None
    with readings(3):
        for i in range(12):
            trained(model)
            latest, found = predicted(model, grad=True)
            if i == 6:
                kept, expected = latest, found[4:]
        slopes = torch.autograd.grad(
            weighted(kept.mean) + weighted(kept.covariance_matrix), [*model.parameters()], allow_unused=True
        )
    close(list(slopes), expected)


def test_points_that_are_not_finite_give_no_warnings_of_arrays(recwarn):
    def run():
        model, found = Regression(8).eval(), []
        for i in range(9):
            observed(model, i)
            if i > 5:
                model.train_inputs[0][2, 0] = [float("inf"), 1e308, float("nan")][i - 6]
            with contextlib.suppress(NanError):
                found += predicted(model)[1]
        return found

    expected = run()
    with readings(3):
        close(run(), expected, rtol=1e-9)
    assert not [str(one.message) for one in recwarn if one.category is RuntimeWarning]


def test_an_interrupt_while_arrays_are_renewed_leaves_gradients_on(monkeypatch):
    def interrupted(self, known):
        torch.set_grad_enabled(False)  # as between two statements of `no_grad`
        raise KeyboardInterrupt

    model = Regression(8).eval()
    with autokern.enabled():
        for _ in range(6):
            trained(model)
            predicted(model)
        trained(model)
        monkeypatch.setattr(Posterior, "_take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(points(3))
    assert torch.is_grad_enabled()
