"""Results that linear_operator keeps on an object, in its `_memoize_cache`: which there are, and which are dropped.

The library files a result under its name, positional arguments and pickled keyword arguments, or under the name alone.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection
from typing import Any

__all__ = ["drop", "is_kept", "is_marked", "mark", "names"]

_CACHE = "_memoize_cache"
_NO_KEYWORDS = pickle.dumps({})


def names(holder: Any) -> list[str]:
    """Return the names of all results that are kept."""
    return [key[0] if isinstance(key, tuple) else key for key in holder.__dict__.get(_CACHE, ())]


def is_kept(holder: Any, name: str, *args: Any) -> bool:
    """Whether the result of a method with these arguments is kept."""
    return (name, args, _NO_KEYWORDS) in holder.__dict__.get(_CACHE, ())


def drop(holder: Any, unwanted: Collection[str]) -> None:
    """Drop all results of these names."""
    kept = holder.__dict__.get(_CACHE, {})
    for key in [key for key in kept if isinstance(key, tuple) and key[0] in unwanted]:
        del kept[key]


def mark(holder: Any, name: str) -> None:
    """Keep a mark until the cache is emptied, as the library does in backward passes."""
    holder.__dict__.setdefault(_CACHE, {})[name] = True


def is_marked(holder: Any, name: str) -> bool:
    """Whether the mark is still there."""
    return name in holder.__dict__.get(_CACHE, ())
