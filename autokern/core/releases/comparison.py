"""Compare library code with the recorded releases: which parts are unknown, and which probes reveal a later change."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from autokern.core.releases import is_of_libraries
from autokern.core.releases.recorded import BUILT_IN, functions, is_of, is_ours, is_recorded, of_value, original, table

MAYBE = "?"  # mark among the fingerprints of a function that some recorded releases lack
MISSING, PATCHED = "is missing, or was moved", "was replaced by code from elsewhere"
_OTHER, _OVERRIDES = "is not that of a tested release", "overrides a base class or an attribute"
_TORCH = (("torch", ""), ("torch.linalg", ""), ("torch.nn.functional", ""), ("torch", "Tensor"))
"""Modules and classes in which the libraries look up torch's functions."""
_OURS = frozenset((
    "addcmul", "addmm", "addmv", "baddbmm", "bmm", "cholesky_ex", "cholesky_inverse", "cholesky_solve", "dot", "eigh",
    "inv_ex", "kron", "mm", "mul", "slogdet", "solve_triangular", "vecdot", "vector_norm", "xlogy",
))  # fmt: skip
"""Functions of torch that autokern calls where the libraries may call others."""
_SETTING_UP = (
    "__del", "__get", "__init__", "__iter", "__repr", "__set", "_check", "_clear", "_expand", "_get_", "_load", "_set",
    "_strict", "check", "constraint", "expand", "extra", "get_", "hyper", "initial", "load", "local_", "name", "num_",
    "pyro", "register", "sample", "set_", "sub_", "to_py", "to_random", "update", "variational",
)  # fmt: skip
"""Prefixes of functions that compute nothing; their code is not probed again at each step."""
_FIXED = (*BUILT_IN, bool, float, int, str, type(None))  # types of attributes that do not change in place
trusted = False  # whether all code counts as known, recorded or not


class _Judged(NamedTuple):
    """Verdict on a name: the object, its functions and their code, the functions to probe again, why it is unknown."""

    found: Any
    parts: list[FunctionType]
    codes: list[CodeType]
    asked: dict[FunctionType, None]
    why: str


_judged: dict[tuple[str, str], _Judged] = {}


def begin(trust: bool) -> None:
    """Forget all verdicts; if `trust`, all code counts as known from now on."""
    global trusted
    trusted = trust
    _judged.clear()


def is_known(module: str, name: str, found: Any) -> bool:
    """Whether an attribute, or the original behind a hook of autokern, is recorded under its qualified name."""
    return trusted or is_recorded(module, name, original(found))


@functools.cache
def members(module: str, kind: str) -> dict[str, bool]:
    """Return the names of a class's recorded attributes, and whether every release has them."""
    pairs = ((name.rpartition("."), marks) for name, marks in table()["code"].get(module, {}).items())
    return {name: MAYBE not in marks for (owner, _, name), marks in pairs if owner == kind}


@functools.lru_cache(4096)
def names_in(code: CodeType) -> frozenset[str]:
    """Return the names that a code object, or one nested in it, looks up."""
    return frozenset(code.co_names).union(*(names_in(one) for one in code.co_consts if isinstance(one, CodeType)))


@functools.cache
def _of_modules() -> frozenset[str]:
    """Return the names of all recorded functions and constants at module level of the libraries."""
    spaces = (space for module, space in table()["code"].items() if is_of_libraries(module))
    return frozenset(name for space in spaces for name in space if "." not in name)


