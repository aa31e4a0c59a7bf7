"""A model whose `forward` adds kernels is served as one whose kernel is their sum, and looks to users as it did."""

import copy
import io

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import AdditiveKernel, LinearKernel, MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean, LinearMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.operators import SumLinearOperator
from support.models import loss_of, points, step
from support.outcomes import as_stock, assert_close, both, count

import autokern
from autokern.model.forward import joined, joined_covariance


class Own(RBFKernel):
    def forward(self, x1, x2, **options):
        return super().forward(x1 * 2, x2 * 2, **options)


class Base(gpytorch.models.ExactGP):
    def __init__(self, n=30, dtype=torch.float64, batch=(), own=False):
        torch.manual_seed(0)
        x = points(*batch, n, d=3, dtype=dtype)
        super().__init__(x, (6 * x[..., 0]).sin() + x[..., 1] ** 2, GaussianLikelihood(batch_shape=torch.Size(batch)))
        options = {"batch_shape": torch.Size(batch)}
        self.mean = LinearMean(3, batch_shape=torch.Size(batch))
        self.trend = ScaleKernel(MaternKernel(2.5, active_dims=[0], **options), **options)
        self.week = ScaleKernel(PeriodicKernel(active_dims=[0], **options), **options)
        self.price = (Own if own else RBFKernel)(ard_num_dims=2, active_dims=[2, 1], **options)
        self.to(dtype)


class Added(Base):
    def forward(self, x):
        return MultivariateNormal(self.mean(x), self.trend(x) + self.week(x) + self.price(x))


class Nested(Base):
    def forward(self, x):
        covariance = self.trend(x) + (self.week(x) + self.price(x))
        return gpytorch.distributions.MultivariateNormal(self.mean(x), covariance)


class Warped(Base):
    def forward(self, x):
        x = x * 1.5
        return MultivariateNormal(self.mean(x), self.trend(x) + self.whole(x) + self.price(x))

    def __init__(self, **options):
        super().__init__(**options)
        self.whole = ScaleKernel(LinearKernel()).to(self.train_targets)


class Twice(Base):
    def forward(self, x):
        return MultivariateNormal(self.mean(x), self.trend(x) + self.trend(x))


def used(model, test):
    """What a model computes: steps of training, a prior that is read after a step, and predictions."""
    yield step(model) if not model.train_targets.dim() > 1 else ()
    prior = model(*model.train_inputs)
    loss = -ExactMarginalLogLikelihood(model.likelihood, model)(prior, model.train_targets).sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss.backward()
    optimizer.step()
    yield loss.detach(), type(prior.lazy_covariance_matrix), prior.covariance_matrix.detach()
    model.eval()
    for fast in (False, True):
        with torch.no_grad(), gpytorch.settings.fast_pred_var(fast):
            for _ in range(3):
                found = model.likelihood(model(test))
                yield found.mean, found.variance, found.covariance_matrix
    inner = test.clone().requires_grad_()
    found = model(inner)
    yield found.mean.detach(), *torch.autograd.grad(found.mean.sum() + found.variance.sum(), inner)


CASES = {
    "added": (Added, {}),
    "single": (Added, {"dtype": torch.float32}),
    "nested": (Nested, {}),
    "warped": (Warped, {}),
    "twice": (Twice, {}),
    "own kernel": (Added, {"own": True}),
    "many points": (Added, {"n": 350}),
    "beyond": (Nested, {"n": 820}),
    "one point": (Added, {"n": 1}),
    "batch": (Added, {"batch": (3,)}),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_stock_s(name):
    kind, options = CASES[name]

    def run():
        model = kind(**options)
        with gpytorch.settings.max_cholesky_size(10**6):
            return list(used(model, points(5, d=3, seed=1, dtype=model.train_targets.dtype)))

    theirs, ours = both(run)
    single = options.get("dtype") is torch.float32
    assert_close(ours, theirs, **({} if single else {"rtol": 1e-6, "atol": 1e-7}))
    assert theirs[1][1] is ours[1][1] is SumLinearOperator


def test_arrays_serve_steps_and_predictions():
    with autokern.enabled():
        before = count("objective", "arrays"), count("posterior", "arrays")
        list(used(Added(), points(5, d=3, seed=1)))
        assert count("objective", "arrays") == before[0] + 2
        assert count("posterior", "arrays") > before[1] + 3


def test_second_derivatives_are_those_of_one_kernel():
    """Those of the library's own kernels are not twice differentiable."""

    class Whole(Added):
        def forward(self, x):
            return MultivariateNormal(self.mean(x), AdditiveKernel(self.trend, self.week, self.price)(x))

    def second(model):
        parameters = list(model.parameters())
        loss = loss_of(ExactMarginalLogLikelihood(model.likelihood, model))
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), parameters)

    with autokern.enabled():
        assert_close(second(Added()), second(Whole()))


