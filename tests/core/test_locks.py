"""state.py: locks that neither a signal handler nor a forked process waits for in vain."""

from __future__ import annotations

import os
import threading

import pytest

from autokern.core.state import Lock, once


def test_its_own_thread_enters_again_and_is_told():
    lock = Lock()
    assert not lock.entered()
    with lock.here():
        assert lock.entered()
        with lock.here():
            assert lock.entered()
    assert not lock.entered()


def test_another_thread_waits_and_has_not_entered():
    lock, seen = Lock(), []

    def other():
        seen.append(lock.entered())
        seen.append(lock.here().acquire(blocking=False))

    with lock.here():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [False, False]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*JAX is multithreaded:RuntimeWarning")  # where an earlier test used JAX
def test_a_forked_process_does_not_wait_for_threads_of_its_parent():
    lock, entered, done = Lock(), threading.Event(), threading.Event()

    def other():
        with lock.here():
            entered.set()
            done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.here().acquire(blocking=False) else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_property_is_computed_once_for_each_object():
    class Counted:
        calls = 0

        @once
        def value(self):
            Counted.calls += 1
            return Counted.calls

    one, two = Counted(), Counted()
    assert (one.value, one.value, two.value) == (1, 1, 2)
