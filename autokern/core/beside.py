"""Values that are kept for an object as long as it lives, without any Python code that runs when it ends.

The callbacks of weak dictionaries are Python code that may run between any two steps of a program. A ``Ctrl-C`` that
comes meanwhile is lost there. So `Beside` puts values into the object's own dictionary, where they end with it, and the
callbacks of `Weak` are the methods of a plain dictionary.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")
_KEY = "_autokern_beside"


class _Values:
    """The values of one object. Pickles and deep copies of the object do not have them."""

    __slots__ = ("by", "owner")

    def __init__(self, owner: Any) -> None:
        self.owner, self.by = weakref.ref(owner), dict[Any, Any]()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return bool, ()


class Beside(Generic[Value]):
    """One value for each object that has a dictionary; a value must not refer to its object."""

    def _of(self, owner: Any) -> dict[Any, Value]:
        """Return the values of an object, or an empty dictionary; a copy has those of its original in its own."""
        found = getattr(owner, "__dict__", {}).get(_KEY)
        return found.by if found and found.owner() is owner else {}

    def get(self, owner: Any) -> Value | None:
        """Return the value of an object, or None."""
        return self._of(owner).get(self)

    def put(self, owner: Any, value: Value) -> Value:
        """Keep a value, and return it."""
        found = owner.__dict__.get(_KEY)
        if not found or found.owner() is not owner:
            found = owner.__dict__[_KEY] = _Values(owner)
        found.by[self] = value
        return value

    def drop(self, owner: Any) -> None:
        """Keep nothing of an object."""
        self._of(owner).pop(self, None)


class Weak(Generic[Value]):
    """One value for each object of any kind; a value that refers to its object keeps both alive for ever."""

    def __init__(self) -> None:
        self._by: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def get(self, owner: Any, default: Any = None) -> Value | Any:
        """Return the value of an object, or else the default."""
        found = self._by.get(id(owner))
        return found[1] if found is not None and found[0]() is owner else default

    def put(self, owner: Any, value: Value) -> Value:
        """Keep a value, and return it."""
        self._by[id(owner)] = weakref.ref(owner, functools.partial(self._by.pop, id(owner))), value
        return value
