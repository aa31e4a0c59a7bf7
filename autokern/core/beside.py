"""Values that are cached for an object and freed with it, without any Python code that runs at that time.

The callbacks of weak dictionaries are Python code that may run between any two steps of a program; a ``Ctrl-C`` that
arrives in one is lost. So `Beside` stores values in the object's own ``__dict__``, and the callback of `Weak` is a
method of a plain dictionary.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Generic, TypeVar

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
    """One value for each object that has a ``__dict__``; a value must not refer to its object."""

    def _of(self, owner: Any) -> dict[Any, Value]:
        """Return the values of an object; empty for a shallow copy, which carries those of its original."""
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
    """One value for each weakly referenced object; a value that refers to its object keeps both alive for ever."""

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
