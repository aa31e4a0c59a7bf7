"""Marginal likelihoods of training loops that are not read as arrays: replays compute what the library does."""

import copy
import functools
import gc
import pickle
import sys
import weakref

import pytest
import torch
from gpytorch import likelihoods, variational
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import RBFKernel, RBFKernelGrad, ScaleKernel
from gpytorch.means import ConstantMeanGrad, LinearMean, ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood, PredictiveLogLikelihood
from gpytorch.variational import NaturalVariationalDistribution, UnwhitenedVariationalStrategy
from linear_operator.operators import DiagLinearOperator
from support import losses as made_losses
from support.losses import DOUBLE, Model, Own, as_library, batch, called, points, prepared, replays, single, sparse
from support.threads import in_threads

from autokern.core.replay.operations import UnrecordedError
from autokern.hooks import gpytorch as hooks
from autokern.hooks import install
from autokern.hooks.later import losses

pytestmark = pytest.mark.usefixtures("at_once")


def derivatives(dtype=DOUBLE):
    x = points(6, 1, dtype)
    y = torch.cat([(3 * x).sin(), 3 * (3 * x).cos()], -1)
    kind, likelihood = MultitaskMultivariateNormal, likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
    model = Model(x, y, likelihood, ScaleKernel(RBFKernelGrad()), ConstantMeanGrad(), kind).to(dtype)
    return ExactMarginalLogLikelihood(model.likelihood, model)


def features():
    return single(features=torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)))


CASES = {
    "own kernel": single,
    "single precision": lambda: single(dtype=torch.float32),
    "derivatives": derivatives,
    "derivatives, single precision": lambda: derivatives(torch.float32),
    "no mean": lambda: single(mean=ZeroMean()),
    "linear mean": lambda: single(mean=LinearMean(2)),
    "features": features,
    "fixed noise": made_losses.noisy,
    "leave one out": lambda: single(ScaleKernel(Own()), kind=LeaveOneOutPseudoLikelihood),
    "sum": lambda: single(ScaleKernel(Own()) + RBFKernel(active_dims=[0])),
    "elbo": sparse,
    "predictive": lambda: sparse(mll=PredictiveLogLikelihood),
    "unwhitened": lambda: sparse(strategy=UnwhitenedVariationalStrategy),
    "mean field": lambda: sparse(kind=variational.MeanFieldVariationalDistribution),
    "natural": lambda: sparse(kind=NaturalVariationalDistribution),
    "fixed points": lambda: sparse(learn=False, mean=functools.partial(LinearMean, 2)),
    "student": lambda: sparse(likelihoods.StudentTLikelihood()),
    "decoupled": lambda: sparse(model=made_losses.Decoupled),
    "drawn hidden values": made_losses.deep,
    "drawn hidden values and expectation": lambda: made_losses.deep(made_losses.Poisson()),
    "hidden values at sites": made_losses.sites,
}


@pytest.mark.parametrize("case", CASES)
@as_library(served=6)
def test_a_replayed_step_is_that_of_the_library(case):
    return made_losses.trained(CASES[case])


def shared():
    """Of two kernels with one lengthscale."""
    one, other = Own(), Own()
    other.raw_lengthscale = one.raw_lengthscale
    return single(ScaleKernel(one) + ScaleKernel(other))


@pytest.mark.parametrize("make", [single, sparse, shared, made_losses.deep, made_losses.sites])
@as_library(served=5, bound=1e-7)
def test_graphs_are_as_stock(make):
    """Gradients by the distribution, second ones, a freed graph, two losses at a time, and a written parameter."""
    mll = prepared(make)
    parameters = [p for name, p in mll.named_parameters() if "hidden.quad_sites" not in name]
    slopes = torch.autograd.grad(called(mll)[0], parameters, create_graph=True)
    found = [*slopes, *torch.autograd.grad(sum(s.square().sum() for s in slopes), parameters)]
    inputs, target = batch(mll, 0)
    output = mll.model(*inputs)
    output.loc.retain_grad()
    loss = mll(output, target)
    loss.backward(retain_graph=True)
    loss.backward()
    found += [output.loc.grad, *(p.grad.clone() for p in parameters)]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    one, other = called(mll)[0], called(mll, 1)[0]
    found += [*torch.autograd.grad(one, parameters), *torch.autograd.grad(other, parameters)]
    loss, output = called(mll)
    with torch.no_grad():
        for p in parameters:
            p.add_(0.1)
    if make not in (single, shared):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    # stock's variance of a variational model is partly of now
    late = output.covariance_matrix if make in (single, shared) else output.variance
    return [*found, late, called(mll)[0]]


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


