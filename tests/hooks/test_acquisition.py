"""Acquisitions as BoTorch optimises them: small ones on one thread, and starts as a batch with a newer SciPy."""

import contextlib
import functools
import json
import warnings

import pytest
import scipy
import torch
from botorch.acquisition import (
    GenericMCObjective,
    LogExpectedImprovement,
    PosteriorMean,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
)
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.exceptions.warnings import OptimizationWarning
from botorch.generation import gen
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.transforms.input import InputPerturbation
from botorch.optim import optimize_acqf
from support.acquisitions import single
from support.programs import QUIET, python, said

import autokern
from autokern.cli import doctor
from autokern.hooks.later import acquisition as acquisition_hook

BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def optimised(acquisition, q=1, **kwargs):
    torch.manual_seed(0)
    given = {"num_restarts": 2, "raw_samples": 8, "options": {"maxiter": 5}, **kwargs}
    return optimize_acqf(acquisition, BOUNDS, q=q, **given)


def threads_of(acquisition, error=None, **given):
    """How many threads torch has where the model of an acquisition is asked, which may raise an error."""
    stock, seen = acquisition.model.posterior, set()

    def posterior(*args, **kwargs):
        seen.add(torch.get_num_threads())
        if error is not None:
            raise error
        return stock(*args, **kwargs)

    acquisition.model.posterior = posterior
    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        optimised(acquisition, **given)
    return seen


def test_small_ones_run_on_one_thread():
    assert threads_of(PosteriorMean(single())) == {2}
    with autokern.enabled():
        assert threads_of(PosteriorMean(single())) == {1}
        assert threads_of(PosteriorMean(single()), KeyboardInterrupt()) == {1}


@pytest.mark.parametrize(
    ("n", "given"),
    [
        (513, {"num_restarts": 1, "raw_samples": 2}),
        (60, {"num_restarts": 1200, "raw_samples": 1200}),
        (60, {"raw_samples": 20_000}),
    ],
)
def test_large_ones_keep_all_threads(n, given):
    with autokern.enabled():
        assert threads_of(PosteriorMean(single(n=n)), **given, options={"maxiter": 1}) == {2}


class Mine(PosteriorMean):
    """A function of the user's own, which may do anything."""


class MyModel(SingleTaskGP):
    """A model of the user's own."""


def test_what_is_not_known_keeps_all_threads():
    threads = []

    def objective(samples, X=None):
        threads.append(torch.get_num_threads())
        return samples[..., 0]

    known, broken, perturbed = single(), single(), single()
    mine = MyModel(*known.train_inputs, known.train_targets.unsqueeze(-1)).eval()
    broken.train_inputs = None
    perturbed.input_transform = InputPerturbation(torch.zeros(2, 2).double())
    with autokern.enabled():
        optimised(qLogExpectedImprovement(known, best_f=0.5, objective=GenericMCObjective(objective)))
        assert set(threads) == {2}
        assert threads_of(Mine(single())) == threads_of(PosteriorMean(mine)) == {2}
        assert threads_of(PosteriorMean(broken), ValueError("mine")) == {2}
        assert threads_of(qLogExpectedImprovement(single(), best_f=0.5)) == {1}
        namesake = type("PosteriorMean", (PosteriorMean,), {"__module__": "analytic"})
        assert threads_of(namesake(single())) == threads_of(PosteriorMean(perturbed), ValueError("mine")) == {2}


@pytest.mark.slow
def test_several_threads_of_the_user_may_come_first():
    program = """
import threading
import autokern.auto, torch, gpytorch
import botorch.optim.optimize, botorch.optim.closures.core
from botorch.models import SingleTaskGP
x, barrier, fine = torch.rand(10, 2, dtype=torch.double), threading.Barrier(4), []
def go():
    model = SingleTaskGP(x, x.sum(-1, keepdim=True))
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    barrier.wait()
    mll(model(*model.train_inputs), model.train_targets).backward()
    fine.append(True)
threads = [threading.Thread(target=go) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print(len(fine), botorch.optim.optimize._optimize_acqf.__wrapped__ is not None)
"""
    assert said(program)[-2:] == ["4", "True"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: LogExpectedImprovement(single(), best_f=0.5),
        lambda: qLogExpectedImprovement(single(), best_f=0.5),
        lambda: qLogNoisyExpectedImprovement(single(), single().train_inputs[0]),
        lambda: qKnowledgeGradient(single(), num_fantasies=2),
        lambda: qLogExpectedImprovement(ModelListGP(single()), best_f=0.5),
    ],
)
def test_candidates_are_the_same(make):
    """With SciPy 1.18, only autokern optimises the starts as a batch, which ends at other digits: neither does here."""
    parallel = False if acquisition_hook.leaves_batch(gen) else None
    generate = functools.partial(gen.gen_candidates_scipy, use_parallel_mode=parallel)
    torch.manual_seed(1)
    found, value = optimised(make(), gen_candidates=generate)
    with autokern.enabled():
        torch.manual_seed(1)
        ours, our_value = optimised(make(), gen_candidates=generate)
    torch.testing.assert_close(ours, found, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_value, value, rtol=1e-6, atol=1e-8)


