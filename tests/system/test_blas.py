"""blas.py: OpenBLAS has one thread inside, whoever is inside, and its own number again afterwards."""

from __future__ import annotations

import sys
import threading

import pytest
from threadpoolctl import threadpool_limits

from autokern.system import blas, threads
from autokern.system.blas import one_thread


def _libraries():
    return blas._libraries("scipy.linalg" in sys.modules)


def numbers() -> list[int]:
    return [get() for get, _ in _libraries()]


@pytest.fixture(autouse=True)
def two():
    """OpenBLAS has two threads, however many cores there are."""
    if not _libraries():
        pytest.skip("NumPy's BLAS is another")
    with threadpool_limits(2, user_api="blas"):
        yield


def test_one_thread_inside_and_the_former_number_afterwards():
    with one_thread:
        assert set(numbers()) == {1}
        with one_thread:
            assert set(numbers()) == {1}
        assert set(numbers()) == {1}
    assert set(numbers()) == {2}


def test_the_number_comes_back_after_an_error():
    with pytest.raises(ValueError, match="no"), one_thread:
        raise ValueError("no")
    assert set(numbers()) == {2}


def test_the_last_thread_to_leave_restores_the_number():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with one_thread:
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with one_thread:
        thread.start()
        assert inside.wait(60)
    assert set(numbers()) == {1}
    leave.set()
    thread.join()
    assert set(numbers()) == {2}


def test_an_interrupt_on_the_way_in_loses_no_number(monkeypatch):
    honest = _libraries()

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(blas, "_libraries", lambda _: [*honest, (interrupted, print)])
    with pytest.raises(KeyboardInterrupt), one_thread:
        raise AssertionError("not reached")
    monkeypatch.setattr(blas, "_libraries", lambda _: honest)
    with one_thread:
        pass
    assert set(numbers()) == {2}


def test_nothing_is_changed_where_that_is_forbidden():
    threads.allow(False)
    try:
        with one_thread:
            assert set(numbers()) == {2}
    finally:
        threads.allow(True)
