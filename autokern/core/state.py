"""State that signal handlers and forks do not break: locks, and values that are stored beside an object.

A signal handler that computes with the same model must not wait for a lock that its own thread holds. A ``Ctrl-C`` in a
callback of a weak dictionary is lost, so none runs Python code. A forked process lacks the threads that held its locks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

_first = os.getpid()


def forked() -> bool:
    """Whether this process was forked after the import of autokern (a DataLoader worker, say)."""
    return os.getpid() != _first


class Lock:
    """A reentrant lock, one for each process: ``with lock.here()``."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: dict[int, Any] = {}

    def here(self) -> Any:
        """Return the lock of this process."""
        process = os.getpid()
        return self._of.get(process) or self._of.setdefault(process, threading.RLock())

    def entered(self) -> bool:
        """Whether this thread holds the lock; a signal handler that interrupted it must not touch the guarded state."""
        return any(lock._is_owned() for lock in list(self._of.values()))


if TYPE_CHECKING:
    once = functools.cached_property
else:

    def once(function: Any) -> Any:
        """Return a cached property without the lock over all instances that Python has before 3.12."""
        made = functools.cached_property(function)
        made.lock = contextlib.nullcontext()
        return made


Value = TypeVar("Value")
_KEY = "_autokern_beside"


class _Values:
    """The values of one object; its pickles and deep copies leave them out."""

    __slots__ = ("by", "owner")

    def __init__(self, owner: Any) -> None:
        self.owner, self.by = weakref.ref(owner), dict[Any, Any]()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return bool, ()


class Beside(Generic[Value]):
    """One value for each object, in its own ``__dict__``; a value must not refer to its object."""

    def _of(self, owner: Any) -> dict[Any, Value]:
        """Return the values of an object; empty for a shallow copy, which carries the values of its original."""
        found = getattr(owner, "__dict__", {}).get(_KEY)
        return found.by if found and found.owner() is owner else {}

    def get(self, owner: Any) -> Value | None:
        """Return the value of an object, or None."""
        return self._of(owner).get(self)

    def put(self, owner: Any, value: Value) -> Value:
        """Store a value, and return it."""
        found = owner.__dict__.get(_KEY)
        if not found or found.owner() is not owner:
            found = owner.__dict__[_KEY] = _Values(owner)
        found.by[self] = value
        return value

    def drop(self, owner: Any) -> None:
        """Remove the value of an object."""
        self._of(owner).pop(self, None)


class Weak(Generic[Value]):
    """One value for each object, freed with it by `dict.pop`, not by Python code; it must not refer to its object."""

    def __init__(self) -> None:
        self._by: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def get(self, owner: Any, default: Any = None) -> Value | Any:
        """Return the value of an object, or the default."""
        found = self._by.get(id(owner))
        return found[1] if found is not None and found[0]() is owner else default

    def put(self, owner: Any, value: Value) -> Value:
        """Store a value, and return it."""
        self._by[id(owner)] = weakref.ref(owner, functools.partial(self._by.pop, id(owner))), value
        return value


class _Inside(threading.local):
    """State of this thread."""

    active = False  # it runs a candidate: its nested calls are not dispatched
    measuring = False  # it calibrates
    within: tuple[str, ...] = ()  # the composite calls that it runs, outermost first, as ``op by candidate``
    formless = False  # it multiplies by kernel matrices without forming them
    evaluated = False  # it evaluates a lazy kernel, whose tensors no other code holds yet
    repeated = False  # it runs a function that may be replayed as a whole
    formal = False  # it evaluates a variational model for replays, which read the library's operators
    told: list[tuple[str, str]] | None = None  # collects why the library computes something
    solves: list[Any] | None = None  # collects the reports of iterative solves
    differentiated: Any = None  # the operator whose solve it differentiates, which caches its factor
    newest: weakref.ref[Any] | None = None  # the strategy that it created last with hooks, whose inputs are unchanged

    @contextlib.contextmanager
    def having(self, **state: Any) -> Iterator[None]:
        """Set state of this thread within the block, and restore it afterwards."""
        before = {name: getattr(self, name) for name in state}
        self.__dict__.update(state)
        try:
            yield
        finally:
            self.__dict__.update(before)


inside = _Inside()
repaid: weakref.WeakSet[type] = weakref.WeakSet()  # classes of models whose replayed losses were faster
permitted = {"threads"}  # what the user's settings enable in this process: to limit ``threads``, to record ``graphs``
