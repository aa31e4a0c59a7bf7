"""What users patch, subclass and write into has its effect; models that no hook serves cost few questions."""

import contextlib
import copy
import warnings
from collections import Counter
from unittest import mock

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    MaternKernel,
    ProductKernel,
    RBFKernel,
    RBFKernelGrad,
    RQKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, ConstantMeanGrad, LinearMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from support.losses import Model, independent
from support.models import ExactModel, points, step
from support.outcomes import as_stock, assert_close, outcome

import autokern
from autokern.core.releases.known import Relied
from autokern.hooks import install
from autokern.model.libraries import prediction

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:The input matches")]


def regression(n=20, kernel=None, likelihood=None, kind=ExactModel):
    torch.manual_seed(0)
    x = torch.rand(n, 2, dtype=torch.float64)
    return kind(x, (4 * x.sum(-1)).sin(), kernel, likelihood, LinearMean(2)).to(x)


def halved(stock):
    return lambda self, *args, **kwargs: stock(self, *args, **kwargs) * 0.5


PATCHED = {
    "rbf": (RBFKernel, "forward", lambda: ScaleKernel(RBFKernel())),
    "matern": (MaternKernel, "forward", lambda: MaternKernel(2.5)),
    "scale": (ScaleKernel, "forward", lambda: ScaleKernel(RBFKernel())),
    "sum": (AdditiveKernel, "forward", lambda: RBFKernel() + MaternKernel(1.5)),
    "product": (ProductKernel, "forward", lambda: ScaleKernel(RBFKernel() * MaternKernel(1.5))),
    "distances": (Kernel, "covar_dist", lambda: ScaleKernel(RBFKernel())),
    "means": (DefaultPredictionStrategy, "exact_predictive_mean", lambda: ScaleKernel(RBFKernel())),
}


@pytest.mark.parametrize(("kind", "name", "kernel"), PATCHED.values(), ids=PATCHED)
@pytest.mark.parametrize("seen", [False, True], ids=["unseen", "seen"])
@as_stock()
def test_a_class_that_is_patched(kind, name, kernel, seen):
    model = regression(kernel=kernel())
    mll = ExactMarginalLogLikelihood(model.likelihood, model)

    def read():
        model.train()
        loss = mll(model(*model.train_inputs), model.train_targets)
        found = model.eval()(points(3, seed=1))
        return loss, *torch.autograd.grad(loss, list(mll.parameters())), found.mean, found.variance

    if seen:
        read()
    with mock.patch.object(kind, name, halved(vars(kind)[name])):
        found = read()
    return [*found, model.covar_module(points(3, seed=1)).to_dense(), *read()]


SHAPES = {
    "lengthscales without ARD": (RBFKernel, "covar_module.raw_lengthscale", (1, 2)),
    "a lengthscale of no shape": (lambda: MaternKernel(2.5), "covar_module.raw_lengthscale", ()),
    "levels of noise": (RBFKernel, "likelihood.noise_covar.raw_noise", (20,)),
    "alphas": (RQKernel, "covar_module.raw_alpha", (20,)),
}


@pytest.mark.parametrize(("kernel", "name", "shape"), SHAPES.values(), ids=SHAPES)
def test_parameters_of_other_shapes_are_left_to_the_library(kernel, name, shape):
    def run():
        model = regression(kernel=kernel())
        module, _, raw = name.rpartition(".")
        setattr(model.get_submodule(module), raw, torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)))
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        loss = mll(model(*model.train_inputs), model.train_targets)
        return loss.detach(), torch.autograd.grad(loss.sum(), list(mll.parameters()))

    expected = outcome(run)
    with autokern.enabled():
        assert_close(outcome(run), expected)


class Shifted(MultivariateNormal):
    @property
    def mean(self):
        return super().mean + 1


class OfShifted(ExactModel):
    def forward(self, x):
        return Shifted(self.mean_module(x), self.covar_module(x))


@as_stock()
def test_a_distribution_that_defines_its_mean():
    found = regression(kind=OfShifted).eval()(points(3, seed=1))
    return found.mean, found.variance


@as_stock()
def test_a_model_made_in_inference_mode():
    with torch.inference_mode():
        model, x = regression(), points(3, seed=1)
    loss = ExactMarginalLogLikelihood(model.likelihood, model)(model(*model.train_inputs), model.train_targets)
    found = model.eval()(x)
    graphs = torch.tensor([loss.requires_grad, found.mean.requires_grad, found.variance.requires_grad])
    return graphs, loss, found.mean, found.variance


