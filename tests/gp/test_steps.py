"""Marginal likelihoods in one piece give stock's values and derivatives; what is unknown runs stock."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import types
import weakref

import gpytorch
import pytest
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import (
    AdditiveKernel,
    LinearKernel,
    MaternKernel,
    PiecewisePolynomialKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean, LinearMean, ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from gpytorch.priors import (
    GammaPrior,
    HalfNormalPrior,
    LogNormalPrior,
    NormalPrior,
    Prior,
    SmoothedBoxPrior,
    UniformPrior,
)
from linear_operator.operators import DiagLinearOperator
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import autokern
from autokern.gp import steps
from autokern.gp.array_density import KernelReading

N, D = 12, 3
B = torch.Size([2])


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel, mean):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = mean, kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Deep(Model):
    def __init__(self, *args):
        super().__init__(*args)
        torch.manual_seed(1)
        self.features = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh())

    def forward(self, x):
        return super().forward(self.features(x))


def made(kernel, mean=None, likelihood=None, n=N, dtype=torch.float64, batch=(), kind=Model):
    generator = torch.Generator().manual_seed(n)
    x = torch.rand(n, D, generator=generator, dtype=torch.float64)
    y = x.sum(-1).cos() + 0.1 * torch.randn(*batch, n, generator=generator, dtype=torch.float64)
    likelihood = likelihood or GaussianLikelihood(batch_shape=torch.Size(batch))
    model = kind(x.to(dtype), y.to(dtype), likelihood, kernel, mean or ConstantMean(batch_shape=torch.Size(batch)))
    mll = ExactMarginalLogLikelihood(likelihood, model.to(dtype)).train()
    with torch.no_grad():
        for p in mll.parameters():
            p.add_(0.3 * torch.rand(p.shape, generator=generator).to(dtype))
    return mll


def value_of(mll):
    return mll(mll.model(*mll.model.train_inputs), mll.model.train_targets)


def by(name):
    return autokern.using(force={"objective": name})


@pytest.fixture
def served(monkeypatch):
    """How many evaluations were made by arrays."""
    counts, stock = {"arrays": 0}, steps.loss

    def counted(step):
        found = stock(step)
        counts["arrays"] += found is not None
        return found

    monkeypatch.setattr(steps, "loss", counted)
    return counts


def derivatives(mll, second=True):
    """Values, gradients by backward, and a second derivative, of a weighted sum for a batch."""
    values = value_of(mll)
    loss = (values * torch.linspace(1, 2, values.numel(), dtype=values.dtype).view(values.shape)).sum()
    parameters = [p for p in mll.parameters() if p.requires_grad]
    mll.zero_grad()
    loss.backward(retain_graph=True)
    found = [values.detach(), *(None if p.grad is None else p.grad.clone() for p in parameters)]
    if second:
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        weighted = sum((g * (k + 1)).sum() for k, g in enumerate(first))
        found += [*(g.detach() for g in first), *torch.autograd.grad(weighted, parameters, allow_unused=True)]
    return found


def agree(found, expected, **tolerances):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, **tolerances)


def compare(mll, served, count=1, **tolerances):
    with autokern.enabled():
        with autokern.using(force={"objective": "stock", "exact_log_prob": "fused"}):
            expected = derivatives(mll)
        with by("arrays"):
            found = derivatives(mll)
    stock = derivatives(mll, second=False)
    assert served["arrays"] == count
    close = {"rtol": 1e-7, "atol": 1e-9, **tolerances}
    torch.testing.assert_close(found[: len(stock)], stock, **close)
    for one, other in zip(found, expected, strict=True):
        if one is not None and other is not None:  # which terms have no second derivative, depends on the formula
            torch.testing.assert_close(one, other, **close)


CASES = {
    "rbf": lambda: made(RBFKernel(ard_num_dims=D)),
    "scaled": lambda: made(ScaleKernel(MaternKernel(2.5, active_dims=[0, 2], ard_num_dims=2))),
    "sum": lambda: made(AdditiveKernel(ScaleKernel(RBFKernel(active_dims=[1])), MaternKernel(1.5))),
    "linear": lambda: made(RBFKernel(ard_num_dims=D) + LinearKernel()),  # without, stock's second derivatives are wrong
    "zero mean": lambda: made(RBFKernel(), ZeroMean()),
    "linear mean": lambda: made(RBFKernel(), LinearMean(D)),
    "constraints": lambda: made(
        RBFKernel(lengthscale_constraint=Interval(0.05, 4.0)), ConstantMean(constant_constraint=Interval(-1.0, 1.0))
    ),
    "priors": lambda: made(
        ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(3.0, 6.0)), outputscale_prior=LogNormalPrior(0.1, 1.0)),
        ConstantMean(constant_prior=NormalPrior(0.1, 0.7)),
        GaussianLikelihood(noise_prior=GammaPrior(1.1, 0.05)),
    ),
    "known noise": lambda: made(
        RBFKernel(), likelihood=FixedNoiseGaussianLikelihood(torch.linspace(0.1, 0.4, N, dtype=torch.float64))
    ),
    "deep": lambda: made(RBFKernel(ard_num_dims=D), kind=Deep),
    "deep and linear": lambda: made(RBFKernel() + LinearKernel(), kind=Deep),
    "batch": lambda: made(ScaleKernel(RBFKernel(batch_shape=B), batch_shape=B), batch=B),
    "batch with priors": lambda: made(
        RBFKernel(batch_shape=B, lengthscale_prior=GammaPrior(3.0, 6.0)), ConstantMean(batch_shape=B), batch=B
    ),
    "batch with boxes": lambda: made(
        RBFKernel(batch_shape=B, lengthscale_prior=SmoothedBoxPrior(0.1, 0.5)),
        likelihood=GaussianLikelihood(batch_shape=B, noise_prior=SmoothedBoxPrior(0.1, 0.5)),
        batch=B,
    ),
    "deep batch": lambda: made(RBFKernel(batch_shape=B), batch=B, kind=Deep),
    "one point": lambda: made(RBFKernel(), n=1),
    "fixed lengthscale": lambda: fixed(made(ScaleKernel(RBFKernel()))),
}


def fixed(mll):
    mll.model.covar_module.base_kernel.requires_grad_(False)
    return mll


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_values_and_derivatives(make, served):
    compare(make(), served)


def test_single_precision_is_rounded_at_the_end(served):
    mll = made(ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(3.0, 6.0))), n=80, dtype=torch.float32)
    stock = derivatives(mll, second=False)
    with autokern.enabled(), by("arrays"):
        found = derivatives(mll, second=False)
    truth = derivatives(mll.double(), second=False)
    assert served["arrays"] == 1
    for one, other, exact in zip(found, stock, truth, strict=True):
        assert one.dtype is torch.float32
        assert (one - exact).abs().max() <= (other - exact).abs().max() + 1e-6 * exact.abs().max() + 1e-8


def test_cotangents_of_vmap_and_repeated_backward(served):
    mll = made(RBFKernel())
    parameters = list(mll.parameters())
    with autokern.enabled(), by("arrays"):
        value = value_of(mll)
    once = torch.autograd.grad(value, parameters, retain_graph=True)
    cotangents = torch.tensor([1.0, -2.0], dtype=torch.float64)
    batched = torch.autograd.grad(value, parameters, cotangents, is_grads_batched=True, retain_graph=True)
    for one, many in zip(once, batched, strict=True):
        torch.testing.assert_close(many, torch.stack([one, -2 * one]))
    with torch.no_grad():
        mll.model.covar_module.raw_lengthscale.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_a_second_backward_raises_and_frees(served):
    mll = made(RBFKernel())
    with autokern.enabled(), by("arrays"):
        value = value_of(mll)
    cotangent = torch._efficientzerotensor((), dtype=torch.float64)
    zeros = torch.autograd.grad(value, list(mll.parameters()), cotangent, retain_graph=True)
    assert not any(t.any() for t in zeros)
    value.backward()
    assert value.grad_fn.gradients is None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        value.backward()


def test_tangents_of_cotangents_and_targets(served):
    mll = made(RBFKernel())
    x, y = mll.model.train_inputs[0], mll.model.train_targets

    def tangents():
        value = value_of(mll)
        with forward_ad.dual_level():
            cotangent = forward_ad.make_dual(*torch.tensor([2.0, 3.0], dtype=torch.float64))
            slopes = torch.autograd.grad(value, list(mll.parameters()), cotangent)
            of_targets = mll(mll.model(x), forward_ad.make_dual(y, torch.ones_like(y)))
            return [t.clone() for one in (*slopes, of_targets) for t in forward_ad.unpack_dual(one)]

    expected = tangents()
    with autokern.enabled(), by("arrays"):
        for one, other in zip(tangents(), expected, strict=True):
            torch.testing.assert_close(one, other)


def swap(mll, name, part):
    setattr(mll.model, name, part.double())


class Doubled(ExactMarginalLogLikelihood):
    def _add_other_terms(self, res, params):
        return 2 * super()._add_other_terms(res, params)


class OwnKernel(RBFKernel):
    def forward(self, x1, x2, **params):
        return 2 * super().forward(x1, x2, **params)


UNKNOWN = {
    "a kernel": lambda: made(ScaleKernel(PiecewisePolynomialKernel(0, ard_num_dims=D))),
    "a subclass of a kernel": lambda: made(OwnKernel()),
    "a kernel that several share": lambda: made(RBFKernel(), batch=B),
    "a subclass of the likelihood": lambda: another(Doubled),
    "a pseudo-likelihood": lambda: another(LeaveOneOutPseudoLikelihood),
    "another noise": lambda: another(ExactMarginalLogLikelihood, GaussianLikelihood().double()),
    "a prior of a function": lambda: with_prior(made(RBFKernel())),
    "a box over scales": lambda: made(
        ScaleKernel(RBFKernel(batch_shape=B), batch_shape=B, outputscale_prior=SmoothedBoxPrior(0.1, 0.6)), batch=B
    ),
    "a box over means": lambda: made(
        RBFKernel(batch_shape=B), ConstantMean(batch_shape=B, constant_prior=SmoothedBoxPrior(0.3, 0.4)), batch=B
    ),
}


def another(kind, likelihood=None):
    mll = made(RBFKernel())
    return kind(likelihood or mll.likelihood, mll.model)


def with_prior(mll):
    mll.model.covar_module.register_prior("own", NormalPrior(0.0, 1.0), lambda m: m.lengthscale.log())
    return mll


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_what_is_unknown_runs_stock(make, served):
    mll = make()
    torch.manual_seed(0)
    expected = derivatives(mll, second=False)
    torch.manual_seed(0)
    with autokern.enabled(), by("arrays"):
        found = derivatives(mll, second=False)
    assert served["arrays"] == 0
    agree(found, expected, rtol=1e-7, atol=1e-9)


class Loss(gpytorch.mlls.AddedLossTerm):
    def loss(self, *params):
        return torch.tensor(3.0, dtype=torch.float64)


def with_added_loss(mll):
    mll.model.register_added_loss_term("more")
    mll.model.update_added_loss_term("more", Loss())


CHANGES = {
    "a kernel": lambda m: swap(m, "covar_module", MaternKernel(1.5)),
    "a mean": lambda m: swap(m, "mean_module", LinearMean(D)),
    "memory": lambda m: setattr(m.model.covar_module.raw_lengthscale, "data", torch.ones(1, 1).double()),
    "a value": lambda m: m.model.covar_module.raw_lengthscale.data.mul_(0.5),
    "noise": lambda m: setattr(m.likelihood, "noise", 0.3),
    "a constraint": lambda m: m.model.covar_module.register_constraint("raw_lengthscale", Interval(0.1, 2.0)),
    "a prior": lambda m: m.model.covar_module.register_prior("p", NormalPrior(0.0, 1.0), "lengthscale"),
    "a prior of a function": with_prior,
    "an added loss": with_added_loss,
    "a forward": lambda m: setattr(m.model.covar_module, "forward", lambda x1, x2, **kw: 3 * x1 @ x2.mT),
    "points": lambda m: m.model.set_train_data(m.model.train_inputs[0] + 1, strict=False),
    "fewer points": lambda m: m.model.set_train_data(
        m.model.train_inputs[0][:5], m.model.train_targets[:5], strict=False
    ),
    "targets": lambda m: m.model.set_train_data(targets=m.model.train_targets + 1),
    "precision": lambda m: m.float(),
    "evaluation of the likelihood": lambda m: m.likelihood.eval(),
    "a gradient's hook": lambda m: m.model.covar_module.raw_lengthscale.register_hook(lambda g: 2 * g),
    "no gradient": lambda m: m.model.covar_module.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_changes_is_seen(change):
    mll = made(RBFKernel())
    with autokern.enabled(), by("arrays"):
        derivatives(mll, second=False)
        change(mll)
        found = derivatives(mll, second=False)
    agree(found, derivatives(mll, second=False), rtol=1e-5, atol=1e-6)


def test_a_distribution_that_was_changed_is_taken_as_it_is(served):
    mll = made(RBFKernel())

    def shifted():
        prior = mll.model(*mll.model.train_inputs)
        prior = gpytorch.distributions.MultivariateNormal(prior.mean + 1, prior.lazy_covariance_matrix)
        return mll(prior, mll.model.train_targets)

    expected = shifted()
    with autokern.enabled(), by("arrays"):
        torch.testing.assert_close(shifted(), expected, rtol=1e-12, atol=1e-12)
    assert served["arrays"] == 1


@pytest.mark.parametrize("name", ["arrays", "stock"])
def test_a_prior_that_was_evaluated_keeps_its_matrix(name, served):
    found = []
    for on in (False, True):
        mll = made(ScaleKernel(RBFKernel()))
        prior = mll.model(*mll.model.train_inputs)
        _ = prior.covariance_matrix
        mll.model.covar_module.outputscale = 5.0
        with autokern.enabled() if on else contextlib.nullcontext(), by(name):
            value = mll(prior, mll.model.train_targets)
            observed = mll.likelihood(prior).log_prob(mll.model.train_targets)
            (value + observed).backward()
        found.append([value.detach(), observed.detach(), *(p.grad for p in mll.parameters())])
    agree(*found, rtol=1e-8, atol=1e-10)
    assert served["arrays"] == 0


PRIORS = {
    "log normal": (LogNormalPrior(0.1, 1.0), (LogNormalPrior, torch.distributions.TransformedDistribution)),
    "normal": (NormalPrior(0.1, 1.0), (NormalPrior, torch.distributions.Normal)),
    "gamma": (GammaPrior(2.0, 1.0), (Prior, torch.distributions.Gamma)),
    "half normal": (HalfNormalPrior(1.0), (torch.distributions.HalfNormal, torch.distributions.Normal)),
    "uniform": (UniformPrior(0.0, 9.0), (torch.distributions.Uniform,)),
    "box": (SmoothedBoxPrior(0.1, 0.5), (SmoothedBoxPrior, torch.distributions.Normal)),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("prior", "kinds"), PRIORS.values(), ids=PRIORS.keys())
def test_densities_of_priors_that_are_replaced(prior, kinds, late, served, monkeypatch):
    for kind in kinds:
        mll = made(RBFKernel(lengthscale_prior=prior))
        with autokern.enabled(), by("arrays"):
            before = value_of(mll) if late else None
            served["arrays"] = 0
            stock = kind.log_prob
            with monkeypatch.context() as patch:
                patch.setattr(kind, "log_prob", lambda self, x, stock=stock: stock(self, x) + 3)
                found = value_of(mll)
            assert served["arrays"] == 0
        assert found.item() == pytest.approx(value_of(mll).item() + 3 / N, rel=1e-9)
        assert before is None or before.item() == pytest.approx(value_of(mll).item(), rel=1e-9)


def noisier(self, distribution, *args, **kwargs):
    return type(distribution)(distribution.mean, distribution.lazy_covariance_matrix.add_jitter(0.7))


def shaped(self, shape, *args, **kwargs):
    return DiagLinearOperator(torch.full(shape, 0.7, dtype=torch.float64))


def diagonal(self, *args, shape, **kwargs):
    return shaped(self, shape)


NOISES = {
    "marginal": (lambda m: m.likelihood, "marginal", noisier),
    "shape": (lambda m: m.likelihood, "_shaped_noise_covar", shaped),
    "call": (lambda m: m.likelihood, "__call__", noisier),
    "forward": (lambda m: m.likelihood.noise_covar, "forward", diagonal),
    "call of noise": (lambda m: m.likelihood.noise_covar, "__call__", diagonal),
}


@pytest.mark.parametrize("candidate", ["objective", "exact_log_prob"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("place", ["instance", 0, 1, 2])
@pytest.mark.parametrize(("part", "name", "function"), NOISES.values(), ids=NOISES.keys())
def test_noise_that_is_patched(part, name, function, place, late, candidate, monkeypatch):
    mll = made(RBFKernel())
    if place == "instance" and name == "__call__":
        return  # Python looks for it in the class
    with autokern.enabled(), autokern.using(force={candidate: "arrays"}):
        if late:
            value_of(mll)
        owner = part(mll)
        if place == "instance":
            monkeypatch.setattr(owner, name, types.MethodType(function, owner))
        else:
            monkeypatch.setattr(type(owner).__mro__[place], name, function, raising=False)
        found = value_of(mll)
    assert found.item() == pytest.approx(value_of(mll).item(), rel=1e-9)


def test_no_factor_means_the_librarys_own_words(served):
    mll = made(RBFKernel(), likelihood=FixedNoiseGaussianLikelihood(torch.full((N,), 1e-4, dtype=torch.float64)))
    mll.likelihood.noise_covar.noise = torch.full((N,), -2.0, dtype=torch.float64)
    with autokern.enabled(), by("arrays"), pytest.raises(Exception, match=r"not positive|not p\.d\."), pytest.warns():
        value_of(mll)
    assert served["arrays"] == 0


def test_an_order_for_the_density_is_obeyed(served):
    with autokern.enabled(), autokern.using(force={"exact_log_prob": "fused"}):
        value_of(made(RBFKernel()))
    with autokern.enabled(), gpytorch.settings.observation_nan_policy("mask"):
        value_of(made(RBFKernel()))
    assert served["arrays"] == 0


def test_likelihoods_are_freed():
    refs = []
    for _ in range(4):
        mll = made(ScaleKernel(MaternKernel(2.5)))
        with autokern.enabled(), by("arrays"):
            value_of(mll).backward()
        refs.append(weakref.ref(mll.model))
        del mll
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


@pytest.mark.parametrize(
    "register", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_global_hooks_of_torch_see_what_stock_calls(register, served):
    """A step is stock's while there are any."""
    mll = made(ScaleKernel(RBFKernel()))
    handle = getattr(torch.nn.modules.module, f"register_module_{register}")(lambda *args: None)
    try:
        with autokern.enabled(), by("arrays"):
            value_of(mll)
    finally:
        handle.remove()
    assert served["arrays"] == 0
    with autokern.enabled(), by("arrays"):
        value_of(mll)
    assert served["arrays"] == 1


