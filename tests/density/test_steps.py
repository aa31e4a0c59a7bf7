"""Marginal likelihoods in one piece give stock's values and derivatives; what is unknown runs stock."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import types

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import DirichletClassificationLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean
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
from support.densities import D, N, Served, agree, by, derivatives, made, value_of
from support.models import ExactModel
from torch.overrides import TorchFunctionMode

import autokern
from autokern.density import array_density
from autokern.density.array_density import KernelReading

B = torch.Size([2])


@pytest.fixture
def served(monkeypatch):
    return Served(monkeypatch)


class Doubled(ExactMarginalLogLikelihood):
    def _add_other_terms(self, res, params):
        return 2 * super()._add_other_terms(res, params)


UNKNOWN = {
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
    with autokern.enabled(), by("objective"):
        found = derivatives(mll, second=False)
    assert served["objective"] == 0
    agree(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("learned", [False, True])
def test_classes_as_a_batch_of_models(served, learned):
    classes = torch.Size([3])
    likelihood = DirichletClassificationLikelihood(
        torch.arange(N) % 3, dtype=torch.float64, learn_additional_noise=learned
    )
    kernel = ScaleKernel(RBFKernel(batch_shape=classes, ard_num_dims=D), batch_shape=classes)
    mll = made(kernel, likelihood=likelihood, batch=classes)
    expected = derivatives(mll)
    with autokern.enabled():  # three models of few points need no measurement
        agree(derivatives(mll), expected, rtol=1e-7, atol=1e-9)
    assert served["objective"] > 0


@pytest.mark.parametrize("name", ["objective", "stock"])
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
    assert served["objective"] == 0


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
        with autokern.enabled(), by("objective"):
            before = value_of(mll) if late else None
            count = served["objective"]
            stock = kind.log_prob
            with monkeypatch.context() as patch:
                patch.setattr(kind, "log_prob", lambda self, x, stock=stock: stock(self, x) + 3)
                found = value_of(mll)
            assert served["objective"] == count
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


def test_an_order_for_the_density_is_obeyed(served):
    with autokern.enabled(), autokern.using(force={"exact_log_prob": "fused"}):
        value_of(made(RBFKernel()))
    with autokern.enabled(), gpytorch.settings.observation_nan_policy("mask"):
        value_of(made(RBFKernel()))
    assert served["objective"] == 0


@pytest.mark.parametrize(
    "register", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_global_hooks_of_torch_see_what_stock_calls(register, served):
    """A step is stock's while there are any, and so are the kernel's own readings of its hyperparameters."""
    mll, seen = made(ScaleKernel(RBFKernel(ard_num_dims=D))), []
    handle = getattr(torch.nn.modules.module, f"register_module_{register}")(lambda *args: seen.append(args[0]))
    try:
        value_of(mll)
        in_stock = len(seen)
        with autokern.enabled(), autokern.using(force={"objective": "arrays", "kernel_matrix": "gemm"}):
            value_of(mll)
    finally:
        handle.remove()
    assert served["objective"] == 0
    assert len(seen) == 2 * in_stock
    with autokern.enabled(), by("objective"):
        value_of(mll)
    assert served["objective"] == 1


def test_a_mode_sees_what_stock_calls_unless_it_is_a_default_device(served):
    class Twice(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            return 2 * found if func is torch.Tensor.exp_ or func is torch.exp else found

    mll = made(ScaleKernel(RBFKernel()))
    with Twice():
        expected = value_of(mll)
    with autokern.enabled(), by("objective"):
        with Twice():
            assert value_of(mll) == expected
        assert served["objective"] == 0
        with torch.device("cpu"):
            value_of(mll)
        assert served["objective"] == 1


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

    with autokern.enabled(), by("objective"):
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
            within.append(array_density.loss(asked))
        return step(reading, *args)

    with autokern.enabled(), by("objective"):
        expected = value_of(mll)
        asked = array_density.step_of(mll, None, mll.model(*mll.model.train_inputs), mll.model.train_targets)
        monkeypatch.setattr(KernelReading, "computed", interrupted)
        assert value_of(mll).equal(expected)
    assert within == [None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_whose_memory_is_replaced_are_followed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """`vector_to_parameters` assigns to ``data``, as loops around SciPy's optimisers do at each evaluation."""
    torch.manual_seed(0)
    x = torch.rand(20, 2, dtype=dtype)
    model = ExactModel(x, x.sum(-1).sin()).to(dtype)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    reads, honest = [], array_density.StepReading.__init__
    counted = lambda self, *how: reads.append(self) or honest(self, *how)  # noqa: E731
    monkeypatch.setattr(array_density.StepReading, "__init__", counted)
    names = [name for name, _ in model.named_parameters()]
    for step in range(4):
        vector = torch.linspace(-1.0, 1.0 + step, sum(p.numel() for p in model.parameters()), dtype=dtype)
        found = {}
        for on in (False, True):
            torch.nn.utils.vector_to_parameters(vector.clone(), model.parameters())
            model.zero_grad()
            with autokern.enabled() if on else contextlib.nullcontext():
                loss = mll(model(x), model.train_targets)
                loss.backward()
            found[on] = [loss, *(p.grad.clone() for p in model.parameters())]
        for name, ours, theirs in zip(["loss", *names], found[True], found[False], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-5, msg=lambda text, of=name: f"{of}: {text}")
    assert len(reads) == 1
