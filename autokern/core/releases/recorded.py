"""The table of recorded releases; whether a function, class or constant of the libraries is in it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

from autokern.core.recovery import suppressed
from autokern.core.releases.fingerprints import definitions, of_function, of_value

_HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "")
"""The folder of the package, with the separator at its end."""
_INNER = ("fget", "fset", "fdel", "__func__", "__wrapped__", "wrapped", "func")
"""Attributes in which properties and other decorators keep the decorated function."""
BUILT_IN = (BuiltinFunctionType, MethodDescriptorType)
_DEEP = 6
"""Layers of decorators that are searched for functions."""
_CONTEXT = contextlib.contextmanager(iter).__code__
"""The code of the wrapper that `contextlib.contextmanager` puts around every function."""
_DESCRIPTORS = (property, staticmethod, classmethod)
"""Besides torch's, the descriptors that only hand out their function."""


@functools.cache
def table() -> dict[str, Any]:
    """Return the recorded releases by library, and the fingerprints by module and qualified name."""
    with open(os.path.join(os.path.dirname(__file__), "known.json"), encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


@functools.cache
def _wrappers() -> frozenset[str]:
    """Return the fingerprints of all nested functions: the libraries' decorators return these."""
    return frozenset(table()["within"].split())


@functools.lru_cache(8)
def _sources(path: str) -> list[tuple[str, str, str]]:
    with suppressed(OSError, SyntaxError, ValueError), open(path, encoding="utf-8") as file:
        return list(definitions(file.read(), path))
    return []


def is_ours(found: Any) -> bool:
    """Whether a function or property is code of autokern."""
    return getattr(getattr(getattr(found, "fget", found), "__code__", None), "co_filename", "").startswith(_HERE)


def original(found: Any) -> Any:
    """Return the original behind a hook of autokern; anything else as it is."""
    while hasattr(found, "__wrapped__") and is_ours(found):
        found = found.__wrapped__
    return found


def is_of(library: str, found: Any) -> bool:
    """Whether an attribute is C code, or all its functions were defined by a library or autokern."""
    names = [f.__globals__.get("__name__", "").partition(".")[0] for f in functions(found)]
    return {library, "autokern"}.issuperset(names) if names else isinstance(found, BUILT_IN)


def is_recorded(module: str, name: str, found: Any) -> bool:
    """Whether an attribute is recorded under its qualified name; of torch, whether it is torch's own function."""
    last = name.rpartition(".")[2]
    if module.partition(".")[0] == "torch" and isinstance(found, BUILT_IN):
        return found.__name__.endswith(last)
    code = table()["code"]
    marks = code.get(module, {}).get(name)
    if marks is None:  # a module may re-export another one's definition
        home, defined = getattr(found, "__module__", ""), getattr(found, "__qualname__", "")
        marks = code.get(home, {}).get(defined) if defined.rpartition(".")[2] == last else None
    if marks is None and (value := of_value(found)):  # a constant does not name its module
        marks = " ".join(space[name] for space in code.values() if name in space and value in space[name])
    if marks is None and module.partition(".")[0] == "autokern":
        return True
    if marks is None:
        theirs = module.partition(".")[0] == "torch" and is_of("torch", found)
        return theirs and getattr(found, "__name__", "").endswith(last)
    return _matches(found, frozenset(marks.split()))


def _is_marked(function: FunctionType, marks: frozenset[str]) -> bool:
    """Whether a function has one of these fingerprints; on an unrecorded version of Python, by its syntax."""
    ours, path = of_function(function), function.__code__.co_filename
    if not marks.isdisjoint(ours) or is_ours(function):  # `ours`: enabling autokern replaced its code
        return True
    written = _sources(path) if path == function.__globals__.get("__file__") else ()
    name = function.__code__.co_name
    return any(code in ours and syntax in marks and at.endswith(name) for at, code, syntax in written)


def _matches(found: Any, marks: frozenset[str], depth: int = 0) -> bool:
    """Whether the marks hold an attribute's constant value, or its innermost function within recorded decorators."""
    if not isinstance(found, FunctionType):
        layers = _layers(found)
        plain = type(found) in _DESCRIPTORS or type(found).__module__.startswith("torch.")
        return plain and all(_matches(one, marks) for one in layers) if layers else of_value(found) in marks
    if "__wrapped__" not in found.__dict__ and _is_marked(found, marks):
        return True
    depth += not is_ours(found)
    if depth and f"@{depth}" not in marks:  # more decorators than in any release
        return False
    wrapped = any(_matches(layer, marks, depth) for layer in _held(found))
    return wrapped and (found.__code__ is _CONTEXT or _is_marked(found, _wrappers()))


def _layers(found: Any) -> list[Any]:
    own = () if isinstance(found, type) else getattr(found, "__dict__", ())
    there = (name for name in _INNER if name in own or (hasattr(type(found), name) and not isinstance(found, type)))
    return [layer for name in there if (layer := getattr(found, name, None)) is not None]


def _held(function: FunctionType) -> list[Any]:
    """Return the functions that a function wraps: its ``__wrapped__``, or else the functions in its closure."""
    if "__wrapped__" in function.__dict__:
        return [function.__dict__["__wrapped__"]]
    cells = []
    for cell in function.__closure__ or ():
        with suppressed(ValueError):  # the cell is empty
            cells.append(cell.cell_contents)
    return [one for one in cells if isinstance(one, FunctionType)]


def functions(found: Any, depth: int = 0) -> Iterator[FunctionType]:
    """Yield the functions of an attribute, including autokern's hooks and their originals."""
    if isinstance(found, FunctionType):
        yield found
    layers = _held(found) if isinstance(found, FunctionType) else _layers(found)
    for layer in layers if depth < _DEEP else ():
        yield from functions(layer, depth + 1)


def is_within(function: FunctionType) -> bool:
    """Whether the code of a function is recorded under its own name, or as that of any nested function."""
    marks = table()["code"].get(function.__module__, {}).get(function.__qualname__, "").split()
    return not _wrappers().union(marks).isdisjoint(of_function(function))