def test_a_mode_sees_what_stock_calls_unless_it_is_a_default_device(served):
    class Twice(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            return 2 * found if func is torch.Tensor.exp_ or func is torch.exp else found

    mll = made(ScaleKernel(RBFKernel()))
    with Twice():
        expected = value_of(mll)
    with autokern.enabled(), by("arrays"):
        with Twice():
            assert value_of(mll) == expected
        assert served["arrays"] == 0
        with torch.device("cpu"):
            value_of(mll)
        assert served["arrays"] == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*JAX is multithreaded:RuntimeWarning")  # where an earlier test used JAX
def test_a_process_forked_while_another_thread_trains_trains_on(monkeypatch):
    mll = made(ScaleKernel(RBFKernel()))
    inside, done, computed = threading.Event(), threading.Event(), KernelReading.computed

    def waits(*args):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            done.wait(60)
        return computed(*args)

    def step():
        (-mll(mll.model(*mll.model.train_inputs), mll.model.train_targets)).backward()

    with autokern.enabled(), by("arrays"):
        step()
        monkeypatch.setattr(KernelReading, "computed", waits)
        thread = threading.Thread(target=step)
        thread.start()
        assert inside.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            step()
            os._exit(0)
        done.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has no such signal")
def test_a_step_within_a_step_of_the_same_thread_leaves_it_alone(monkeypatch):
    mll, within = made(ScaleKernel(RBFKernel())), []
    step = KernelReading.computed

    def interrupted(reading, *args):
        if not within:
            assert reading.lock.entered()
            within.append(steps.loss(asked))
        return step(reading, *args)

    with autokern.enabled(), by("arrays"):
        expected = value_of(mll)
        asked = steps.step_of(mll, None, mll.model(*mll.model.train_inputs), mll.model.train_targets)
        monkeypatch.setattr(KernelReading, "computed", interrupted)
        assert value_of(mll).equal(expected)
    assert within == [None]
