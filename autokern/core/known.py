"""Which functions of the libraries are known: their code is that of a release on which the suites passed.

`known.json` has the fingerprints of the functions, classes and constants that autokern hooks, computes in place of, or
relies on, for all recorded releases and versions of Python. A `Relied` compares what it names with the table when it is
first asked, and again when an object behind one of the names is another one.
"""

from __future__ import annotations

import functools
import sys
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any

from autokern.core import releases
from autokern.core.errors import AutokernWarning
from autokern.core.fingerprints import of_value
from autokern.core.recorded import BUILT_IN, functions, is_of, is_ours, is_recorded, original, table
from autokern.core.recovery import suppressed, uninterrupted

_MAYBE = "?"
"""Stands among the fingerprints of a function that some recorded releases do not have."""
_MISSING, _OTHER = "is missing, or elsewhere", "is not that of a tested release"
_PATCHED, _OVERRIDES = "was replaced by code from elsewhere", "overrides a base class or an attribute"
_LIBRARIES = {"botorch", "gpytorch", "linear_operator"}
_TORCH = (("torch", ""), ("torch.linalg", ""), ("torch.nn.functional", ""), ("torch", "Tensor"))
"""Where the libraries find the functions of torch that they compute with, as modules and classes."""
_OURS = frozenset(
    {
        "addcmul", "addmm", "addmv", "baddbmm", "bmm", "cholesky_ex", "cholesky_inverse", "cholesky_solve", "dot",
        "eigh", "inv_ex", "kron", "mm", "mul", "slogdet", "solve_triangular", "vecdot", "vector_norm", "xlogy",
    }
)  # fmt: skip
"""Functions of torch that autokern computes with where the libraries may use others."""
_SETTING_UP = (
    "__del", "__get", "__init__", "__iter", "__repr", "__set", "_check", "_clear", "_expand", "_get_", "_load", "_set",
    "_strict", "check", "constraint", "expand", "extra", "get_", "hyper", "initial", "load", "local_", "name", "num_",
    "pyro", "register", "sample", "set_", "sub_", "to_py", "to_random", "update", "variational",
)  # fmt: skip
"""Functions that compute nothing: that their code stays the same object is not asked again in each step."""
_left_out: dict[str, str] = {}
_judged: dict[tuple[str, str], tuple[Any, list[FunctionType], list[CodeType], bool]] = {}
"""What was found under a name, its functions, their code, and whether it is known: constants may change in place."""
_made: dict[frozenset[Any], Relied] = {}
_trusted = False


def is_known(module: str, name: str, found: Any) -> bool:
    """Whether an attribute is the one that is recorded under its qualified name, or a hook of autokern in its place."""
    return _trusted or is_recorded(module, name, original(found))


def full_name(owner: Any, name: str) -> str:
    """Return the name by which `relied` finds an attribute of a module or class."""
    return f"{owner.__module__}:{owner.__qualname__}.{name}" if isinstance(owner, type) else f"{owner.__name__}:{name}"


def admits(owner: Any, name: str, found: Any, before: Any) -> bool:
    """Whether a hook may take the place of an attribute: what was there `before`, and not the user's; else list it."""
    module, _, qualified = full_name(owner, name).partition(":")
    library = module.partition(".")[0]
    if library not in _LIBRARIES | {"torch"}:
        return found is not None
    why = _MISSING if found is None else _PATCHED
    if found is not None and (_trusted or found is before):
        why = "" if is_of(library, original(found)) or is_known(module, qualified, found) else why
    if why:
        leave_out(f"{module}:{qualified}", why)
    return not why


def leave_out(name: str, why: str) -> None:
    """Note a hook that stays out."""
    _left_out[name] = why


def trust(everything: bool) -> None:
    """Take everything that is there for known, or not."""
    global _trusted
    _left_out.clear()
    _judged.clear()
    for one in _made.values() if everything is not _trusted else ():
        one.forget()
    _trusted = everything


def unknown(every: bool = True) -> dict[str, str]:
    """Return what is unknown by its name, and why: of hooks that stay out, and of all that `every` one relies on."""
    found = _left_out.copy()
    for one in list(_made.values()) if every else ():
        if not one.holds():
            found |= one.unknown
    return found


