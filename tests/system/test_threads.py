"""threads: counts are lowered where asked, in no other thread, and always restored."""

import contextlib
import os
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.threads import in_threads

import autokern
from autokern.core.state import permitted
from autokern.system import host, threads

SETTERS = {"openmp": threads._setters, "fallback": lambda: (torch.set_num_threads, int)}
"""As on this system, and as where the libraries' own functions cannot be found."""


@pytest.fixture(autouse=True)
def _three():
    """Three threads: a number to restore; hardly any test starts them."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


def elsewhere(work):
    """Do some work in a thread that has not used torch before."""
    return in_threads(lambda _: work(), [0])[0]


def wrapped(count):
    return threads.limited(torch.get_num_threads, count)()


@pytest.mark.parametrize("setters", SETTERS.values(), ids=SETTERS)
@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(("count", "inside"), [(1, 1), (2, 2), (3, 3), (4, 3), (10**6, 3)])
def test_lowered_inside_and_never_raised_and_restored(count, inside, error, setters, monkeypatch):
    monkeypatch.setattr(threads, "_setters", setters)

    def work():
        assert torch.get_num_threads() == inside
        if error:
            raise error

    with pytest.raises(error) if error else contextlib.nullcontext():
        threads.limited(work, count)()
    assert torch.get_num_threads() == 3
    assert elsewhere(lambda: (wrapped(count), torch.get_num_threads())) == (inside, 3)


def test_a_limited_function_is_what_it_was_before():
    def double(x: int, *, times: int = 1) -> int:
        """Double."""
        return 2 * x * times

    limited = threads.limited(double, 1)
    assert limited(3, times=2) == 12
    assert (limited.__name__, limited.__doc__, limited.__wrapped__) == ("double", "Double.", double)


@pytest.mark.parametrize("step", range(4))
def test_restored_when_the_interrupt_comes_while_setting(monkeypatch, step):
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
        wrapped(1)
    assert torch.get_num_threads() == 3
    mkl_before = setters[1](3)
    setters[1](mkl_before)
    assert mkl_before == 3


def test_other_threads_are_left_alone():
    """One that has used torch before, and one that first does so inside, which `torch.set_num_threads` would bind."""
    with ThreadPoolExecutor(1) as old:

        def counts():
            return torch.get_num_threads(), elsewhere(torch.get_num_threads), old.submit(torch.get_num_threads).result()

        assert counts() == (3, 3, 3)
        assert threads.limited(counts, 1)() == (1, 3, 3)
        assert counts() == (3, 3, 3)


JOBS = {
    "matmul": lambda a: a @ a,
    "cholesky": torch.linalg.cholesky,
    "qr": torch.linalg.qr,
    "exp": torch.exp,
    "sum": torch.sum,
}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux, which lists a process's threads")
@pytest.mark.parametrize("job", JOBS)
def test_libraries_obey(job):
    """OpenMP keeps a team for each thread that asks: a new thread has none until work is shared out."""
    a = torch.randn(400, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spd = a @ a.mT + 400 * torch.eye(400, dtype=torch.float64)

    def teams():
        time.sleep(0.2)  # another test's team ends
        tasks = [len(os.listdir("/proc/self/task"))]
        for run in (threads.limited(JOBS[job], 1), JOBS[job]):
            run(spd)
            tasks.append(len(os.listdir("/proc/self/task")))
        return tasks

    torch.set_num_threads(2)
    start, limited, free = elsewhere(teams)
    assert limited == start
    assert free > start
    torch.set_num_threads(3)


def test_ceiling(monkeypatch):
    monkeypatch.setattr(host, "thread_ceiling", lambda: 2)
    assert threads.ceiling() == 2
    assert threads.limited(threads.ceiling, 1)() == 1
    monkeypatch.setattr(host, "thread_ceiling", lambda: 64)
    assert threads.ceiling() == 3


def test_the_fallback_where_the_libraries_lack_the_functions(monkeypatch):
    deaf = types.SimpleNamespace(omp_set_num_threads=lambda count: None, MKL_Set_Num_Threads_Local=lambda count: 0)
    for library in (None, deaf):
        monkeypatch.setattr(threads, "_loaded", lambda path, library=library: library)
        assert threads._setters.__wrapped__() == (torch.set_num_threads, int)


@pytest.mark.parametrize(
    ("order", "quota", "inside"), [("1", 2, 1), ("2", 2, 2), ("2", 64, 2), ("8", 64, 3), ("", 1, 1), ("", 2, 2)]
)
def test_a_number_or_the_quota_is_a_ceiling_and_is_given_back(monkeypatch, order, quota, inside):
    monkeypatch.setattr(host, "thread_ceiling", lambda: quota)
    monkeypatch.setenv("AUTOKERN_THREADS", order)
    with autokern.enabled():
        assert torch.get_num_threads() == elsewhere(torch.get_num_threads) == inside
    assert torch.get_num_threads() == 3


def test_off(monkeypatch):
    monkeypatch.setenv("AUTOKERN_THREADS", "off")
    monkeypatch.setattr(host, "thread_ceiling", lambda: 1)
    with autokern.enabled():
        assert "threads" not in permitted
        assert (torch.get_num_threads(), wrapped(1)) == (3, 3)
    assert "threads" in permitted
    assert wrapped(1) == 1
