"""Training steps of variational models: replays compute what the library does, and notice what changes."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, StudentTLikelihood
from gpytorch.means import ConstantMean, LinearMean
from gpytorch.mlls import PredictiveLogLikelihood, VariationalELBO
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    UnwhitenedVariationalStrategy,
    VariationalStrategy,
)

import autokern
from autokern.core.replay import recording
from autokern.hooks import install
from autokern.hooks import variational as hooks
from autokern.hooks.later import repeated

DOUBLE = torch.float64
X = torch.rand(90, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(5))
Y = (6 * X).sin().sum(-1)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Record at once, and serve whatever it takes."""
    monkeypatch.setattr(hooks, "_ENOUGH", 0.0)
    monkeypatch.setattr(recording, "_IN_CACHE", 0)  # results share memory
    for name, value in {"_GAIN": float("inf"), "_histories": {}}.items():
        monkeypatch.setattr(repeated, name, value)


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


def frozen(mll, at):
    if at == 7:
        mll.model.variational_strategy.inducing_points.requires_grad_(False)


def written(mll, at):
    if at == 7:
        mll.model.covar_module.base_kernel.raw_lengthscale.data.fill_(0.3)


def other_number(mll, at):
    if at == 7:
        mll.num_data = 1000


def other_beta(mll, at):
    if at == 7:
        mll.beta = 0.1


def other_likelihood(mll, at):
    if at == 7:
        mll.likelihood.noise_covar.register_constraint("raw_noise", gpytorch.constraints.GreaterThan(0.2))


def prior_added(mll, at):
    if at == 7:
        mll.model.covar_module.register_prior("late", gpytorch.priors.GammaPrior(3.0, 2.0), "outputscale")


def evaluated(mll, at):
    if at % 4 == 3:
        mll.eval()
        with torch.no_grad():
            mll.found = mll.model(X[:5]).variance.sum().item()
        mll.train()
        del mll.found


def jitter(mll, at):
    mll.model.variational_strategy.jitter_val = 1e-3 if at < 7 else 1e-2


CHANGES = (frozen, written, other_number, other_beta, other_likelihood, prior_added, evaluated, jitter)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
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


def test_predictions_after_training_are_those_of_the_parameters():
    found = []
    for on in (False, True):
        with install.enabled() if on else torch.enable_grad():
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
                found.append(
                    [prediction.mean, prediction.covariance_matrix, mll.model.variational_strategy.kl_divergence()]
                )
    same(found[1], found[0], 1e-8)


def prepared():
    """Return a marginal likelihood of which the next step is a replay."""
    mll = made()
    for at in range(7):
        x, y = batch(at)
        mll(mll.model(x), y).backward()
        mll.zero_grad()
    return mll


def both(compute):
    """Return the results of a function of a marginal likelihood by the library, and after replays."""
    theirs = compute(prepared())
    with install.enabled():
        return compute(prepared()), theirs


def test_other_uses_of_a_distribution_are_the_library_s():
    """Other terms of a loss, two calls before two losses, a loss that is computed twice, another distribution."""

    def compute(mll):
        parameters, (x, y) = list(mll.parameters()), batch(20)
        distribution = mll.model(x)
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
        found.append(distribution.loc.grad)
        return found

    same(*both(compute))


def test_graphs_are_as_stock():
    def compute(mll):
        parameters, (x, y) = list(mll.parameters()), batch(21)
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
            found.append(mll(mll.model(x), y))
        return found

    same(*both(compute), 1e-7)


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


def test_random_draws_of_a_model_are_the_library_s():
    class Noisy(Model):
        def forward(self, x):
            return super().forward(x + 0.01 * torch.randn_like(x))

    def make():
        torch.manual_seed(1)
        return VariationalELBO(GaussianLikelihood().double(), Noisy().double(), num_data=len(X)).train()

    theirs, state = trained(make), torch.get_rng_state()
    with install.enabled():
        same(trained(make), theirs)
    assert torch.equal(torch.get_rng_state(), state)


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
