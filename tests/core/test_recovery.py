"""errors.py: errors that autokern may recover from, and errors that must reach the user."""

import functools
import signal
import sys
import types

import gpytorch
import pytest
import torch

from autokern.core.errors import recoverable

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGUSR1")


class OfTheUserError(Exception):
    """As a package for time limits defines one."""


def module(source: str, name: str) -> types.ModuleType:
    """Return a module of a name, as if it belonged to that package."""
    made = types.ModuleType(name)
    exec(source, made.__dict__)
    return made


def caught(run, *args) -> Exception:
    """Return what code of autokern's raises; the frame of this module is taken off."""
    with pytest.raises(Exception) as found:  # noqa: PT011
        run(*args)
    error = found.value
    return error.with_traceback(error.__traceback__.tb_next)


class Handler:
    def __call__(self, number, frame):
        raise RuntimeError("late")

    def method(self, number, frame):
        raise ValueError("late")


@pytest.fixture
def signalled():
    """Return a function that calls `raise_signal` in code of torch's with a handler set, and returns the error."""
    before = signal.getsignal(signal.SIGUSR1)
    inner = module("import signal\ndef work(): signal.raise_signal(signal.SIGUSR1)", "torch._work")

    def of(handler):
        signal.signal(signal.SIGUSR1, handler)
        return caught(inner.work)

    yield of
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "call",
    [
        "torch.linalg.cholesky(-torch.eye(2))",
        "numpy.linalg.cholesky(-numpy.eye(2))",
        "gpytorch.kernels.RBFKernel()(torch.ones(2, 3), torch.ones(2, 2)).to_dense()",
        "warnings.warn('of a library', RuntimeWarning)",
        "[][0]",
    ],
)
@pytest.mark.filterwarnings("error")
def test_errors_of_the_libraries_may_be_recovered_from(call):
    source = f"import gpytorch, numpy, torch, warnings\ndef work(): {call}"
    assert recoverable(caught(module(source, "autokern.somewhere").work))


def test_an_error_through_a_frame_of_the_users_may_not():
    class Kernel(gpytorch.kernels.RBFKernel):
        def forward(self, x1, x2, **params):
            return torch.linalg.cholesky(-torch.eye(2))

    work = module("def work(kernel, x): return kernel(x, x).to_dense()", "autokern.somewhere").work
    error = caught(work, Kernel(), torch.ones(2, 1))
    assert isinstance(error, RuntimeError)
    assert not recoverable(error)


@pytest.mark.parametrize(
    "handler",
    [
        lambda *_: torch.linalg.cholesky(-torch.eye(2)),
        Handler(),
        Handler().method,
        functools.partial(Handler().method),
    ],
)
def test_an_error_of_a_signal_handler_may_not(signalled, handler):
    error = signalled(handler)
    assert not recoverable(error)
    assert not recoverable(error, handler)  # though a candidate is defined in the same module


def test_code_of_the_same_library_that_is_no_handler_is_told_from_it(signalled):
    source = "def handler(number, frame): raise RuntimeError\ndef fails(): raise RuntimeError"
    inner = module(source, "torch.utils.data")
    assert not recoverable(signalled(inner.handler))
    assert recoverable(caught(inner.fails))


def test_an_error_that_another_thread_raises_here_is_told_by_its_class():
    """`PyThreadState_SetAsyncExc` leaves no frame of the one who raises."""
    work = module("def work(kind): raise kind", "autokern.somewhere").work
    assert [recoverable(caught(work, kind)) for kind in (TimeoutError, OfTheUserError, OSError)] == [False, False, True]


def test_a_plugins_candidate_may_use_any_package():
    run = module("def run(kind=KeyError): raise kind('a package that the plugin uses')", "plugin.candidates").run
    error = caught(module("def call(run): return run()", "elsewhere").call, run)
    assert not recoverable(error)
    assert recoverable(error, run)
    assert not recoverable(caught(run, TimeoutError), run)


def test_generated_code_belongs_to_its_caller():
    made: dict = {}
    exec("def work(): raise ValueError", made)
    assert recoverable(caught(made["work"]))
