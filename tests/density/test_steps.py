"""Marginal likelihoods in one piece give stock's values and derivatives; what is unknown runs stock."""

import os
import signal
import threading
import types

import pytest
import torch
from gpytorch import priors as p
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from linear_operator.operators import DiagLinearOperator
from support.densities import N, agree, by, derivatives, made, served, truth, value_of

import autokern
from autokern.density import array_density
from autokern.density.array_density import KernelReading

B = torch.Size([2])


class Doubled(ExactMarginalLogLikelihood):
    def _add_other_terms(self, res, params):
        return 2 * super()._add_other_terms(res, params)


def likewise(mll, kind):
    return kind(mll.likelihood, mll.model).train()


each_likelihood = pytest.mark.parametrize("kind", [ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood])


UNKNOWN = {
    "a subclass of the likelihood": lambda: likewise(made(RBFKernel()), Doubled),
    "a subclass of a kernel": lambda: made(type("Own", (RBFKernel,), {})()),
    "a box over scales": lambda: made(
        ScaleKernel(RBFKernel(batch_shape=B), batch_shape=B, outputscale_prior=p.SmoothedBoxPrior(0.1, 0.6)), batch=B
    ),
    "a box over means": lambda: made(
        RBFKernel(batch_shape=B), ConstantMean(batch_shape=B, constant_prior=p.SmoothedBoxPrior(0.3, 0.4)), batch=B
    ),
}


PRIORS = {
    "log normal": (p.LogNormalPrior(0.1, 1.0), (p.LogNormalPrior, torch.distributions.TransformedDistribution)),
    "normal": (p.NormalPrior(0.1, 1.0), (p.NormalPrior, torch.distributions.Normal)),
    "gamma": (p.GammaPrior(2.0, 1.0), (p.Prior, torch.distributions.Gamma)),
    "half normal": (p.HalfNormalPrior(1.0), (torch.distributions.HalfNormal, torch.distributions.Normal)),
    "uniform": (p.UniformPrior(0.0, 9.0), (torch.distributions.Uniform,)),
    "box": (p.SmoothedBoxPrior(0.1, 0.5), (p.SmoothedBoxPrior, torch.distributions.Normal)),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("prior", "kinds"), PRIORS.values(), ids=PRIORS.keys())
def test_densities_of_priors_that_are_replaced(prior, kinds, late, monkeypatch):
    for kind in kinds:
        mll = made(RBFKernel(lengthscale_prior=prior))
        with autokern.enabled(), by("objective"):
            before = value_of(mll) if late else None
            count = served("objective")
            stock = kind.log_prob
            with monkeypatch.context() as patch:
                patch.setattr(kind, "log_prob", lambda self, x, stock=stock: stock(self, x) + 3)
                found = value_of(mll)
            assert served("objective") == count
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


LEFT_OUT = {
    "one model": lambda: made(ScaleKernel(MaternKernel(2.5, lengthscale_prior=p.GammaPrior(2.0, 1.0)))),
    "a batch": lambda: made(RBFKernel(batch_shape=B), batch=B),
    "a noise for each point": lambda: made(
        RBFKernel() + PeriodicKernel(), likelihood=FixedNoiseGaussianLikelihood(torch.rand(N).double())
    ),
    "one point": lambda: made(RBFKernel(), n=1),
}


@pytest.mark.parametrize("name", [*UNKNOWN, *LEFT_OUT])
def test_a_leave_one_out_likelihood_and_what_is_unknown_have_the_librarys_value_and_gradients(name):
    mll = UNKNOWN[name]() if name in UNKNOWN else likewise(LEFT_OUT[name](), LeaveOneOutPseudoLikelihood)
    expected = derivatives(mll, second=False)
    with autokern.enabled(), by("objective"):
        agree(derivatives(mll, second=False), expected, rtol=1e-9, atol=1e-11)
    assert served("objective") == (name in LEFT_OUT)


