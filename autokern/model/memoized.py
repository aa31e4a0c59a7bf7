"""Access to linear_operator's cache of results on an object, its `_memoize_cache`.

The library's keys are a name, or a tuple of name, positional arguments and pickled keyword arguments.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection
from typing import Any

_CACHE = "_memoize_cache"
_NO_KEYWORDS = pickle.dumps({})


def names(holder: Any) -> list[str]:
    """Return the names of all cached results."""
    return [key[0] if isinstance(key, tuple) else key for key in holder.__dict__.get(_CACHE, ())]


def is_kept(holder: Any, name: str, *args: Any) -> bool:
    """Whether the result of a method with these positional arguments is cached."""
    return (name, args, _NO_KEYWORDS) in holder.__dict__.get(_CACHE, ())


def drop(holder: Any, unwanted: Collection[str]) -> None:
    """Drop the cached results of these methods."""
    kept = holder.__dict__.get(_CACHE, {})
    for key in [key for key in kept if isinstance(key, tuple) and key[0] in unwanted]:
        del kept[key]


def mark(holder: Any, name: str) -> None:
    """Set a mark that lasts until the library empties the cache, in a backward pass."""
    holder.__dict__.setdefault(_CACHE, {})[name] = True


def is_marked(holder: Any, name: str) -> bool:
    """Whether a mark is still set."""
    return name in holder.__dict__.get(_CACHE, ())