def test_warnings_are_those_of_the_library_s_lines():
    """So that filters by module apply to them."""

    def warned(*args, **kwargs):
        warnings.warn("a word of ours", OptimizationWarning, stacklevel=1)
        return gen.gen_candidates_scipy(*args, **kwargs)

    places = []
    for enabled in (contextlib.nullcontext, autokern.enabled):
        for q in (1, 2):
            acquisition = qLogExpectedImprovement(single(), best_f=0.5)
            with enabled(), pytest.warns(RuntimeWarning, match="Optimization failed") as caught:
                optimised(acquisition, q, sequential=True, gen_candidates=warned)
            places.append([(one.filename, one.lineno) for one in caught if "failed" in str(one.message)])
    assert places[:2] == places[2:]


def test_gradients_of_integrated_variances_are_those_of_the_value():
    """By points and by pending ones; stock's are not."""
    points, pending, grid = (
        torch.rand(k, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in (1, 2, 10)
    )

    def value(points, pending):
        return qNegIntegratedPosteriorVariance(single(), grid, X_pending=pending)(points).sum()

    inputs = points.requires_grad_(), pending.requires_grad_()
    assert not torch.autograd.gradcheck(value, inputs, raise_exception=False)
    with autokern.enabled():
        assert torch.autograd.gradcheck(value, inputs, eps=1e-5, atol=1e-7, rtol=1e-5)


PROGRAM = """
import json
import scipy
if int(scipy.__version__.split(".")[1]) < 18:
    scipy.__version__ = "1.18.0"  # takes the same arguments
import autokern, torch
from botorch.generation.gen import gen_candidates_scipy

starts = torch.rand(6, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

def best(**options):
    calls = []
    def acquisition(x):
        calls.append(1)
        x = x.flatten(-2)  # Rosenbrock's function
        return -(100 * (x[..., 1:] - x[..., :-1] ** 2) ** 2 + (1 - x[..., :-1]) ** 2).sum(-1)
    _, values = gen_candidates_scipy(starts, acquisition, 0.0, 2.0, **options)
    return len(calls), values.tolist()

found = {"before": best()}
with autokern.enabled():
    found["enabled"] = best()
    found["one problem"] = best(use_parallel_mode=False)
    found["other method"] = best(options={"method": "SLSQP"})
found["after"] = best()
found["stock's other method"] = best(options={"method": "SLSQP"})
print(json.dumps(found))
"""


def test_starts_are_a_batch_while_autokern_is_enabled_and_not_after():
    found = json.loads(python(*QUIET, "-c", PROGRAM, check=True).stdout.splitlines()[-1])
    assert found["before"] == found["after"] == found["one problem"]
    assert found["other method"] == found["stock's other method"]
    assert 1.5 * found["enabled"][0] < found["before"][0]
    assert found["enabled"][1] == pytest.approx(found["before"][1], abs=1e-4)


RELEASES = [
    *((version, False, "not tried") for version in ("1.17.1", "1.19.0", "2.0.0")),
    ("1.18.3", False, ""), ("1.18.0", True, "64-bit"),
]  # fmt: skip


@pytest.mark.parametrize(("version", "large", "obstacle"), RELEASES)
def test_starts_are_a_batch_by_the_release_that_was_tried_and_doctor_names_it(monkeypatch, version, large, obstacle):
    monkeypatch.setattr(scipy, "__version__", version)
    monkeypatch.setattr("scipy.optimize._lbfgsb_py.HAS_ILP64", large, raising=False)
    told = acquisition_hook.obstacle() or ""
    assert obstacle in told
    assert bool(told) == bool(obstacle)
    leaves, release = acquisition_hook.leaves_batch(gen), version.rpartition(".")[0]
    assert leaves is (version != "1.17.1")
    for found in doctor._optimiser():
        assert f"batched L-BFGS-B with SciPy {release}; {told or 'autokern puts it back'}" in found.found
        assert (found.status, "scipy<1.18" in found.advice) == (("note", True) if obstacle else ("ok", False))
    assert len(doctor._optimiser()) == leaves
