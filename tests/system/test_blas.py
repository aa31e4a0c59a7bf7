"""threads.py: OpenBLAS has one thread inside, whoever is inside, and its own number again afterwards."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.programs import said
from support.threads import in_threads
from threadpoolctl import threadpool_limits

from autokern.core.state import permitted
from autokern.system import threads
from autokern.system.threads import one_thread


def numbers() -> list[int]:
    return [get() for get, _ in threads._libraries()]


@pytest.fixture(autouse=True)
def two():
    """OpenBLAS has two threads, however many cores there are."""
    if not threads._libraries():
        pytest.skip("NumPy's BLAS is another")
    with threadpool_limits(2, user_api="blas"):
        yield


def test_one_thread_inside_and_the_former_number_afterwards():
    with contextlib.suppress(ValueError), one_thread:
        assert set(numbers()) == {1}
        raise ValueError
    assert set(numbers()) == {2}


def test_a_number_that_the_user_sets_meanwhile_stands():
    seen = []
    with one_thread:
        for _, put in threads._libraries():
            put(3)
        in_threads(lambda _: one_thread.__enter__() or seen.append(numbers()) or one_thread.__exit__(), [0])
    assert {*seen[0]} == {3}, "another thread that enters meanwhile lowers nothing"
    assert set(numbers()) == {3}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_that_is_forked_while_somebody_is_inside_has_the_former_number():
    program = """
import os
from concurrent.futures import ThreadPoolExecutor
import numpy
from autokern.system import threads
pairs, inside = threads._libraries(), threads.one_thread
numbers = lambda: {get() for get, _ in pairs}
for _, put in pairs:
    put(2)
other = ThreadPoolExecutor(1)
other.submit(inside.__enter__).result()
child = os.fork()
if not child:
    found = numbers()
    with inside:
        os._exit((found, numbers()) != ({2}, {1}))
status = os.waitpid(child, 0)[1]
other.submit(inside.__exit__).result()
print(status, numbers())
"""
    assert said(program)[-2:] == ["0", "{2}"]


def test_the_last_thread_to_leave_restores_the_number():
    with ThreadPoolExecutor(1) as other:
        with one_thread:
            other.submit(one_thread.__enter__).result()
        assert set(numbers()) == {1}
        other.submit(one_thread.__exit__).result()
    assert set(numbers()) == {2}


def test_interrupts_on_the_way_in_and_inside_lose_no_number(monkeypatch):
    honest = threads._libraries()

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(threads, "_libraries", lambda: [*honest, (interrupted, print)])
    with pytest.raises(KeyboardInterrupt), one_thread:
        raise AssertionError("not reached")
    monkeypatch.setattr(threads, "_libraries", lambda: honest)
    one_thread.__enter__()  # and another comes before it leaves
    with one_thread:
        pass
    assert set(numbers()) == {2}


def test_nothing_is_changed_where_that_is_forbidden():
    permitted.remove("threads")
    try:
        with one_thread:
            assert set(numbers()) == {2}
    finally:
        permitted.add("threads")
