"""Marginal likelihoods of training loops whose model is not read as arrays: replays compute what stock does."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import RBFKernel, RBFKernelGrad, RQKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMeanGrad, LinearMean, ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from gpytorch.priors import GammaPrior
from support.losses import (
    DOUBLE,
    Model,
    Own,
    as_library,
    at_once,
    called,
    once,
    points,
    replays,
    same,
    single,
    step,
    trained,
)
from support.threads import in_threads

from autokern.hooks import install
from autokern.hooks.later import losses


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    at_once(monkeypatch)


def derivatives(dtype=DOUBLE):
    x = points(6, 1, dtype)
    y = torch.cat([(3 * x).sin(), 3 * (3 * x).cos()], -1)
    kind, mean = MultitaskMultivariateNormal, ConstantMeanGrad()
    model = Model(x, y, MultitaskGaussianLikelihood(num_tasks=2), ScaleKernel(RBFKernelGrad()), mean, kind).to(dtype)
    return ExactMarginalLogLikelihood(model.likelihood, model)


def deep():
    return single(features=torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)))


CASES = {
    "own kernel": single,
    "single precision": lambda: single(dtype=torch.float32),
    "derivatives": derivatives,
    "derivatives, single precision": lambda: derivatives(torch.float32),
    "no mean": lambda: single(mean=ZeroMean()),
    "linear mean": lambda: single(mean=LinearMean(2)),
    "features": deep,
    "fixed noise": lambda: single(likelihood=FixedNoiseGaussianLikelihood(torch.full((12,), 0.05, dtype=DOUBLE))),
    "leave one out": lambda: single(ScaleKernel(RQKernel()), kind=LeaveOneOutPseudoLikelihood),
    "sum": lambda: single(ScaleKernel(Own()) + RBFKernel(active_dims=[0])),
}


def test_what_serves_without_a_replay_is_timed_warm(monkeypatch):
    mll, now, took = single(), [0.0], iter((2.0, 0.1, 0.2))
    prior, target, stock = mll.model(*mll.model.train_inputs), mll.model.train_targets, type(mll).forward

    def ours(*call):
        now[0] += next(took)
        return stock(*call)

    known = losses.Loss(mll)
    monkeypatch.setattr(losses.time, "thread_time", lambda: now[0])
    assert not isinstance(known.consists(mll, stock, ours, prior, target), str)
    known.stock(mll, stock, ours, prior, target)
    assert known._seconds == pytest.approx(0.1)


@pytest.mark.parametrize("case", CASES)
def test_a_replayed_loss_is_that_of_the_library(case):
    theirs = trained(CASES[case])
    with install.enabled():
        before = replays()
        ours = trained(CASES[case])
        assert replays() - before >= 6
    same(ours, theirs, 1e-10 if "single" not in case else 1e-5)


def evaluated(mll):
    mll.eval()
    with torch.no_grad():
        mll.model(points(3)).mean.sum()
    mll.train()


CHANGES = {
    "frozen": once(lambda mll: mll.likelihood.noise_covar.raw_noise.requires_grad_(False)),
    "written": once(lambda mll: next(mll.model.covar_module.parameters()).data.fill_(0.7)),
    "other data": once(
        lambda mll: mll.model.set_train_data(points() + 0.1, (2 * points()).cos().sum(-1), strict=False)
    ),
    "targets in place": lambda mll, at: mll.model.train_targets.mul_(1.01),
    "another kernel": once(lambda mll: setattr(mll.model.covar_module, "base_kernel", Own().double())),
    "prior added": once(lambda mll: mll.model.covar_module.register_prior("p", GammaPrior(3.0, 2.0), "outputscale")),
    "evaluation between": once(evaluated),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("case", ["own kernel", "leave one out"])
def test_what_changes_in_a_loop_counts_at_once(case, change):
    if case == "leave one out" and change == "another kernel":
        pytest.skip("the own kernel is enough")
    theirs = trained(CASES[case], change=CHANGES[change])
    with install.enabled():
        ours = trained(CASES[case], change=CHANGES[change])
    same(ours, theirs)


def test_a_patch_counts_at_once(monkeypatch):
    """A function that the recording ran is replaced, on a class of the user's or of a library."""

    for owner, name in ((Own, "forward"), (ScaleKernel, "forward"), (gpytorch.constraints.Positive, "transform")):
        stock = getattr(owner, name)

        def doubled(mll, owner=owner, name=name, stock=stock):
            monkeypatch.setattr(owner, name, lambda *args, **kwargs: 2 * stock(*args, **kwargs))

        theirs = trained(single, change=once(doubled))
        monkeypatch.setattr(owner, name, stock)
        with install.enabled():
            ours = trained(single, change=once(doubled))
            monkeypatch.setattr(owner, name, stock)
        same(ours, theirs)


def prepared():
    """Return a marginal likelihood of which the next call is a replay."""
    mll = single()
    optimizer = torch.optim.SGD(mll.parameters(), lr=0.0)
    for _ in range(6):
        step(mll, optimizer)
    mll.zero_grad()
    return mll


