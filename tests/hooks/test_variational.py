"""Training steps of variational models: replays compute what the library does, and notice what changes."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood, StudentTLikelihood
from gpytorch.means import ConstantMean, LinearMean
from gpytorch.mlls import PredictiveLogLikelihood, VariationalELBO
from gpytorch.priors import GammaPrior
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    UnwhitenedVariationalStrategy,
    VariationalStrategy,
)
from support.losses import as_library, at_once, once

import autokern
from autokern.hooks import install

DOUBLE = torch.float64
X = torch.rand(90, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(5))
Y = (6 * X).sin().sum(-1)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    at_once(monkeypatch)


class Model(gpytorch.models.ApproximateGP):
    def __init__(self, strategy=VariationalStrategy, kind=CholeskyVariationalDistribution, learn=True, mean=None):
        points = X[:8].clone()
        super().__init__(strategy(self, points, kind(len(points)), learn_inducing_locations=learn))
        self.mean_module, self.covar_module = (mean or ConstantMean)(), ScaleKernel(RBFKernel(ard_num_dims=2))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def made(likelihood=None, mll=VariationalELBO, **options):
    torch.manual_seed(1)
    model = Model(**options).double()
    return mll((likelihood or GaussianLikelihood()).double(), model, num_data=len(X)).train()


CASES = {
    "elbo": made,
    "predictive": lambda: made(mll=PredictiveLogLikelihood),
    "unwhitened": lambda: made(strategy=UnwhitenedVariationalStrategy),
    "mean field": lambda: made(kind=MeanFieldVariationalDistribution),
    "natural": lambda: made(kind=NaturalVariationalDistribution),
    "fixed points": lambda: made(learn=False, mean=functools.partial(LinearMean, 2)),  # drawn after the seed is set
    "student": lambda: made(StudentTLikelihood()),
}


def replays():
    return autokern.stats().get("optimised function", {}).get("replay", 0)


def batch(at, size=30):
    rows = torch.randperm(len(X), generator=torch.Generator().manual_seed(at))[:size]
    return X[rows], Y[rows]


def trained(make, change=None, steps=14, size=lambda at: 30):
    """Return losses, gradients and the parameters after some steps."""
    mll = make()
    optimizer = torch.optim.Adam(mll.parameters(), lr=0.02)
    found = []
    for at in range(steps):
        if change is not None:
            change(mll, at)
        x, y = batch(at, size(at))
        optimizer.zero_grad()
        loss = -mll(mll.model(x), y)
        loss.backward()
        optimizer.step()
        found += [loss.detach(), *(p.grad.clone() for p in mll.parameters() if p.grad is not None)]
    return [*found, *(p.detach() for p in mll.parameters())]


def same(ours, theirs, rtol=1e-9):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("case", CASES)
def test_a_replayed_step_is_that_of_the_library(case):
    theirs = trained(CASES[case])
    with install.enabled():
        before = replays()
        ours = trained(CASES[case])
        assert replays() - before >= 6
    same(ours, theirs)


def test_batches_of_other_sizes_and_branches_are_left_to_the_library():
    for make, size in ((made, lambda at: 30 if at % 3 else 17), (lambda: made(BernoulliLikelihood()), lambda at: 30)):
        theirs = trained(make, size=size)
        with install.enabled():
            same(trained(make, size=size), theirs)


def evaluated(mll, at):
    if at % 4 == 3:
        mll.eval()
        with torch.no_grad():
            mll.found = mll.model(X[:5]).variance.sum().item()
        mll.train()
        del mll.found


CHANGES = {
    "frozen": once(lambda mll: mll.model.variational_strategy.inducing_points.requires_grad_(False), 7),
    "written": once(lambda mll: mll.model.covar_module.base_kernel.raw_lengthscale.data.fill_(0.3), 7),
    "other number": once(lambda mll: setattr(mll, "num_data", 1000), 7),
    "other beta": once(lambda mll: setattr(mll, "beta", 0.1), 7),
    "other likelihood": once(
        lambda mll: mll.likelihood.noise_covar.register_constraint("raw_noise", GreaterThan(0.2)), 7
    ),
    "prior added": once(
        lambda mll: mll.model.covar_module.register_prior("late", GammaPrior(3.0, 2.0), "outputscale"), 7
    ),
    "evaluated": evaluated,
    "jitter": lambda mll, at: setattr(mll.model.variational_strategy, "jitter_val", 1e-3 if at < 7 else 1e-2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_in_a_loop_counts_at_once(change):
    theirs = trained(made, change)
    with install.enabled():
        same(trained(made, change), theirs)


def test_a_patch_counts_at_once(monkeypatch):
    for owner, name in ((Model, "forward"), (RBFKernel, "forward"), (GaussianLikelihood, "expected_log_prob")):
        stock = getattr(owner, name)

        def change(mll, at, owner=owner, name=name, stock=stock):
            if at == 7:
                monkeypatch.setattr(owner, name, lambda *args, **kwargs: stock(*args, **kwargs) * 2)
            if at == 0:
                monkeypatch.setattr(owner, name, stock)

        if owner is Model:

            def change(mll, at, stock=stock):
                monkeypatch.setattr(Model, "forward", stock if at < 7 else lambda self, x: stock(self, 2 * x))

        theirs = trained(made, change)
        with install.enabled():
            same(trained(made, change), theirs)
        monkeypatch.setattr(owner, name, stock)


@as_library(rtol=1e-8, atol=1e-8)
def test_predictions_after_training_are_those_of_the_parameters():
    mll = made()
    optimizer = torch.optim.Adam(mll.parameters(), lr=0.02)
    for at in range(12):
        x, y = batch(at)
        optimizer.zero_grad()
        (-mll(mll.model(x), y)).backward()
        optimizer.step()
    mll.eval()
    with torch.no_grad():
        prediction = mll.model(X[:7])
        return [prediction.mean, prediction.covariance_matrix, mll.model.variational_strategy.kl_divergence()]


def prepared():
    """Return a marginal likelihood of which the next step is a replay."""
    mll = made()
    for at in range(7):
        x, y = batch(at)
        mll(mll.model(x), y).backward()
        mll.zero_grad()
    return mll


@as_library(rtol=1e-9, atol=1e-9)
def test_other_uses_of_a_distribution_are_the_library_s():
    """Other terms of a loss, two calls before two losses, a loss that is computed twice, another distribution."""
    mll, (x, y) = prepared(), batch(20)
    parameters, distribution = list(mll.parameters()), mll.model(x)
    total = -mll(distribution, y) + 0.1 * distribution.variance.sum() + distribution.mean.square().sum()
    found = list(torch.autograd.grad(total, parameters))
    one, other = mll.model(x), mll.model(x + 0.1)
    losses = [mll(one, y), mll(other, y)]
    found += [*losses, *torch.autograd.grad(sum(losses), parameters)]
    distribution = mll.model(x)
    losses = [mll(distribution, y), mll(distribution, 2 * y)]
    found += [*losses, *torch.autograd.grad(sum(losses), parameters)]
    distribution = mll.model(x)
    shifted = gpytorch.distributions.MultivariateNormal(distribution.mean + 1, distribution.lazy_covariance_matrix)
    found += torch.autograd.grad(mll(shifted, y), parameters)
    distribution = mll.model(x)
    distribution.loc.retain_grad()
    mll(distribution, y).backward()
    return [*found, distribution.loc.grad]


@as_library(rtol=1e-7, atol=1e-7)
def test_graphs_are_as_stock():
    mll, (x, y) = prepared(), batch(21)
    parameters = list(mll.parameters())
    loss = mll(mll.model(x), y)
    slopes = torch.autograd.grad(loss, parameters, create_graph=True)
    found = list(torch.autograd.grad(sum(s.square().sum() for s in slopes), parameters))
    loss = mll(mll.model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    found += [p.grad.clone() for p in parameters]
    loss = mll(mll.model(x), y)
    with torch.no_grad():
        parameters[0].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    found.append(mll.model(x).variance)
    with torch.no_grad():
        return [*found, mll(mll.model(x), y)]


class Counting(Model):
    calls = 0

    def forward(self, x):
        Counting.calls += 1
        return super().forward(x)


def test_a_forward_with_effects_runs_as_often_as_by_the_library():
    def make():
        torch.manual_seed(1)
        Counting.calls = 0
        return VariationalELBO(GaussianLikelihood().double(), Counting().double(), num_data=len(X)).train()

    theirs, count = trained(make), Counting.calls
    with install.enabled():
        same(trained(make), theirs)
    assert Counting.calls == count


class Noisy(Model):
    def forward(self, x):
        return Model.forward(self, x + 0.01 * torch.randn_like(x))


class Poisson(Likelihood):
    """Its expectation is drawn."""

    def forward(self, function_samples, **kwargs):
        return torch.distributions.Poisson(function_samples.exp(), validate_args=False)


@pytest.mark.parametrize("kinds", [(GaussianLikelihood, Noisy), (Poisson, Model)], ids=["model", "likelihood"])
def test_random_draws_are_the_library_s(kinds):
    def make():
        torch.manual_seed(1)
        return VariationalELBO(kinds[0]().double(), kinds[1]().double(), num_data=len(X)).train()

    theirs, state = trained(make), torch.get_rng_state()
    with install.enabled():
        same(trained(make), theirs)
    assert torch.equal(torch.get_rng_state(), state)


class Weighted(VariationalELBO):
    """A loss of the user's own, which counts its calls if it is told to."""

    def __init__(self, *args, counts=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.counts, self.weights = counts, [1.0]

    def _log_likelihood_term(self, *args, **kwargs):
        if self.counts is not None:
            self.counts.append(1)
        return super()._log_likelihood_term(*args, **kwargs) * self.weights[0]


class Many(ConstantMean):
    """A mean with numbers of its own, which no parameter holds."""

    def __init__(self):
        super().__init__()
        self.many = torch.zeros(400, dtype=DOUBLE)

    def forward(self, x):
        return self.many[: x.shape[-2]] + self.many.mean()


def put(weights, at, value):
    weights[at] = value


OWN = {
    "a large tensor": lambda mll: mll.model.mean_module.many.data.fill_(0.9),
    "a list": lambda mll: put(mll.weights, 0, 3.0),
    "a tensor": lambda mll: mll.beta.data.fill_(0.7),
    "a class": lambda mll: setattr(type(mll), "weights", [2.0]) or vars(mll).pop("weights", None),
}


@pytest.mark.parametrize("inside", [False, True], ids=["before", "after the model's call"])
@pytest.mark.parametrize("change", OWN)
def test_losses_of_your_own_are_looked_at(change, inside, monkeypatch):
    monkeypatch.setattr(Weighted, "weights", None, raising=False)

    def losses():
        torch.manual_seed(1)
        mll = Weighted(GaussianLikelihood().double(), Model().double(), len(X), beta=torch.ones(())).train()
        mll.model.mean_module = Many()
        found = []
        for at in range(14):
            x, y = batch(at)
            if at == 10 and not inside:
                OWN[change](mll)
            output = mll.model(x)
            if at == 10 and inside:
                OWN[change](mll)
            loss = mll(output, y)
            loss.backward()
            found.append(loss.detach())
        return found

    theirs = losses()
    monkeypatch.setattr(Weighted, "weights", None, raising=False)
    with install.enabled():
        same(losses(), theirs)


def test_a_backward_pass_under_another_setting_is_that_of_the_call():
    def gradients():
        mll, found = made(), []
        for at in range(12):
            mll.zero_grad()
            x, y = batch(at)
            output = mll.model(x)
            loss = mll(output, y) + output.variance.mean()
            with gpytorch.settings.lazily_evaluate_kernels(at < 9):
                loss.backward()
            found += [p.grad for p in mll.parameters() if p.grad is not None]
        return found

    theirs = gradients()
    with install.enabled():
        same(gradients(), theirs)


def test_losses_of_your_own_that_count_their_calls_are_called():
    counts = []
    with install.enabled():
        trained(lambda: made(mll=functools.partial(Weighted, counts=counts)))
    assert len(counts) == 14


def test_copies_and_freed_models():
    with install.enabled():
        mll = prepared()
        x, y = batch(3)
        expected = mll(mll.model(x), y).item()
        other = copy.deepcopy(mll)
        assert other(other.model(x), y).item() == pytest.approx(expected, rel=1e-12)
        gone = weakref.ref(mll.model)
        del mll, other
        gc.collect()
    assert gone() is None
