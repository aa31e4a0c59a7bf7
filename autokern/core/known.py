"""Which functions of the libraries are known: their code is that of a release on which the suites passed.

`known.json` has the fingerprints of the functions that autokern hooks, computes in place of, or relies on, for all
recorded releases and versions of Python. A `Relied` compares what it names with the table when it is first asked, and
again when an object behind one of the names is another one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter, eq, itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

from autokern.core.errors import AutokernWarning
from autokern.core.fingerprints import definitions, of_function
from autokern.core.versions import installed

__all__ = ["HERE", "Relied", "is_known", "is_ours", "original", "relied", "table", "unknown"]

HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
"""The folder of the package, with the separator at its end."""
_INNER = ("fget", "fset", "fdel", "__func__", "__wrapped__", "wrapped", "func")
"""Where properties and other decorators keep the functions that they decorate."""
_DEEP = 6
"""Layers of decorators beyond which a function is not known."""
_MAYBE = "?"
"""Stands among the fingerprints of a function that some recorded releases do not have."""
_MISSING, _OTHER = "is missing, or elsewhere", "is not the code of a tested release"
_PATCHED = "was replaced by code from elsewhere"
_FEW = 6
"""Names that a warning lists."""
_left_out: dict[str, str] = {}
_trusted = _warned = False
_SETTING_UP = (
    "__del", "__get", "__init__", "__set", "_check", "_clear", "_expand", "_get_", "_load", "_set", "_strict",
    "constraint", "expand", "get_", "hyper", "initialize", "load", "local_", "named_", "pyro", "register", "sample",
    "set_", "sub_", "to_py", "to_random", "train", "update", "variational",
)  # fmt: skip
"""Functions that compute nothing: that their code stays the same object is not asked again in each step."""
_CONTEXT = contextlib.contextmanager(iter).__code__  # type: ignore[attr-defined]
"""The code of every function that Python makes a context manager of."""
_code = attrgetter("__code__")
_ours: set[Any] = set()
_checked: dict[tuple[Any, ...], bool] = {}
_made: dict[frozenset[Any], Relied] = {}


@functools.cache
def table() -> dict[str, Any]:
    """Return the recorded releases by library, and the fingerprints by module and qualified name."""
    with open(os.path.join(HERE, "core", "known.json"), encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


@functools.cache
def _wrappers() -> frozenset[str]:
    """Return the fingerprints of all functions within functions: what decorators of the libraries return."""
    return frozenset(table()["within"].split())


@functools.lru_cache(8)
def _sources(path: str) -> list[tuple[str, str, str]]:
    with contextlib.suppress(OSError, SyntaxError, ValueError), open(path, encoding="utf-8") as file:
        return list(definitions(file.read(), path))
    return []


def is_ours(found: Any) -> bool:
    """Whether a function or property is code of autokern."""
    return getattr(getattr(getattr(found, "fget", found), "__code__", None), "co_filename", "").startswith(HERE)


def original(found: Any) -> Any:
    """Return what a hook of autokern replaces, and anything else as it is."""
    while hasattr(found, "__wrapped__") and is_ours(found):
        found = found.__wrapped__
    return found


def _is_recorded(function: FunctionType, marks: frozenset[str], root: str) -> bool:
    """Whether a function has one of these fingerprints; on a Python that nobody recorded, by its syntax."""
    ours, path = of_function(function), function.__code__.co_filename
    if not marks.isdisjoint(ours):
        return True
    name = function.__code__.co_name
    written = _sources(path) if path.startswith(root) else ()
    return any(code in ours and syntax in marks and at.endswith(name) for at, code, syntax in written)


def _is_known(found: Any, marks: frozenset[str], root: str, depth: int = 0) -> bool:
    """Whether all layers of an attribute are recorded, and the innermost ones for its name."""
    if depth > _DEEP:
        return False
    if not isinstance(found, FunctionType):
        layers = _layers(found)
        return bool(layers) and all(_is_known(layer, marks, root, depth + 1) for layer in layers)
    if "__wrapped__" not in found.__dict__ and _is_recorded(found, marks, root):
        return True
    wrapped = any(_is_known(layer, marks, root, depth + 1) for layer in _held(found))
    return wrapped and (found.__code__ is _CONTEXT or _is_recorded(found, _wrappers(), root))


def _layers(found: Any) -> list[Any]:
    return [layer for name in _INNER if (layer := getattr(found, name, None)) is not None]


def _held(function: FunctionType) -> list[Any]:
    """Return what a function wraps: what it says, or else the functions that it refers to."""
    if "__wrapped__" in function.__dict__:
        return [function.__dict__["__wrapped__"]]
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty one
            cells.append(cell.cell_contents)
    return [one for one in cells if isinstance(one, FunctionType)]


def _functions(found: Any, depth: int = 0) -> Iterator[FunctionType]:
    """Yield the functions of an attribute; hooks of autokern and what they replace as well."""
    if isinstance(found, FunctionType):
        yield found
    layers = _held(found) if isinstance(found, FunctionType) else _layers(found)
    for layer in layers if depth < _DEEP and not isinstance(found, type) else ():
        yield from _functions(layer, depth + 1)


@functools.cache
def _root(module: str) -> str:
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None) or os.devnull
    return os.path.join(os.path.dirname(os.path.abspath(file)), "")


def is_known(module: str, name: str, found: Any) -> bool:
    """Whether an attribute is the one that is recorded under its qualified name, or a hook of autokern in its place."""
    if _trusted:
        return True
    found, code = original(found), table()["code"]
    marks = code.get(module, {}).get(name)
    if marks is None:  # a module may hold what another one defines
        home, defined = getattr(found, "__module__", ""), getattr(found, "__qualname__", "")
        marks = code.get(home, {}).get(defined) if defined.rpartition(".")[2] == name.rpartition(".")[2] else None
    if marks is None:
        return isinstance(found, BuiltinFunctionType) and found.__name__ == name and module.startswith("torch")
    layers = [found] if type(found) is FunctionType and not found.__dict__ else _functions(found)
    each = [(f.__code__, repr(f.__defaults__) if f.__defaults__ else "", repr(f.__kwdefaults__)) for f in layers]
    key = module, name, type(found), *each
    if key not in _checked:
        _checked[key] = _is_known(found, frozenset(marks.split()), _root(module))
    return _checked[key]


def admits(owner: Any, name: str, found: Any, more: Relied) -> bool:
    """Whether a hook may take the place of an attribute; one that is missing or unknown is listed."""
    kind = isinstance(owner, type)
    module, qualified = (owner.__module__, f"{owner.__qualname__}.{name}") if kind else (owner.__name__, name)
    if module.partition(".")[0] not in table()["releases"]:
        return found is not None
    full, why = f"{module}:{qualified}", _MISSING if found is None else ""
    if not why and not is_known(module, qualified, found):
        why = _reason(module, found)
    if not why and not more.holds():
        why = f"relies on {', '.join(more.unknown)}"
    if why:
        leave_out(full, why)
    return not why


def is_within(function: FunctionType) -> bool:
    """Whether the code of a function is recorded as that of a function within another one, or of its own name."""
    marks = table()["code"].get(function.__module__, {}).get(function.__qualname__, "").split()
    return not _wrappers().union(marks).isdisjoint(of_function(function))


def _reason(module: str, found: Any) -> str:
    """Return what is wrong with an unknown attribute: the library has other code, or somebody replaced it."""
    root, layers = _root(module), list(_functions(original(found)))
    return _OTHER if layers and all(f.__code__.co_filename.startswith(root) for f in layers) else _PATCHED


def leave_out(name: str, why: str) -> None:
    """Note a hook that stays out."""
    _left_out[name] = why


def trust(everything: bool) -> None:
    """Take everything that is there for known, or not."""
    global _trusted
    _left_out.clear()
    for one in _made.values() if everything is not _trusted else ():
        one.forget()
    _trusted = everything


def versions() -> dict[str, tuple[str, bool]]:
    """Return the versions of the libraries, and whether each is recorded."""
    found = {library: installed(library).partition("+")[0] for library in table()["releases"]}
    return {library: (version, version in table()["releases"][library]) for library, version in found.items() if version}


def summary() -> str:
    """Return in one sentence which functions are unknown, of which versions, and what to do; empty if there are none."""
    names = unknown()
    if not names:
        return ""
    found, named = versions(), sorted(names)
    of = {library for library in found if any(name.startswith((f"{library}.", f"{library}:")) for name in named)}
    texts = []
    for library in sorted(of):
        version, recorded = found[library]
        tested = table()["releases"][library]
        texts.append(f"{library} {version} (tested: {', '.join(tested)})" if not recorded else f"{library} {version}")
    listed = ", ".join(name.partition(":")[2] or name for name in named[:_FEW])
    more = f" and {len(named) - _FEW} more" if len(named) > _FEW else ""
    return (
        f"{', '.join(texts) or 'the libraries'}: not the code of a tested release: {listed}{more}. Stock runs where "
        "autokern relies on it; `autokern doctor` lists all of it. Install a tested release, or set "
        "AUTOKERN_UNKNOWN=trust."
    )


def warn(how: str) -> None:
    """Warn once of hooks that stay out, but for functions that the user replaced."""
    global _warned
    if set(_left_out.values()) - {_PATCHED} and not _warned and how != "trust":
        _warned = True
        warnings.warn(summary(), AutokernWarning, stacklevel=5)


@functools.cache
def _members(module: str, kind: str) -> dict[str, bool]:
    """Return the names of the functions that are recorded of a class, and whether each must be there."""
    space, start = table()["code"].get(module, {}), f"{kind}."
    names = {name[len(start) :]: _MAYBE not in marks for name, marks in space.items() if name.startswith(start)}
    return {name: must for name, must in names.items() if "." not in name}


def relied(*names: Any) -> Relied:
    """Return what has these names, the same object for the same names.

    Parameters
    ----------
    *names : str or type
        ``module:function``, ``module:Class.method``, ``module:Class`` for all that is recorded of a class, or a class
        itself with all its bases that are recorded.
    """
    kinds = [name for name in names if isinstance(name, type)]
    bases = [base for kind in kinds for base in kind.__mro__ if _members(base.__module__, base.__qualname__)]
    key = frozenset((*bases, *(name for name in names if isinstance(name, str))))
    return _made.get(key) or _made.setdefault(key, Relied(key))


def unknown() -> dict[str, str]:
    """Return what was found to be unknown, by its name, and what is wrong with it."""
    return _left_out | {name: why for one in _made.values() for name, why in one.unknown.items()}


class Relied:
    """What something computes in place of, or relies on; `relied` makes it.

    Attributes
    ----------
    unknown : dict
        What of it was not known when it was last looked at, and why.
    """

    def __init__(self, names: frozenset[Any]) -> None:
        self._names, self._looked = names, False
        self.unknown: dict[str, str] = {}

    def forget(self) -> None:
        """Look again when next asked."""
        self._looked = False

    def holds(self) -> bool:
        """Whether all of it is known, as it is now."""
        if not (self._looked and self._is_same()):
            self._look()
        return not self.unknown

    def _is_same(self) -> bool:
        try:
            if list(map(_code, self._functions)) != self._codes or not all(map(eq, self._spaces, self._copies)):
                return False
            for names, space, found in self._named:
                if names(space) != found:
                    return False
        except Exception:  # a name that is gone, or objects that do not compare
            return False
        return True

    def _look(self) -> None:
        self.unknown, self._looked = {}, True
        self._functions: list[FunctionType] = []
        self._spaces: list[Any] = []
        self._copies: list[dict[str, Any]] = []
        self._named: list[tuple[Callable[[Any], Any], Any, Any]] = []
        spaces: dict[tuple[str, str], list[str]] = {}
        for kind in (name for name in self._names if isinstance(name, type)):
            self._class(kind)
        for name in sorted(name for name in self._names if isinstance(name, str)):
            module, _, qualified = name.partition(":")
            owner, _, last = qualified.rpartition(".")
            spaces.setdefault((module, owner), []).append(last)
        for (module, owner), names in spaces.items():
            holder = sys.modules.get(module)
            space = vars(getattr(holder, owner, None) if owner else holder) if hasattr(holder, owner or "__dict__") else {}
            self._some(module, owner, space, names)
        self._codes: list[CodeType] = list(map(_code, self._functions))

    def _some(self, module: str, owner: str, space: Any, names: list[str]) -> None:
        """Look at functions of a module or class, and at whole classes of a module."""
        kinds = [name for name in names if isinstance(space.get(name), type)]
        for name in kinds:
            self._class(space[name])
        there = [name for name in names if name not in kinds and self._one(module, f"{owner}.{name}" if owner else name, space, name)]
        if there:
            get = itemgetter(*there)
            self._named.append((get, space, get(space)))

    def _one(self, module: str, qualified: str, space: Any, name: str) -> bool:
        """Look at one function; say whether it is there."""
        if name not in space:
            if not _trusted:
                self.unknown[f"{module}:{qualified}"] = _MISSING
            return False
        found = space[name]
        self._functions += [] if name.startswith(_SETTING_UP) else _functions(getattr(found, "fget", found))
        if not is_known(module, qualified, found):
            self.unknown[f"{module}:{qualified}"] = _reason(module, found)
        return True

    def _class(self, kind: type) -> None:
        """Look at a class as a whole: nothing recorded is missing or other, and nothing new overrides anything."""
        module, qualified, space = kind.__module__, kind.__qualname__, vars(kind)
        members = _members(module, qualified)
        if module.startswith("torch."):  # large, and not to be compared as a whole
            self._some(module, qualified, space, [name for name, must in members.items() if must])
            return
        self._spaces.append(space)
        self._copies.append(dict(space))
        for name, must in members.items():
            if must or name in space:
                self._one(module, f"{qualified}.{name}", space, name)
        for name, value in space.items():
            if name not in members and next(_functions(value), None) and any(name in vars(b) for b in kind.__mro__[1:-1]):
                alias = f"{qualified}.{getattr(value, '__name__', name)}"
                if not is_known(module, alias, value):
                    self.unknown[f"{module}:{qualified}.{name}"] = "overrides that of a base class"