@as_library(served=5, rtol=1e-8, atol=1e-10)
def test_graphs_are_as_stock():
    """Gradients by the prior, second derivatives, a freed graph, two losses at a time, and a written parameter."""
    mll = prepared()
    parameters = list(mll.parameters())
    loss, prior = called(mll)
    found = list(torch.autograd.grad(loss, [prior.loc, *parameters], retain_graph=True))
    slopes = torch.autograd.grad(loss, parameters, create_graph=True)
    found += torch.autograd.grad(sum(s.square().sum() for s in slopes), parameters)
    loss, prior = called(mll)
    prior.loc.retain_grad()
    loss.backward(retain_graph=True)
    found.append(prior.loc.grad)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    one, other = called(mll)[0], called(mll)[0]
    found += [*torch.autograd.grad(one, parameters), *torch.autograd.grad(other, parameters)]
    loss, prior = called(mll)
    with torch.no_grad():
        for p in parameters:
            p.add_(0.1)
    return [*found, prior.covariance_matrix.detach()]


@as_library()
def test_a_covariance_is_that_of_its_parameters_at_the_time():
    """Also where some parameters are not trained."""
    mll = single()
    mll.model.covar_module.base_kernel.raw_lengthscale.requires_grad_(False)
    optimizer = torch.optim.Adam(mll.parameters(), lr=0.1)
    for _ in range(8):
        loss, prior = called(mll)
        loss.backward()
        optimizer.step()
    return prior.covariance_matrix.detach()


def test_a_recording_that_fits_no_more_is_dropped():
    with install.enabled():
        mll = prepared()
        x = points(9)
        mll.model.set_train_data(x, x.sum(-1), strict=False)
        before = replays()
        for _ in range(8):
            called(mll)
        assert not losses._known.get(mll).serves
        assert replays() == before


def test_a_hook_on_the_prior_runs():
    with install.enabled():
        mll = prepared()
        prior = mll.model(*mll.model.train_inputs)
        seen = []
        prior.loc.register_hook(lambda grad: seen.append(grad.clone()))
        mll(prior, mll.model.train_targets).backward()
    assert len(seen) == 1


@as_library(rtol=1e-12, atol=0)
def test_a_prior_that_was_changed_is_not_the_models():
    """Another mean, or a covariance that is evaluated already, is computed from what it is."""
    mll = prepared()
    prior = mll.model(*mll.model.train_inputs)
    shifted = MultivariateNormal(2 * prior.loc + 1, prior.lazy_covariance_matrix)
    evaluated = mll.model(*mll.model.train_inputs)
    assert evaluated.covariance_matrix.shape == (12, 12)
    dense = MultivariateNormal(prior.loc, prior.covariance_matrix)
    return [mll(one, mll.model.train_targets).item() for one in (shifted, evaluated, dense)]


def test_without_gradients_and_with_other_arguments():
    with install.enabled():
        mll = prepared()
        expected = called(mll)[0].item()
        with torch.no_grad():
            assert called(mll)[0].item() == pytest.approx(expected)
        prior = mll.model(*mll.model.train_inputs)
        assert mll(prior, mll.model.train_targets, *mll.model.train_inputs).item() == pytest.approx(expected)
        target = mll.model.train_targets.clone().requires_grad_()
        mll(mll.model(*mll.model.train_inputs), target).backward()
        assert target.grad is not None
        with pytest.raises(RuntimeError):
            mll(prior, mll.model.train_targets[:3])
        assert torch.isnan(mll(mll.model(*mll.model.train_inputs), mll.model.train_targets * torch.nan))


def test_copies_and_pickles_leave_recordings_out():
    with install.enabled():
        mll = prepared()
        expected = called(mll)[0].item()
        for other in (copy.deepcopy(mll), pickle.loads(pickle.dumps(mll))):
            assert called(other)[0].item() == pytest.approx(expected, rel=1e-12)
            with torch.no_grad():
                next(iter(other.parameters())).add_(0.5)
            assert called(other)[0].item() != pytest.approx(expected, rel=1e-3)
        assert called(mll)[0].item() == pytest.approx(expected, rel=1e-12)


def test_a_model_is_freed():
    with install.enabled():
        mll = prepared()
        gone = weakref.ref(mll.model)
        del mll
        gc.collect()
    assert gone() is None


def test_threads_share_a_marginal_likelihood():
    with install.enabled():
        mll = prepared()
        expected, found = called(mll)[0].item(), []
        targets = [mll.model.train_targets * k for k in (1.0, 2.0, 3.0)]
        alone = [mll(mll.model(*mll.model.train_inputs), y).item() for y in targets]

        def work(k):
            found.extend((k, mll(mll.model(*mll.model.train_inputs), targets[k]).item()) for _ in range(40))

        in_threads(work, range(3))
    assert alone[0] == pytest.approx(expected)
    assert all(value == pytest.approx(alone[k], rel=1e-10) for k, value in found)


def test_a_tracer_of_the_users_keeps_its_place():
    import sys

    seen = []
    with install.enabled():
        mll = single()
        optimizer = torch.optim.SGD(mll.parameters(), lr=0.0)
        sys.settrace(lambda frame, event, argument: seen.append(event))
        try:
            for _ in range(5):
                step(mll, optimizer)
            assert sys.gettrace() is not None
        finally:
            sys.settrace(None)
    assert seen


class Caching(Own):
    """A kernel that leaves in itself what a later prediction reads."""

    def forward(self, x1, x2, diag=False, **params):
        if self.training:
            self._scale = self.lengthscale.detach() * 1.0
        return super().forward(x1, x2, diag, **params) * self._scale.mean()


def test_what_an_evaluation_leaves_behind_is_left_there():
    theirs = trained(lambda: single(ScaleKernel(Caching())), 20)
    with install.enabled():
        before = replays()
        same(trained(lambda: single(ScaleKernel(Caching())), 20), theirs)
        assert replays() == before