def test_second_derivatives_of_a_leave_one_out_likelihood_are_those_of_its_definition():
    """The library's are not: those by the scale have another sign."""
    mll = likewise(made(ScaleKernel(MaternKernel(2.5))), LeaveOneOutPseudoLikelihood)
    expected = truth(mll)
    with autokern.enabled():
        agree(derivatives(mll), expected, rtol=1e-9, atol=1e-11)


@each_likelihood
def test_a_single_point_that_is_not_finite_has_the_librarys_density(kind):
    mll = likewise(made(MaternKernel(2.5), n=1), kind)
    mll.model.train_inputs[0].fill_(torch.inf)
    with autokern.enabled():
        assert value_of(mll).isnan()


@each_likelihood
def test_a_mean_that_is_replaced_takes_its_prior_along(kind):
    mll = likewise(made(RBFKernel(), mean=ConstantMean(constant_prior=p.NormalPrior(0.0, 0.1))), kind)
    with autokern.enabled():
        before = value_of(mll)
        mll.model.mean_module = ConstantMean().double()
        found = value_of(mll)
    assert found != before
    agree([found], [value_of(mll)], rtol=1e-12, atol=0)


def test_a_patched_leave_one_out_likelihood_is_called(monkeypatch):
    mll = likewise(made(RBFKernel()), LeaveOneOutPseudoLikelihood)
    with autokern.enabled():
        value_of(mll)
        monkeypatch.setattr(LeaveOneOutPseudoLikelihood, "forward", lambda self, *_: torch.tensor(3.0))
        assert value_of(mll) == 3.0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@each_likelihood
def test_values_without_gradients_are_those_with(kind, batch, dtype, mode):
    shape = torch.Size(batch)
    kernel = ScaleKernel(RBFKernel(batch_shape=shape, lengthscale_prior=p.GammaPrior(2.0, 1.0)), batch_shape=shape)
    mll = likewise(made(kernel, batch=batch, dtype=dtype), kind)
    for _ in range(2):
        with mode():
            expected = value_of(mll)
            with autokern.enabled():
                found, prior = value_of(mll), mll.model(*mll.model.train_inputs)
        with torch.no_grad(), autokern.enabled():
            assert value_of(mll).equal(found)
            mll.likelihood.raw_noise.add_(0.5)
        assert (found.requires_grad, found.is_inference()) == (False, expected.is_inference())
        agree([found], [expected], rtol=1e-5 if dtype is torch.float32 else 1e-12, atol=0)
    assert served("objective") == 4
    assert not prior.lazy_covariance_matrix.representation()[0].requires_grad


@pytest.mark.parametrize(("n", "moving", "count"), [(401, False, 1), (400, True, 1), (401, True, 0)])
def test_gradients_by_many_points_are_left_to_the_op_that_is_measured_with_them(n, moving, count):
    mll = made(RBFKernel(), n=n)
    mll.model.train_inputs[0].requires_grad_(moving)
    with autokern.enabled(), by("objective"):
        value_of(mll).backward()
    assert served("objective") == count


def test_values_that_torch_computes_faster_or_that_are_ordered_run_stock():
    many = made(RBFKernel(batch_shape=torch.Size([33])), batch=(33,))
    with torch.no_grad(), autokern.enabled():
        value_of(many)
        value_of(made(RBFKernel(), n=301))
        with by("stock"):
            value_of(made(RBFKernel()))
    assert served("objective") == 0


def test_a_prior_made_without_a_graph_has_a_loss_without_one():
    mll = made(RBFKernel())
    with autokern.enabled(), torch.no_grad():
        prior, expected = mll.model(*mll.model.train_inputs), value_of(mll)
    with autokern.enabled():
        found = mll(prior, mll.model.train_targets)  # as in stock, only the noise has a gradient
    found.backward()
    assert [p.grad is None for p in (mll.model.covar_module.raw_lengthscale, mll.likelihood.raw_noise)] == [True, False]
    agree([found], [expected], rtol=1e-12, atol=0)