@as_library(bound=1e-12)
def test_a_prior_that_was_changed_is_not_the_models():
    """Another mean, or a covariance that is evaluated already, is computed from what it is."""
    mll = prepared()
    prior = mll.model(*mll.model.train_inputs)
    shifted = MultivariateNormal(2 * prior.loc + 1, prior.lazy_covariance_matrix)
    evaluated = mll.model(*mll.model.train_inputs)
    assert evaluated.covariance_matrix.shape == (12, 12)
    dense = MultivariateNormal(prior.loc, prior.covariance_matrix)
    return [mll(one, mll.model.train_targets) for one in (shifted, evaluated, dense)]


@as_library()
def test_calls_without_gradients_and_with_other_arguments():
    mll = prepared()
    inputs, target = mll.model.train_inputs, mll.model.train_targets
    with torch.no_grad():
        found = [called(mll)[0]]
    prior, wanted = mll.model(*inputs), target.clone().requires_grad_()
    found += [mll(prior, target, *inputs), mll(mll.model(*inputs), target * torch.nan).isnan()]
    with pytest.raises(RuntimeError):
        mll(prior, target[:3])
    return [*found, *torch.autograd.grad(mll(mll.model(*inputs), wanted), wanted)]


@made_losses.each_kind
def test_copies_and_pickles_leave_recordings_out_and_a_model_is_freed(make):
    with install.enabled():
        mll = prepared(make)
        expected, gone = called(mll)[0].item(), weakref.ref(mll.model)
        mll.eval().train()  # without caches, which the library cannot copy either
        for other in (copy.deepcopy(mll), pickle.loads(pickle.dumps(mll))):
            assert called(other)[0].item() == pytest.approx(expected, rel=1e-12)
            with torch.no_grad():
                next(iter(other.parameters())).add_(0.5)
            assert called(other)[0].item() != pytest.approx(expected, rel=1e-3)
        assert called(mll)[0].item() == pytest.approx(expected, rel=1e-12)
        del mll
        gc.collect()
    assert gone() is None


def test_threads_share_a_marginal_likelihood():
    with install.enabled():
        mll, found = prepared(), []
        targets = [mll.model.train_targets * k for k in (1.0, 2.0, 3.0)]
        alone = [mll(mll.model(*mll.model.train_inputs), y).item() for y in targets]

        def work(k):
            found.extend((k, mll(mll.model(*mll.model.train_inputs), targets[k]).item()) for _ in range(40))

        in_threads(work, range(3))
    assert all(value == pytest.approx(alone[k], rel=1e-10) for k, value in found)


def test_a_loss_waits_longer_if_an_earlier_one_of_its_kind_was_recorded_too_late_to_pay():
    history = losses.Loss(single())._history
    assert not any(isinstance(part, type) for kind in losses.repeated._histories for part in kind)  # kept alive
    assert losses.Loss(single())._until == 0.0
    history.repaid, history.seconds = 1000.0, 0.01
    assert losses.Loss(single())._until == 10.0


@made_losses.each_kind
def test_models_of_a_class_whose_replays_have_paid_are_recorded_at_once(make, monkeypatch):
    paid = set()
    monkeypatch.setattr(hooks, "repaid", paid)
    monkeypatch.setattr(hooks, "_ENOUGH", float("inf"))
    monkeypatch.setattr(hooks, "_ENOUGH_VARIATIONAL", float("inf"))
    with install.enabled():
        before = replays()
        prepared(make)
        assert replays() == before
        paid.add(type(make().model))
        prepared(make)
        assert replays() > before


def test_an_operator_with_a_tensor_besides_its_arguments_is_not_recorded():
    """Its constructor may have computed that tensor, which a replay would not compute again."""
    operator = DiagLinearOperator(torch.ones(3))
    prior = MultivariateNormal(torch.zeros(3), operator)
    assert losses.Given.of(prior, torch.zeros(3)) is not None
    operator.root = torch.ones(3)
    with pytest.raises(UnrecordedError):
        losses.Given.of(prior, torch.zeros(3))


def test_a_tracer_of_the_users_keeps_its_place():
    seen = []
    with install.enabled():
        sys.settrace(lambda frame, event, argument: seen.append(event))
        try:
            prepared()
            assert sys.gettrace() is not None
        finally:
            sys.settrace(None)
    assert seen
