"""Programs of a hostile review: what users patch, subclass and write into has the effect that it has in stock."""

import contextlib
import warnings
from unittest import mock

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import AdditiveKernel, Kernel, MaternKernel, ProductKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.means import LinearMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from support.models import ExactModel, points
from support.outcomes import as_stock

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


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 1), (3, 2)])
@as_stock(rtol=1e-6)
def test_noise_of_fantasies_in_odd_shapes(shape):
    model = regression(likelihood=FixedNoiseGaussianLikelihood(torch.full((20,), 0.05, dtype=torch.float64))).eval()
    noise = torch.full(shape, 0.3, dtype=torch.float64)
    with torch.no_grad(), warnings.catch_warnings(record=True) as told, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        model(points(3, seed=1))
        if len(shape) > 1:
            stack.enter_context(pytest.raises(RuntimeError, match="same number of dimensions"))
        grown = model.get_fantasy_model(points(2, seed=1), torch.ones(2, dtype=torch.float64), noise=noise)
        return grown(points(5, seed=1)).mean, torch.tensor(len({t.category for t in told}))
    return ()