class Look:
    """One comparison of functions, classes and constants of the libraries with the records."""

    def __init__(self, names: Iterable[Any]) -> None:
        self.unknown: dict[str, str] = {}  # reasons by name
        self.asked: list[tuple[Any, Any]] = []  # probes: functions, each with an argument, whose result reveals changes
        self._functions: dict[FunctionType, None] = {}
        self._classes: dict[type, None] = {}
        self._new: dict[str, str] = {}  # added class attributes, which may shadow attributes of instances
        self._parts: dict[tuple[str, str], tuple[Any, dict[str, None]]] = {}
        several: dict[tuple[str, str], list[str]] = {}
        for name in sorted(names, key=str):
            if isinstance(name, type):
                self._whole(name)
            elif isinstance(name, tuple):
                self._itself(name[0].partition(":")[0], name[0].partition(":")[2], name[1])
            else:
                module, _, qualified = name.partition(":")
                owner, _, last = qualified.rpartition(".")
                several.setdefault((module, owner), []).append(last)
        for (module, owner), found in several.items():
            self._named(module, owner, found)
        for kind in self._classes:
            self._brought(kind)
        self._used()
        for space, there in self._parts.values():
            self.asked.append((itemgetter(*there), space))
        sizes: Any = lambda several: list(map(len, several))  # noqa: E731
        self.asked += [(_codes, list(self._functions)), (sizes, list(map(vars, self._classes)))]

    def _named(self, module: str, owner: str, names: list[str]) -> None:
        """Compare functions and constants of a module or class, or whole classes of a module."""
        holder = sys.modules.get(module)
        holder = getattr(holder, owner, None) if owner else holder
        if holder is None:
            self.asked.append((sys.modules.get, module))
        space = {} if holder is None else vars(holder)
        if isinstance(holder, type) and module in table()["code"] and not module.startswith("torch."):
            self._classes[holder] = None
        prefix = f"{owner}." if owner else ""
        there = self._parts.setdefault((module, owner), (space, {}))[1]
        for name in names:
            if isinstance(space.get(name), type):
                self._whole(space[name])
            elif self._one(module, prefix + name, space, name):
                there[name] = None
        if not there:
            del self._parts[module, owner]

    def _one(self, module: str, qualified: str, space: Any, name: str) -> bool:
        """Compare one attribute; return whether it exists."""
        if name in space:
            self._itself(module, qualified, space[name])
        else:
            if not trusted:
                self.unknown[f"{module}:{qualified}"] = MISSING
            self.asked.append((space.get, name))
        return name in space

    def _itself(self, module: str, qualified: str, found: Any) -> None:
        judged = _judged.get((module, qualified))
        if judged is None or judged.found is not found or _codes(judged.parts) != judged.codes:
            parts = [one for one in functions(getattr(found, "fget", found)) if not is_ours(one)]
            asked = {} if qualified.rpartition(".")[2].startswith(_SETTING_UP) else dict.fromkeys(parts)
            ours = module.partition(".")[0]
            why = "" if is_known(module, qualified, found) else _OTHER if is_of(ours, original(found)) else PATCHED
            judged = _Judged(found, parts, _codes(parts), asked, why)
            if parts or isinstance(found, _FIXED):
                _judged[module, qualified] = judged
        self._functions.update(judged.asked)
        if judged.why:
            self.unknown[f"{module}:{qualified}"] = judged.why

    def _whole(self, kind: type) -> None:
        """Compare all recorded attributes of a class, and let `_brought` examine the others."""
        module, qualified, space = kind.__module__, kind.__qualname__, vars(kind)
        recorded, theirs = members(module, qualified), module.startswith("torch.")
        if theirs:  # too large to compare as a whole
            self._named(module, qualified, [name for name, must in recorded.items() if must])
            return
        self.asked.append((tuple, space.values()))
        for name in (name for name, must in recorded.items() if must or name in space):
            self._one(module, f"{qualified}.{name}", space, name)
        self._classes[kind] = None

    def _brought(self, kind: type) -> None:
        """Find changed bases of a class, and added attributes that override one of a base or of an instance."""
        module, qualified, space = kind.__module__, kind.__qualname__, vars(kind)
        if qualified in table()["code"].get(module, ()) and not is_known(module, qualified, kind):
            self.unknown[f"{module}:{qualified}"] = _OTHER
        named = ((base.__module__, base) for base in kind.__mro__[1:-1])
        fixed: Any = [  # names that a subclass must not override: the recorded ones, or all of an unrecorded base
            (not home.startswith("torch.") and members(home, base.__qualname__)) or vars(base) for home, base in named
        ]
        for name in space.keys() - members(module, qualified).keys():
            value, full = space[name], f"{module}:{qualified}.{name}"
            constant = name[:2] != "__" and not isinstance(value, type) and of_value(value)
            defined = getattr(value, "__name__", name)
            if not (constant or any(functions(value))) or is_known(module, f"{qualified}.{defined}", value):
                continue
            if name == "__getattribute__" or any(name in of for of in fixed):
                self.unknown[full] = _OVERRIDES
            elif name[:2] != "__":
                self._new[name] = full

    def _used(self) -> None:
        """Compare the globals and the functions of torch that the functions look up, which others may have replaced."""
        torch = sys.modules["torch"]
        tensor = torch.Tensor
        self.asked.append((len, vars(tensor)))
        by_module: dict[str, set[str]] = {}
        for function in self._functions:
            by_module.setdefault(function.__globals__.get("__name__", ""), set()).update(names_in(function.__code__))
        every = set[str]().union(*by_module.values())
        self.unknown.update((self._new[name], _OVERRIDES) for name in self._new.keys() & every)
        if any(isinstance(vars(torch).get(name), BUILT_IN) for name in every):  # the functions call torch
            every |= _OURS
        used = dict.fromkeys(_TORCH, every)
        used["torch", "Tensor"] = every.union(_names_of(tensor.__base__))  # a replacement shadows a method of the base
        for module, found in by_module.items():
            if is_of_libraries(module):
                used[module, ""] = found & _of_modules()
        for (module, owner), names in used.items():
            holder, torchs = sys.modules[module], (module, owner) in _TORCH
            space = vars(getattr(holder, owner) if owner else holder)
            there = [name for name in sorted(names & space.keys()) if not isinstance(space[name], (type, ModuleType))]
            self._named(module, owner, [n for n in there if not torchs or (n[0] != "_" and callable(space[n]))])


def _codes(several: list[FunctionType]) -> list[CodeType]:
    return list(map(_code, several))


_code = attrgetter("__code__")
_names_of = functools.cache(dir)  # `dir` of a C class, which never changes and takes a tenth of a millisecond
