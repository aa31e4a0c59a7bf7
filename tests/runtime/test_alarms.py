"""A signal handler's error reaches the user wherever it is raised: nothing takes it for a failure of its own."""

import gc
import inspect
import signal
import sys

import gpytorch
import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from support.botorch_models import D, data
from support.fakes import as_if_of_autokern
from support.models import loss_of, points, rough

import autokern
from autokern.runtime import dispatch
from autokern.system.threads import one_thread

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has no SIGALRM"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
N = 30
_PLACES = 30

# modules that end call _dynamo back once it is imported; NumPy's array_equal takes any error for "not equal"
_THEIRS = ("_dynamo", "numpy")


@as_if_of_autokern  # the frame that raises the signal must not be one of the user's
def counter(last):
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        code = frame.f_code
        if any(each in code.co_filename for each in _THEIRS):
            return
        if event == "c_call" and argument.__name__ in ("__exit__", "release"):  # a real signal waits for its end
            return
        generator = code.co_flags & inspect.CO_GENERATOR  # one that is let go is called, and runs no line
        if event == "c_call" or (event == "call" and not generator):
            count += 1
            if count == last:
                signal.raise_signal(signal.SIGALRM)

    return profile, lambda: count


def stepping():
    model = rough(N).train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    for _ in range(2):
        loss_of(mll).backward()
    del model, mll
    gc.collect()


def fitting():
    model = SingleTaskGP(*data(N))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), optimizer_kwargs={"options": {"maxiter": 2}})
    del model
    gc.collect()


def posterior():
    model = SingleTaskGP(*data(N), covar_module=ScaleKernel(MaternKernel())).eval()
    for seed in (1, 2):
        x = points(2, d=D, seed=seed).requires_grad_()
        found = model.posterior(x)
        (found.mean.sum() + found.variance.sum()).backward()
        found.rsample(torch.Size([2]))
    del model, found
    gc.collect()


def predicting():
    model = rough(N).eval()
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        model(points(7, seed=1)).variance
        model.get_fantasy_model(points(2, seed=2), points(2, seed=2)[:, 0])(points(7, seed=1)).variance
    del model
    gc.collect()


def iterating():
    with (
        gpytorch.settings.max_cholesky_size(1),
        autokern.using(force={"solve": "preconditioned", "kernel_matmul": "tiled"}),
    ):
        predicting()


def handler(number, frame):
    raise TimeoutError("time is over")


@pytest.fixture
def alarm():
    before = signal.signal(signal.SIGALRM, handler)
    yield
    sys.setprofile(None)
    signal.signal(signal.SIGALRM, before)


def in_a_callback_of_others(unraisable):
    """Return whether CPython itself drops what is raised there (hypothesis has a callback of the collector)."""
    module = getattr(unraisable.object, "__module__", None) or "autokern"
    return unraisable.exc_type is TimeoutError and not module.startswith("autokern")


def run(work, last, monkeypatch):
    """Run some work whose call of this number is interrupted; return whether that call was reached, and all calls."""
    profile, count = counter(last)
    dropped, before = [], sys.unraisablehook
    monkeypatch.setattr(
        sys, "unraisablehook", lambda each: (dropped.append if in_a_callback_of_others(each) else before)(each)
    )
    dispatch.reset()
    with autokern.enabled():
        sys.setprofile(profile)
        try:
            work()
        finally:
            sys.setprofile(None)
            monkeypatch.setattr(sys, "unraisablehook", before)
            torch.set_grad_enabled(True)  # torch's own contexts may be left half way
    return count() >= last and not dropped, count()


@pytest.mark.parametrize("work", [stepping, fitting, posterior, predicting, iterating])
def test_an_alarm_reaches_the_user(work, alarm, monkeypatch):
    run(work, 0, monkeypatch)
    (_, calls), swallowed = run(work, 0, monkeypatch), []
    for place in range(1, calls, max(1, calls // _PLACES)):
        try:
            reached, _ = run(work, place, monkeypatch)
        except TimeoutError:
            continue
        if reached:
            swallowed.append(place)
    assert not swallowed
    assert not one_thread._lock.entered()