def warn(found: dict[str, str]) -> None:
    """Warn once of what is unknown although nobody replaced it: another release, or other sources."""
    if any(why != _PATCHED for why in found.values()):
        releases.warn(found)


@functools.cache
def _members(module: str, kind: str) -> dict[str, bool]:
    """Return the names of the attributes that are recorded of a class, and whether each must be there."""
    space, start = table()["code"].get(module, {}), f"{kind}."
    names = {name[len(start) :]: _MAYBE not in marks for name, marks in space.items() if name.startswith(start)}
    return {name: must for name, must in names.items() if "." not in name}


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """Return the names that a code object, or one within it, looks up."""
    return frozenset(code.co_names).union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))


@functools.cache
def _of_modules() -> frozenset[str]:
    """Return the names of all functions and constants that are recorded of a library's modules, and of no class."""
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
    *names : str, type or tuple
        ``module:function``, ``module:Class.method``, ``module:Class`` for all that is recorded of a class, a class
        itself with all its bases that are recorded, or a name with the function that had it.
    """
    kinds = [name for name in names if isinstance(name, type)]
    bases = [base for kind in kinds for base in kind.__mro__ if _members(base.__module__, base.__qualname__)]
    key = frozenset((*bases, *(name for name in names if not isinstance(name, type))))
    return _made.get(key) or _made.setdefault(key, Relied(key))


class Relied:
    """What something computes in place of, or relies on; `relied` makes it.

    Attributes
    ----------
    unknown : dict
        What of it was not known when it was last looked at, and why.
    """

    def __init__(self, names: frozenset[Any]) -> None:
        self._names = names
        self.unknown: dict[str, str] = {}
        self.forget()

    def forget(self) -> None:
        """Look again when next asked."""
        self._asked: list[tuple[Any, Any]] = []
        self._answers: list[Any] | None = None

    def holds(self) -> bool:
        """Whether all of it is known, as it is now."""
        try:
            same = [ask(of) for ask, of in self._asked] == self._answers
        except uninterrupted(Exception):  # a name that is gone, or objects that do not compare
            same = False
        if not same:
            look = _Look(self._names)
            self._asked, self._answers, self.unknown = look.asked, [ask(of) for ask, of in look.asked], look.unknown
            with suppressed(AutokernWarning):  # where warnings are errors, the call goes on
                warn(self.unknown)
        return not self.unknown


class _Look:
    """One look at functions, classes and constants of the libraries."""

    def __init__(self, names: frozenset[Any]) -> None:
        self.unknown: dict[str, str] = {}  # as that of a `Relied`
        self.asked: list[tuple[Any, Any]] = []  # functions of an argument, the same until something is replaced
        self._functions: dict[FunctionType, None] = {}
        self._classes: dict[type, None] = {}
        self._new: dict[str, str] = {}  # names in classes that may stand before attributes of instances
        self._parts: dict[tuple[str, str], tuple[Any, dict[str, None]]] = {}
        for kind in (name for name in names if isinstance(name, type)):
            self._whole(kind)
        for name, found in (name for name in names if isinstance(name, tuple)):
            module, _, qualified = name.partition(":")
            self._itself(module, qualified, found)
        for name in sorted(name for name in names if isinstance(name, str)):
            module, _, qualified = name.partition(":")
            owner, _, last = qualified.rpartition(".")
            self._named(module, owner, last)
        for kind in self._classes:
            self._added(kind)
        self._used()
        for space, there in self._parts.values():
            self.asked.append((itemgetter(*there), space))
        self.asked += [(_codes, list(self._functions)), (_sizes, list(map(vars, self._classes)))]

    def _named(self, module: str, owner: str, name: str) -> None:
        """Look at one function or constant of a module or class, or at a whole class of a module."""
        holder = sys.modules.get(module)
        holder = getattr(holder, owner, None) if owner else holder
        if holder is None:
            self.asked.append((sys.modules.get, module))
        space = {} if holder is None else vars(holder)
        if isinstance(holder, type) and module in table()["code"] and not module.startswith("torch."):
            self._classes[holder] = None
        if isinstance(space.get(name), type):
            self._whole(space[name])
        elif self._one(module, f"{owner}.{name}" if owner else name, space, name):
            self._parts.setdefault((module, owner), (space, {}))[1][name] = None

    def _one(self, module: str, qualified: str, space: Any, name: str) -> bool:
        """Look at one attribute; say whether it is there."""
        if name in space:
            self._itself(module, qualified, space[name])
            return True
        if not _trusted:
            self.unknown[f"{module}:{qualified}"] = _MISSING
        self.asked.append((space.get, name))
        return False

    def _itself(self, module: str, qualified: str, found: Any) -> None:
        before, parts, codes, recorded = _judged.get((module, qualified), (None, [], [], False))
        if before is not found or not (parts or isinstance(found, BUILT_IN)) or _codes(parts) != codes:
            parts = [one for one in functions(getattr(found, "fget", found)) if not is_ours(one)]
            recorded = is_known(module, qualified, found)
            _judged[module, qualified] = found, parts, _codes(parts), recorded
        if not qualified.rpartition(".")[2].startswith(_SETTING_UP):
            self._functions.update(dict.fromkeys(parts))
        if not recorded:
            other = is_of(module.partition(".")[0], original(found))
            self.unknown[f"{module}:{qualified}"] = _OTHER if other else _PATCHED

    def _whole(self, kind: type) -> None:
        """Look at a class as a whole: nothing recorded is missing or other, and nothing new overrides anything."""
        module, qualified, space = kind.__module__, kind.__qualname__, vars(kind)
        members = _members(module, qualified)
        if module.startswith("torch."):  # large, and not to be compared as a whole
            for name in (name for name, must in members.items() if must):
                self._named(module, qualified, name)
            return
        self.asked.append((tuple, space.values()))
        for name, must in members.items():
            if must or name in space:
                self._one(module, f"{qualified}.{name}", space, name)
        self._classes[kind] = None

    def _added(self, kind: type) -> None:
        """Look for other bases of a class, and for new attributes that override one of a base or of an instance."""
        module, qualified, space = kind.__module__, kind.__qualname__, vars(kind)
        if qualified in table()["code"].get(module, ()) and not is_known(module, qualified, kind):
            self.unknown[f"{module}:{qualified}"] = _OTHER
        for name in space.keys() - _members(module, qualified).keys():
            value, full = space[name], f"{module}:{qualified}.{name}"
            constant = name[:2] != "__" and not isinstance(value, type) and of_value(value)
            defined = getattr(value, "__name__", name)
            if not (constant or any(functions(value))) or is_known(module, f"{qualified}.{defined}", value):
                continue
            if name == "__getattribute__" or any(name in _overridable(base) for base in kind.__mro__[1:-1]):
                self.unknown[full] = _OVERRIDES
            elif name[:2] != "__":
                self._new[name] = full

    def _used(self) -> None:
        """Look at what the functions find by name in modules, where somebody may have put something else."""
        torch = sys.modules["torch"]
        tensor = torch.Tensor
        self.asked.append((len, vars(tensor)))
        by_module: dict[str, set[str]] = {}
        for function in self._functions:
            by_module.setdefault(function.__globals__.get("__name__", ""), set()).update(_names(function.__code__))
        every = set[str]().union(*by_module.values())
        self.unknown.update((self._new[name], _OVERRIDES) for name in self._new.keys() & every)
        if any(isinstance(vars(torch).get(name), BUILT_IN) for name in every):  # it computes
            every |= _OURS
        used = dict.fromkeys(_TORCH, every)
        used["torch", "Tensor"] = every.union(_names_in(tensor.__base__))  # inherited, if not replaced
        for module, found in by_module.items():
            if module.partition(".")[0] in _LIBRARIES:
                used[module, ""] = found & _of_modules()
        for (module, owner), names in used.items():
            holder = sys.modules[module]
            space = vars(getattr(holder, owner) if owner else holder)
            for name in sorted(names & space.keys()):
                skipped = name[0] == "_" or not callable(space[name]) if (module, owner) in _TORCH else False
                if not (skipped or isinstance(space[name], (type, ModuleType))):
                    self._named(module, owner, name)


def _codes(several: list[FunctionType]) -> list[CodeType]:
    """Return the code objects of functions."""
    return list(map(_code, several))


def _sizes(several: list[Any]) -> list[int]:
    """Return how many attributes classes have."""
    return list(map(len, several))


_code = attrgetter("__code__")
_names_in = functools.cache(dir)
"""The names in a class of C code, which stay the same and take a tenth of a millisecond to list."""
