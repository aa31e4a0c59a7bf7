"""threads, blas and their hook: counts are lowered where asked, in no other thread, and always restored."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg  # noqa: F401  (loads SciPy's BLAS)
import torch
from scipy import optimize
from scipy.optimize import _lbfgsb

import autokern
from autokern import blas, hooks, host, threads
from autokern.blas import blas_limited
from autokern.hooks import scipy as scipy_hooks

REAL = (threads._setters, lambda: (torch.set_num_threads, int))
STEP = _lbfgsb.setulb


@pytest.fixture(autouse=True)
def _three():
    """Three threads: a number to restore; hardly any test starts them."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert threads.current() == 3
    torch.set_num_threads(before)


@pytest.fixture(params=REAL, ids=["openmp", "fallback"])
def _each_way(request, monkeypatch):
    """As on this system, and as where the libraries' own functions cannot be found."""
    monkeypatch.setattr(threads, "_setters", request.param)


each_way = pytest.mark.usefixtures("_each_way")


def elsewhere(work):
    """Do some work in a thread that has not used torch before."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def wrapped(count):
    return threads.limited(threads.current, count)()


def in_scope(count):
    with threads.scope(count):
        return threads.current()


either = pytest.mark.parametrize("count_inside", [wrapped, in_scope])

# --- torch's threads --------------------------------------------------------------------------------------------------


@each_way
@either
@pytest.mark.parametrize(("count", "inside"), [(1, 1), (2, 2), (3, 3), (4, 3), (10**6, 3)])
def test_lowered_inside_and_never_raised(count_inside, count, inside):
    assert count_inside(count) == inside
    assert threads.current() == 3
    assert elsewhere(lambda: (count_inside(count), threads.current())) == (inside, 3)


@pytest.mark.parametrize("make", [lambda count: threads.limited(len, count), threads.scope, blas_limited])
def test_no_thread_at_all_is_refused(make):
    with pytest.raises(ValueError, match="1 or more, not 0"):
        make(0)


def test_a_limited_function_is_what_it_was_before():
    def double(x: int, *, times: int = 1) -> int:
        """Double."""
        return 2 * x * times

    limited = threads.limited(double, 1)
    assert limited(3, times=2) == 12
    assert (limited.__name__, limited.__doc__, limited.__wrapped__) == ("double", "Double.", double)


@each_way
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_restored_after_exceptions(error):
    def fail():
        assert threads.current() == 1
        raise error

    with pytest.raises(error):
        threads.limited(fail, 1)()
    assert threads.current() == 3
    with pytest.raises(error), threads.scope(1):
        fail()
    assert threads.current() == 3


@either
@pytest.mark.parametrize("step", range(4))
def test_restored_when_the_interrupt_comes_while_setting(monkeypatch, count_inside, step):
    """Python raises an interrupt when a call has returned: after any of the four that lower and restore."""
    steps = iter(range(4))

    def interrupted(function):
        def call(count):
            result = function(count)
            if next(steps, None) == step:
                raise KeyboardInterrupt
            return result

        return call

    torch.set_num_threads(3)  # MKL's own number is set, too
    setters = threads._setters()
    monkeypatch.setattr(threads, "_setters", lambda: tuple(map(interrupted, setters)))
    with pytest.raises(KeyboardInterrupt):
        count_inside(1)
    assert threads.current() == 3
    mkl_before = setters[1](3)
    setters[1](mkl_before)
    assert mkl_before == 3


@each_way
def test_nested():
    @lambda run: threads.limited(run, 2)
    def outer():
        seen = [threads.current(), wrapped(1), in_scope(1), wrapped(3), in_scope(3)]
        return [*seen, threads.current()]

    assert outer() == [2, 1, 1, 2, 2, 2]
    with threads.scope(2), threads.scope(1), threads.scope(2):
        assert threads.current() == 1
    assert threads.current() == 3


def test_other_threads_are_left_alone():
    """One that has used torch before, and one that first does so inside, which `torch.set_num_threads` would bind."""
    entered, leave = threading.Event(), threading.Event()

    def wait():
        threads.current()
        entered.set()
        leave.wait(10)
        return threads.current()

    old: list[int] = []
    thread = threading.Thread(target=lambda: old.append(wait()))
    thread.start()
    entered.wait(10)
    with threads.scope(1):
        leave.set()
        thread.join()
        assert old == [3]
        assert elsewhere(threads.current) == 3
        assert threads.current() == 1
    assert elsewhere(threads.current) == 3


def test_many_threads_at_once():
    barrier, seen = threading.Barrier(8), set()

    def work(count):
        barrier.wait()
        for _ in range(200):
            seen.add((count, wrapped(count), in_scope(count), threads.current()))

    pool = [threading.Thread(target=work, args=(1 + i % 4,)) for i in range(8)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    assert seen == {(count, min(count, 3), min(count, 3), 3) for count in (1, 2, 3, 4)}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux, which lists a process's threads")
@pytest.mark.parametrize("work", ["matmul", "cholesky", "qr", "exp", "sum"])
def test_libraries_obey(work):
    """OpenMP keeps a team for each thread that asks: a new thread has none until work is shared out."""
    a = torch.randn(400, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spd = a @ a.mT + 400 * torch.eye(400, dtype=torch.float64)
    jobs = {
        "matmul": lambda: a @ a,
        "cholesky": lambda: torch.linalg.cholesky(spd),
        "qr": lambda: torch.linalg.qr(a),
        "exp": spd.exp,
        "sum": spd.sum,
    }

    def teams():
        tasks = [len(os.listdir("/proc/self/task"))]
        for run in (threads.limited(jobs[work], 1), jobs[work]):
            run()
            tasks.append(len(os.listdir("/proc/self/task")))
        return tasks

    torch.set_num_threads(2)
    start, limited, free = elsewhere(teams)
    assert limited == start
    assert free > start
    torch.set_num_threads(3)


def test_a_backward_pass_in_a_scope():
    seen = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            with threads.scope(1):
                seen.append(threads.current())
                return 2 * g * ctx.saved_tensors[0]

    x = torch.tensor(3.0, requires_grad=True)
    Square.apply(x).backward()
    assert (x.grad.item(), seen) == (6.0, [1])


def test_ceiling(monkeypatch):
    monkeypatch.setattr(host, "thread_ceiling", lambda: 2)
    assert threads.ceiling() == 2
    assert threads.limited(threads.ceiling, 1)() == 1
    monkeypatch.setattr(host, "thread_ceiling", lambda: 64)
    assert threads.ceiling() == 3


@pytest.mark.skipif(sys.platform == "win32", reason="needs libraries whose symbols are found through torch's")
def test_the_fallback_is_not_needed_here():
    assert threads._setters()[0] is not torch.set_num_threads


def test_the_fallback_where_the_libraries_lack_the_functions(monkeypatch):
    monkeypatch.setattr(threads, "_torch_library", lambda: None)
    assert threads._setters.__wrapped__() == (torch.set_num_threads, int)
    deaf = types.SimpleNamespace(omp_set_num_threads=lambda count: None, MKL_Set_Num_Threads_Local=lambda count: 0)
    monkeypatch.setattr(threads, "_torch_library", lambda: deaf)
    assert threads._setters.__wrapped__() == (torch.set_num_threads, int)


# --- orders -----------------------------------------------------------------------------------------------------------


def test_off(monkeypatch):
    monkeypatch.setenv("AUTOKERN_THREADS", "off")
    monkeypatch.setattr(host, "thread_ceiling", lambda: 1)
    with autokern.enabled():
        assert not threads.allowed()
        assert (threads.current(), wrapped(1), in_scope(1)) == (3, 3, 3)
        assert _lbfgsb.setulb is STEP
    assert threads.allowed()
    assert wrapped(1) == 1


@pytest.mark.parametrize(("order", "inside"), [("1", 1), ("2", 2), ("8", 3)])
def test_a_number_is_a_ceiling(monkeypatch, order, inside):
    monkeypatch.setenv("AUTOKERN_THREADS", order)
    with autokern.enabled():
        assert threads.current() == inside
        assert elsewhere(threads.current) == inside
    assert threads.current() == 3


# --- BLAS of SciPy and NumPy ------------------------------------------------------------------------------------------


@pytest.fixture
def libraries():
    """BLAS libraries at two threads each."""
    controller = blas._libraries()
    if controller is None:
        pytest.skip("needs a NumPy or SciPy whose BLAS threadpoolctl knows")
    with controller.limit(limits=2):
        for library in controller.lib_controllers:  # so that other threads may set them, too
            getattr(library, "clear_controlling_thread", bool)()
        yield controller.lib_controllers
        assert counts(controller.lib_controllers) == {2}
    assert blas._turn.acquire(blocking=False)
    blas._turn.release()


def counts(libraries):
    return {library.get_num_threads() for library in libraries}


def test_blas_is_limited_and_restored(libraries):
    with blas_limited():
        assert counts(libraries) == {1}
        assert threads.current() == 3
    assert counts(libraries) == {2}
    with blas_limited(5):
        assert counts(libraries) == {2}
    with pytest.raises(KeyboardInterrupt), blas_limited():
        raise KeyboardInterrupt


def test_nested_blas_blocks_never_raise(libraries):
    for library in libraries:
        library.set_num_threads(4)
    with blas_limited(3):
        with blas_limited(1):
            with blas_limited(2):
                assert counts(libraries) == {1}
            assert counts(libraries) == {1}
        assert counts(libraries) == {3}
    assert counts(libraries) == {4}
    for library in libraries:
        library.set_num_threads(2)


@pytest.mark.parametrize("count", [1, 2])
def test_blas_blocks_that_overlap_in_threads(libraries, count):
    """Each saving and restoring for itself, the second would restore what the first has lowered."""
    entered, leave = threading.Event(), threading.Event()

    def overlap():
        with blas_limited():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=overlap)
    with blas_limited(count):
        thread.start()
        entered.wait(10)
        assert counts(libraries) == {1}
    leave.set()
    thread.join()
    assert counts(libraries) == {2}


def test_blas_in_many_threads_at_once(libraries):
    def work():
        for _ in range(100):
            with blas_limited(), blas_limited():
                pass

    pool = [threading.Thread(target=work) for _ in range(8)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    with blas_limited():
        assert counts(libraries) == {1}


@pytest.mark.parametrize("step", range(4))
def test_blas_is_restored_when_the_interrupt_comes_while_setting(libraries, monkeypatch, step):
    steps = iter(range(4))

    def interrupted(set_num_threads):
        def call(count):
            set_num_threads(count)
            if next(steps, None) == step:
                raise KeyboardInterrupt

        return call

    with monkeypatch.context() as patch:
        for library in libraries:
            patch.setattr(library, "set_num_threads", interrupted(library.set_num_threads))
        if step < 2 * len(libraries):
            with pytest.raises(KeyboardInterrupt), blas_limited():
                pass
    assert counts(libraries) == {2}


def test_nothing_happens_without_threadpoolctl(libraries, monkeypatch):
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    monkeypatch.setattr(blas, "_found", (0, None))
    with blas_limited():
        assert counts(libraries) == {2}


def test_torchs_own_blas_is_left_alone(libraries):
    assert not any(map(blas._of_torch, libraries))
    shipped = Path(torch.__file__).parent / "lib" / "libopenblas.so.0"
    assert blas._of_torch(types.SimpleNamespace(filepath=str(shipped)))
    shared = ctypes.CDLL(torch._C.__file__)
    if hasattr(shared, "MKL_Get_Max_Threads"):
        assert blas._of_torch(types.SimpleNamespace(filepath="/usr/lib/libmkl_rt.so", dynlib=shared))


# --- the hook ---------------------------------------------------------------------------------------------------------


def rosenbrock(x):
    return optimize.rosen(x), optimize.rosen_der(x)


def minimum(**options):
    return optimize.minimize(rosenbrock, np.full(5, -1.0), jac=True, method="L-BFGS-B", **options)


def test_the_hook_is_put_in_and_taken_out():
    assert _lbfgsb.setulb is STEP
    with autokern.enabled():
        first = _lbfgsb.setulb
        assert first is not STEP
        assert (first.__wrapped__, first.__name__, first.__doc__) == (STEP, STEP.__name__, STEP.__doc__)
        with autokern.enabled():
            assert _lbfgsb.setulb is first
        assert _lbfgsb.setulb is first
    assert _lbfgsb.setulb is STEP
    with autokern.enabled():
        assert _lbfgsb.setulb is first


def test_the_same_optimum(libraries):
    stock = minimum()
    with autokern.enabled():
        limited = minimum()
        kept = _lbfgsb.setulb
    assert (limited.x == stock.x).all()
    assert (limited.nit, limited.nfev, limited.message) == (stock.nit, stock.nfev, stock.message)
    with pytest.MonkeyPatch.context() as patch:  # a wrapper that outlives its block does as stock does
        patch.setattr(_lbfgsb, "setulb", kept)
        assert (minimum().x == stock.x).all()


def test_steps_are_limited_and_the_objective_is_not(libraries, monkeypatch):
    in_steps, in_objective = set(), set()

    def step(*args):
        in_steps.update(counts(libraries))
        return STEP(*args)

    def objective(x):
        in_objective.update(counts(libraries))
        return rosenbrock(x)

    monkeypatch.setattr(_lbfgsb, "setulb", step)
    scipy_hooks._hooked.cache_clear()
    with autokern.enabled():
        optimize.minimize(objective, np.zeros(5), jac=True, method="L-BFGS-B")
    scipy_hooks._hooked.cache_clear()
    assert (in_steps, in_objective) == ({1}, {2})


def test_exceptions_of_the_objective_pass_through(libraries):
    def fail(x):
        raise ZeroDivisionError

    with autokern.enabled(), pytest.raises(ZeroDivisionError):
        optimize.minimize(fail, np.zeros(5), jac=True, method="L-BFGS-B")
    with autokern.enabled(), pytest.raises(TypeError):
        _lbfgsb.setulb()


def test_an_import_while_enabled_is_seen(monkeypatch):
    before = list(sys.meta_path)
    monkeypatch.setattr(optimize, "_lbfgsb", _lbfgsb)  # so that it is put back
    monkeypatch.delitem(sys.modules, scipy_hooks._MODULE)
    with autokern.enabled():
        assert sys.meta_path[1:] == before
        assert scipy_hooks.patches() == []
        import scipy.optimize._lbfgsb as anew

        assert anew.setulb.__wrapped__ is not None
        assert "exec_module" not in vars(anew.__spec__.loader)
    assert not hasattr(anew.setulb, "__wrapped__")
    assert sys.meta_path == before
    assert not hooks.is_enabled()


FITS = """
import sys, warnings
import torch
import autokern
from autokern.hooks import scipy as hook