@pytest.mark.parametrize(("shape", "targets"), [*((s, (2,)) for s in [(1,), (2,), (2, 1), (3, 2)]), ((5, 2), (5, 2))])
@as_stock(rtol=1e-6)
def test_noise_of_fantasies_in_odd_shapes(shape, targets):
    model = regression(likelihood=FixedNoiseGaussianLikelihood(torch.full((20,), 0.05, dtype=torch.float64))).eval()
    noise = torch.full(shape, 0.3, dtype=torch.float64)
    with torch.no_grad(), warnings.catch_warnings(record=True) as told, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        model(points(3, seed=1))
        if len(shape) > 1:
            stack.enter_context(pytest.raises(RuntimeError, match="same number of dimensions"))
        grown = model.get_fantasy_model(points(2, seed=1), torch.ones(targets, dtype=torch.float64), noise=noise)
        return grown(points(5, seed=1)).mean, torch.tensor(len({t.category for t in told}))
    return ()


TWO = torch.Size([2])


class Own(RBFKernel):
    """A kernel of the user's."""


PARTS = {
    "derivatives": lambda: (ScaleKernel(RBFKernelGrad()), ConstantMeanGrad(), MultitaskMultivariateNormal),
    "batch": lambda: (ScaleKernel(Own(batch_shape=TWO), batch_shape=TWO), ConstantMean(batch_shape=TWO), independent),
}
each_kind = pytest.mark.parametrize("kind", PARTS)


def made(kind, dtype):
    x = torch.linspace(0.0, 5.0, 12, dtype=dtype).unsqueeze(-1)
    return Model(x, torch.cat([x.sin(), x.cos()], -1), MultitaskGaussianLikelihood(2), *PARTS[kind]()).to(dtype)


@contextlib.contextmanager
def asked():
    """How often the hooks asked whether all is known, by what is to be known."""
    with pytest.MonkeyPatch.context() as patching:
        found, holds = Counter(), Relied.holds
        patching.setattr(Relied, "holds", lambda self: found.update([id(self)]) or holds(self))
        yield found


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_of_a_model_that_no_hook_serves(kind, dtype):
    model = made(kind, dtype)
    expected = step(copy.deepcopy(model))
    with autokern.enabled(), autokern.using(force={"kernel_matrix": "stock"}):
        step(model)
        with asked() as questions:
            found = step(model)
    assert_close(found, expected, rtol=0, atol=0)
    assert questions.total() <= 5


@each_kind
@pytest.mark.parametrize("fast", [True, False])
def test_a_prediction_that_no_hook_serves(kind, fast):
    """What predictions rely on is hundreds of functions: the first look at them takes longer than the prediction."""
    model = made(kind, torch.float32).eval()

    def predicted(model):
        with torch.no_grad(), gpytorch.settings.fast_pred_var(fast):
            found = [model(model.train_inputs[0][:k] + 0.1) for k in (3, 5)]
            return [t for one in found for t in (one.mean, one.covariance_matrix)]

    expected = predicted(copy.deepcopy(model))
    with autokern.enabled(), asked() as questions:
        found = predicted(model)
    assert not questions[id(prediction)]
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_an_idle_hook_asks_nothing(monkeypatch):
    kernel, x = RBFKernel(), torch.rand(5, 2)
    monkeypatch.setattr(Relied, "holds", lambda self: pytest.fail("asked"))
    with autokern.enabled():
        kernel.covar_dist(x1=x, x2=x)
        kernel.covar_dist(x, x, True, False)


def test_a_hook_that_asks_by_itself_takes_all_that_its_release_takes():
    """One with arguments that the hook does not know is asked first whether all is known (T14 passes such ones)."""

    def hooked(self, value):
        return value

    def newer(self, value, anew=None):
        return value

    assert install._takes_all(hooked, hooked)
    assert not install._takes_all(hooked, newer)
    assert not install._takes_all(hooked, lambda self, *values: values)
    assert not install._takes_all(hooked, lambda self: self), "it dropped one"
    assert not install._takes_all(hooked, lambda self, other: other), "it renamed one"
    assert not install._takes_all(hooked, lambda self, value=None: value), "it needs one no more"
    assert not install._takes_all(lambda self, value, **kwargs: value, lambda self, **kwargs: kwargs)
    assert install._takes_all(lambda self, *args, **kwargs: args, newer)


@pytest.mark.parametrize(
    ("n", "grad", "forced", "served"),
    [
        (64, "theta", {}, False),
        (64, "theta", {"kernel_matrix": "gemm"}, True),
        (65, "theta", {}, True),
        (200, "", {}, False),
        (201, "", {}, True),
    ],
)
def test_matrices_of_few_points_are_the_librarys(n, grad, forced, served):
    kernel, x = gpytorch.kernels.MaternKernel(ard_num_dims=3).double(), torch.rand(n, 3, dtype=torch.float64)
    with torch.set_grad_enabled(bool(grad)):
        expected = kernel(x).to_dense()
        with autokern.enabled(), autokern.using(force=forced):
            found = kernel(x).to_dense()
            assert ("kernel_matrix" in autokern.stats()) is served
    torch.testing.assert_close(found, expected, rtol=1e-12 * served, atol=1e-12 * served)
    told = str(autokern.explain("kernel_matrix", n=n, grad=grad))
    assert ("the library serves so few points" in told) is (n in (64, 200))
