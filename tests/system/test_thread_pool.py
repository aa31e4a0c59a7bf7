"""Crew: grad and inference mode, errors, interrupts and thread counts of those who share a piece of work."""

import gc
import os
import signal
import threading
import time
import weakref

import pytest
import torch
from support.programs import BARE, said
from support.threads import in_threads
from torch.utils._python_dispatch import TorchDispatchMode

from autokern.system import threads

CPU = torch.device("cpu")
late: list[int] = []  # members that nobody stopped
each_count = pytest.mark.parametrize("count", [1, 2, 5])


@pytest.fixture(autouse=True)
def _all_threads_end():
    late.clear()
    before = set(threading.enumerate()), torch.get_num_threads(), late
    yield
    assert (set(threading.enumerate()), torch.get_num_threads(), []) == before


@pytest.fixture
def several(monkeypatch):
    """Three threads for torch, however few cores there are."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads.host, "thread_ceiling", lambda: 3)
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def spread(count, work):
    """What `work` returns in each member, by number."""
    found = {}
    threads.together(lambda member: found.__setitem__(member.number, work(member)), count)
    return [found[number] for number in range(count)]


def checking(member):
    """Work until another member fails or the call is interrupted, which comes soon."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        member.check()
        time.sleep(0.002)
    late.append(member.number)


@each_count
def test_every_member_does_its_share_once_and_the_first_is_the_calling_thread(count):
    found = []
    threads.together(lambda member: found.append((member.number, member.count, threading.current_thread())), count)
    assert sorted(one[:2] for one in found) == [(number, count) for number in range(count)]
    assert [one[0] for one in found if one[2] is threading.current_thread()] == [0]


@each_count
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_grad_mode_is_off_in_members_and_inference_mode_the_callers(count, grad, inference):
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        total = torch.zeros(count)

        def add(member):
            total[member.number] += 1  # refused outside of inference mode where `total` is of it
            return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.empty(1).is_inference()

        assert spread(count, add) == [(False, inference, inference)] * count
        assert total.eq(1).all()
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (grad, inference)


def test_each_of_several_members_has_one_thread_of_torch_and_a_single_one_all(several):
    assert spread(3, lambda member: (torch.get_num_threads(), threads.members(CPU))) == [(1, 1)] * 3
    assert torch.get_num_threads() == several
    assert spread(1, lambda member: torch.get_num_threads()) == [several]
    assert in_threads(lambda _: torch.get_num_threads(), [0]) == [several], "new threads get what the user set"


def test_a_crew_is_as_large_as_torch_uses_threads_and_affinity_and_quota_allow(several, monkeypatch):
    assert threads.members(CPU) == several
    assert threads.members(torch.device("cuda")) == threads.members(torch.device("meta")) == 1
    with TorchDispatchMode():  # it sees all operations of its thread
        assert threads.members(CPU) == 1
    monkeypatch.setattr(threads.host, "thread_ceiling", lambda: 2)
    assert threads.members(CPU) == 2 < torch.get_num_threads() == several
    torch.set_num_threads(1)
    assert threads.members(CPU) == 1


@each_count
def test_nobody_passes_a_meeting_before_all_have_come(count):
    arrived, seen = [], []

    def work(member):
        for turn in range(20):
            arrived.append(turn)
            member.wait()
            seen.append(arrived.count(turn))
            member.wait()

    threads.together(work, count)
    assert seen == [count] * (20 * count)