steps = [0]
limit = hook.blas_limited
def counted():
    steps[0] += 1
    return limit()
hook.blas_limited = counted

autokern.enable()
assert not [name for name in ("scipy.optimize", "botorch") if name in sys.modules]
import botorch
from botorch.models import SingleTaskGP
from gpytorch.mlls import ExactMarginalLogLikelihood
from scipy.optimize import _lbfgsb
assert _lbfgsb.setulb.__wrapped__

def fitted():
    steps[0] = 0
    x = torch.linspace(0, 1, 12, dtype=torch.float64)[:, None]
    mll = ExactMarginalLogLikelihood((model := SingleTaskGP(x, (6 * x).sin())).likelihood, model)
    botorch.fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 10}})
    return torch.cat([p.detach().flatten() for p in model.parameters()]), steps[0]

after, taken = fitted()
autokern.disable()
assert not hasattr(_lbfgsb.setulb, "__wrapped__")
assert not [finder for finder in sys.meta_path if isinstance(finder, hook._Watch)]
stock, none = fitted()
with autokern.enabled():
    before, again = fitted()
print(taken > 0, none, again == taken, torch.allclose(after, stock), after.equal(before))
"""


@pytest.mark.slow
def test_botorch_imported_after_and_before():
    """In a process of its own, where nobody has imported SciPy's optimisers."""
    command = [sys.executable, "-W", "ignore", "-c", FITS]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "0", "True", "True", "True"]
