"""state.py: locks that nobody waits for in vain; values that are kept in an object's own dictionary."""

import copy
import pickle
import sys
import threading
import weakref

from autokern.core.state import Beside, Lock, Weak, once


def test_its_own_thread_enters_again_and_is_told_and_another_waits():
    lock, seen = Lock(), []

    def other():
        seen.append((lock.entered(), lock.here().acquire(blocking=False)))

    assert not lock.entered()
    with lock.here():
        with lock.here():
            assert lock.entered()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert lock.entered()
    assert (lock.entered(), seen) == (False, [(False, False)])


def test_a_property_is_computed_once_for_each_object():
    class Counted:
        calls = 0

        @once
        def value(self):
            Counted.calls += 1
            return Counted.calls

    one, two = Counted(), Counted()
    assert (one.value, one.value, two.value) == (1, 1, 2)


class Owner:
    pass


class Value:
    pass


KEPT = Beside[Value]()


def test_each_object_has_its_own_and_each_kind_another():
    one, two, other = Owner(), Owner(), Beside[int]()
    value = KEPT.put(one, Value())
    other.put(one, 3)
    assert KEPT.get(one) is value
    assert (other.get(one), KEPT.get(two)) == (3, None)
    KEPT.drop(one)
    assert (KEPT.get(one), other.get(one)) == (None, 3)
    KEPT.drop(two)
    assert [KEPT.get(bare) for bare in (3, None)] == [None, None]  # which have no dictionary


def test_a_value_ends_with_its_object_at_once():
    owner = Owner()
    ended = weakref.ref(KEPT.put(owner, Value()))
    assert weakref.getweakrefcount(owner) == 1
    del owner
    assert ended() is None


def test_copies_and_pickles_are_without():
    owner = Owner()
    value = KEPT.put(owner, Value())
    for made in (copy.copy(owner), copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
        assert KEPT.get(made) is None
        assert KEPT.put(made, Value()) is not value
        KEPT.drop(made)
    assert b"autokern" not in pickle.dumps(owner).replace(b"_autokern_beside", b"")
    assert KEPT.get(owner) is value


def test_what_is_kept_weakly_ends_with_its_object_without_a_line_of_python():
    kept, owner, other = Weak[Value](), Owner(), Owner()
    ended = weakref.ref(kept.put(owner, Value()))
    kept.put(owner, value := Value())
    assert ended() is None
    assert (kept.get(owner), kept.get(other), kept.get(other, 3)) == (value, None, 3)
    ended, lines = weakref.ref(value), []
    sys.setprofile(lambda frame, event, argument: lines.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del owner, value
    finally:
        sys.setprofile(None)
    assert ended() is None
    assert lines == []