@each_count
@pytest.mark.parametrize("who", ["first", "last"])
@pytest.mark.parametrize("way", ["check", "wait", "fail later"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
def test_the_first_error_stops_the_others_and_is_raised_as_it_is(count, who, way, error):
    failing = 0 if who == "first" else count - 1

    def work(member):
        if member.number == failing:
            raise error("first")
        if way == "fail later":
            time.sleep(0.05)
            raise RuntimeError("later")
        if way == "wait":
            member.wait()
        checking(member)

    with pytest.raises(error, match=r"^first$"):
        threads.together(work, count)
    assert torch.is_grad_enabled()


@each_count
def test_nothing_holds_the_memory_of_a_crew_that_failed(count):
    gone = []

    def fail():
        large = {0}
        gone.append(weakref.ref(large))

        def work(member):
            if member.number == count - len(large):
                raise MemoryError

        with pytest.raises(MemoryError):
            threads.together(work, count)

    gc.collect()
    gc.disable()
    try:
        fail()
        assert gone[0]() is None
    finally:
        gc.enable()


@pytest.fixture
def _interruptible():
    """A run in the background of a shell ignores interrupts, and so would Python in it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("where", ["working", "meeting", "joining"])
def test_an_interrupt_stops_all_wherever_it_comes(where):
    begun, stopped = threading.Barrier(3), []

    def work(member):
        begun.wait(60)
        if member.number == 0 and where == "joining":
            return
        if member.number == 2:
            time.sleep(0.05)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        try:
            if member.number == 0 and where == "meeting":
                member.wait()
            checking(member)
        finally:
            stopped.append(member.number)

    with pytest.raises(KeyboardInterrupt):
        threads.together(work, 3)
    assert {1, 2} <= set(stopped)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt("meanwhile")])
def test_threads_that_cannot_be_started_are_an_error_and_stop_the_rest(monkeypatch, error):
    start, begun = threading.Thread.start, []

    def only_one(thread):
        if not begun:
            begun.append(thread)
            start(thread)
            if not isinstance(error, KeyboardInterrupt):
                return  # an interrupt comes when the first has started
        raise error

    monkeypatch.setattr(threading.Thread, "start", only_one)
    with pytest.raises(type(error), match=str(error)):
        threads.together(checking, 4)
    assert not begun[0].is_alive()


def test_crews_of_several_threads_do_not_meet():
    found = []

    def many(name):
        for _ in range(30):
            threads.together(lambda member: (member.wait(), found.append(name)), 3)

    in_threads(many, range(3))
    assert [found.count(name) for name in range(3)] == [90] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_afterwards_works_with_one_thread():
    code = f"""{BARE}
import os, torch
torch.set_num_threads(2)
from autokern.system import threads
done, cpu = [], torch.device("cpu")
assert threads.members(cpu) == 2
threads.together(lambda member: done.append(torch.ones(64, 64).mm(torch.ones(64, 64))), 2)
torch.set_num_threads(1)
child = os.fork()
if not child:
    count = threads.members(cpu)
    threads.together(lambda member: done.append(torch.ones(64, 64).mm(torch.ones(64, 64))), count)
    os._exit(0 if len(done) == 3 and count == 1 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert said(code, timeout=60) == ["0"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are not listed")
def test_a_fork_waits_for_threads_that_are_being_taken_down():
    threads.together(lambda member: None, 3)
    assert len(threads._ended) >= 2
    thread = threading.Thread(target=time.sleep, args=(0.03,))
    thread.start()
    threads._ended.append(thread.native_id)
    threads._wait_for_ended()
    assert not threads._ended
    assert not os.path.exists(f"/proc/self/task/{thread.native_id}")
    threads._ended.append(threading.get_native_id())  # the system gave the number to a thread that stays
    began = time.monotonic()
    threads._wait_for_ended()
    assert not threads._ended
    assert time.monotonic() - began < 5


def test_a_thread_that_was_interrupted_while_it_began_is_not_waited_for():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    threads._join([thread], [threading.Event()])  # nobody sets it


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are not listed")
def test_an_interrupted_wait_before_a_fork_leaves_no_number_that_was_looked_at(monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(threads.time, "sleep", interrupted)
    threads._ended.extend([threading.get_native_id()] * 2)
    for left in (1, 0):
        with pytest.raises(KeyboardInterrupt):
            threads._wait_for_ended()
        assert len(threads._ended) == left