@pytest.mark.parametrize("change", ["kernel", "parameter", "data", "copy", "pickle", "deleted"])
@as_stock(rtol=1e-6, atol=1e-7)
def test_changes_between_calls(change):
    model, test = Added(), points(4, d=3, seed=2)
    list(used(model, test))
    if change == "kernel":
        model.week = ScaleKernel(PeriodicKernel(active_dims=[1])).double()
    elif change == "parameter":
        model.price.lengthscale = 0.2
    elif change == "data":
        model.set_train_data(points(20, d=3, seed=3), torch.ones(20).double(), strict=False)
    elif change == "copy":
        model, old = copy.deepcopy(model), model
        old.trend.outputscale = 7.0
    elif change == "pickle":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        model = torch.load(file, weights_only=False)
    else:
        model.mean = ConstantMean().double()
    return [names for names, _ in model.named_modules()], list(used(model, test))


def test_other_points_are_not_joined():
    """Terms at other points, or evaluated already, stay as they are."""
    model = Added()
    (x,) = model.train_inputs
    prior = model(x)
    whole, again = (joined(model, prior).lazy_covariance_matrix.kernel for _ in range(2))
    assert type(whole) is AdditiveKernel
    assert whole is again
    covariance = prior.lazy_covariance_matrix
    assert joined_covariance(model, covariance, x + 1) is covariance
    covariance.linear_ops[0].evaluate_kernel()
    assert joined(model, prior) is prior


class Scaled(Added):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3).double())

    def forward(self, x):
        z = x * self.scale
        return MultivariateNormal(self.mean(x), self.trend(z) + self.week(x) + self.price(z))


@as_stock(rtol=1e-6, atol=1e-7)
def test_points_of_equal_numbers_keep_their_graph():
    model, x = Scaled(), points(4, d=3, seed=2)
    loss = loss_of(ExactMarginalLogLikelihood(model.likelihood, model))
    by_loss = torch.autograd.grad(loss, model.scale)
    found = model.eval()(x)
    return by_loss, torch.autograd.grad(found.mean.sum() + found.variance.sum(), model.scale)


@as_stock(rtol=1e-6, atol=1e-7)
def test_what_users_see_is_the_sum():
    """In the prior of the strategy, in the likelihood, and in an override of the method that makes the prior."""

    class Own(Added):
        def _get_train_prior_distribution(self, inputs, **kwargs):
            found = super()._get_train_prior_distribution(inputs, **kwargs)
            self.parts = [one.to_dense().detach() for one in found.lazy_covariance_matrix.linear_ops]
            return found

    found = []
    for model in (Added().eval(), Own().eval()):
        with torch.no_grad():
            found += [model(points(4, d=3, seed=2)).variance for _ in range(3)]
        strategy = model.prediction_strategy
        found += [type(strategy.train_prior_dist.lazy_covariance_matrix), type(strategy.lik_train_train_covar)]
        found += [type(strategy.lik_train_train_covar._linear_op), *vars(model).get("parts", [])]
    return found


@as_stock()
def test_a_model_whose_inputs_are_a_tensor():
    class Prior(gpytorch.models.GP):
        def __init__(self):
            super().__init__()
            self.train_inputs, self.kernel = points(5), RBFKernel().double()

        def forward(self, x):
            return MultivariateNormal(x[:, 0], self.kernel(x) + self.kernel(x))

    model, x = Prior(), points(5)
    return ExactMarginalLogLikelihood(GaussianLikelihood().double(), model)(model(x), x[:, 1]).detach()


@as_stock(rtol=1e-6, atol=1e-7)
def test_fantasies():
    model = Added().eval()
    test = points(4, d=3, seed=2)
    with torch.no_grad():
        model(test)
        grown = model.get_fantasy_model(points(2, d=3, seed=4), torch.ones(2).double())
        found = [grown(test).mean, grown(test).variance]
    return found
