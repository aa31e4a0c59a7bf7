"""Which functions of the libraries are known: their code is that of a release on which the suites passed.

`known.json` has the fingerprints of the functions that autokern hooks, computes in place of, or relies on, for all
recorded releases and versions of Python. A `Relied` compares what it names with the table when it is first asked, and
again when an object behind one of the names is another one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from operator import attrgetter, eq, itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from autokern.core.recorded import functions, matches, original, root_of, table
from autokern.core.recovery import uninterrupted

__all__ = ["Relied", "admits", "is_known", "leave_out", "relied", "trust", "unknown", "untested"]

_MAYBE = "?"
"""Stands among the fingerprints of a function that some recorded releases do not have."""
_MISSING, _OTHER = "is missing, or elsewhere", "is not the code of a tested release"
_PATCHED, _RELIES = "was replaced by code from elsewhere", "relies on "
_left_out: dict[str, str] = {}
_trusted = False
_LIBRARIES = {"botorch", "gpytorch", "linear_operator"}
_SETTING_UP = (
    "__del", "__get", "__init__", "__set", "_check", "_clear", "_expand", "_get_", "_load", "_set", "_strict",
    "constraint", "expand", "get_", "hyper", "initialize", "load", "local_", "named_", "pyro", "register", "sample",
    "set_", "sub_", "to_py", "to_random", "update", "variational",
)  # fmt: skip
"""Functions that compute nothing: that their code stays the same object is not asked again in each step."""
_code = attrgetter("__code__")
_checked: dict[tuple[Any, ...], bool] = {}
_made: dict[frozenset[Any], Relied] = {}


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
    layers = [found] if type(found) is FunctionType and not found.__dict__ else functions(found)
    each = [(f.__code__, repr(f.__defaults__) if f.__defaults__ else "", repr(f.__kwdefaults__)) for f in layers]
    key = module, name, type(found), *each
    if key not in _checked:
        _checked[key] = matches(found, frozenset(marks.split()), root_of(module))
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
        why = _RELIES + ", ".join(more.unknown)
    if why:
        leave_out(full, why)
    return not why


def _reason(module: str, found: Any) -> str:
    """Return what is wrong with an unknown attribute: the library has other code, or somebody replaced it."""
    root, layers = root_of(module), list(functions(original(found)))
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


@functools.cache
def _members(module: str, kind: str) -> dict[str, bool]:
    """Return the names of the functions that are recorded of a class, and whether each must be there."""
    space, start = table()["code"].get(module, {}), f"{kind}."
    names = {name[len(start) :]: _MAYBE not in marks for name, marks in space.items() if name.startswith(start)}
    return {name: must for name, must in names.items() if "." not in name}


@functools.cache
def _by_value(code: CodeType) -> frozenset[str]:
    """Return the names in a code object that are those of functions of a library's modules."""
    return _of_modules().intersection(code.co_names)


@functools.cache
def _of_modules() -> frozenset[str]:
    """Return the names of all functions that are recorded of a library's modules, and of no class."""
    spaces = (space for module, space in table()["code"].items() if module.partition(".")[0] in _LIBRARIES)
    return frozenset(name for space in spaces for name in space if "." not in name)


def _overridable(base: type) -> Any:
    """Return what may be called by its name: all of a class, or what is recorded of one that is recorded as a whole."""
    module = base.__module__
    return (not module.startswith("torch.") and _members(module, base.__qualname__)) or vars(base)


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
    found = _left_out.copy()
    for one in list(_made.values()):
        if one.unknown and not one.holds():
            found |= one.unknown
    return found


def untested() -> list[str]:
    """Return what is unknown although nobody replaced it: another release, or other sources."""
    return [name for name, why in unknown().items() if why != _PATCHED and not why.startswith(_RELIES)]


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
            if self._gone and any(name in space for space, name in self._gone):
                return False
            for names, space, found in self._named:
                if names(space) != found:
                    return False
        except uninterrupted(Exception):  # a name that is gone, or objects that do not compare
            return False
        return True

    def _look(self) -> None:
        self.unknown, self._looked = {}, True
        self._functions: list[FunctionType] = []
        self._spaces: list[Any] = []
        self._gone: list[tuple[Any, str]] = []
        self._copies: list[dict[str, Any]] = []
        self._named: list[tuple[Callable[[Any], Any], Any, Any]] = []
        self._there: dict[tuple[str, str], tuple[Any, list[str]]] = {}
        spaces: dict[tuple[str, str], list[str]] = {}
        for kind in (name for name in self._names if isinstance(name, type)):
            self._class(kind)
        for name in sorted(name for name in self._names if isinstance(name, str)):
            module, _, qualified = name.partition(":")
            owner, _, last = qualified.rpartition(".")
            spaces.setdefault((module, owner), []).append(last)
        for (module, owner), names in spaces.items():
            holder = sys.modules.get(module)
            space = (
                vars(getattr(holder, owner, None) if owner else holder) if hasattr(holder, owner or "__dict__") else {}
            )
            self._some(module, owner, space, names)
        self._held()
        self._functions = list(dict.fromkeys(self._functions))
        self._codes: list[CodeType] = list(map(_code, self._functions))
        for space, there in self._there.values():
            if there and space not in self._spaces:  # those are compared as a whole
                get = itemgetter(*dict.fromkeys(there))
                self._named.append((get, space, get(space)))

    def _held(self) -> None:
        """Look at what the functions find by value in their modules, where somebody may have put something else."""
        names: dict[str, set[str]] = {}
        spaces = {}
        for function in self._functions:
            space = function.__globals__
            module = space.get("__name__", "")
            if module.partition(".")[0] in _LIBRARIES:
                spaces[module] = space
                names.setdefault(module, set()).update(_by_value(function.__code__) & space.keys())
        for module, used in sorted(names.items()):
            space, there = self._there.setdefault((module, ""), (spaces[module], []))
            held = (name for name in used if not isinstance(space[name], (type, ModuleType)))
            there += [name for name in sorted(held) if name not in there and self._one(module, name, space, name)]

    def _some(self, module: str, owner: str, space: Any, names: list[str]) -> None:
        """Look at functions of a module or class, and at whole classes of a module."""
        kinds = [name for name in names if isinstance(space.get(name), type)]
        for name in kinds:
            self._class(space[name])
        _, there = self._there.setdefault((module, owner), (space, []))
        there += [
            name
            for name in names
            if name not in kinds and self._one(module, f"{owner}.{name}" if owner else name, space, name)
        ]

    def _one(self, module: str, qualified: str, space: Any, name: str) -> bool:
        """Look at one function; say whether it is there."""
        if name not in space:
            if not _trusted:
                self.unknown[f"{module}:{qualified}"] = _MISSING
                self._gone.append((space, name))
            return False
        found = space[name]
        self._functions += [] if name.startswith(_SETTING_UP) else functions(getattr(found, "fget", found))
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
            if (
                name not in members
                and next(functions(value), None)
                and any(name in _overridable(base) for base in kind.__mro__[1:-1])
            ):
                alias = f"{qualified}.{getattr(value, '__name__', name)}"
                if not is_known(module, alias, value):
                    self.unknown[f"{module}:{qualified}.{name}"] = "overrides that of a base class"
