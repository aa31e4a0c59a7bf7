"""The functions that a computation has run, to notice later that somebody has replaced one of them, and warnings."""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch

from autokern.core.releases.recorded import functions
from autokern.core.versions import is_of_libraries

_OTHERS = frozenset(("abc", "builtins", "collections", "contextlib", "enum", "functools", "numpy", "torch", "types",
                     "typing", "weakref"))  # fmt: skip
"""Packages whose classes are not looked at."""
_TORCH = torch, torch.linalg, torch.nn.functional
_Place = tuple[Any, str]
_code = operator.attrgetter("__code__", "__defaults__")
_places: dict[CodeType, list[_Place]] = {}
"""Where the libraries keep a function: classes, or namespaces of modules, and names."""


class Ran:
    """Notes the functions that this thread runs while it is entered, those of the libraries and of given classes.

    Of torch, all functions that may have been called count.
    """

    def __init__(self) -> None:
        self.seen = True
        """Whether it can note anything: Python has one tracer only."""
        self._codes: set[CodeType] = set()
        self._called: dict[int, set[str]] = {}
        """The names that functions look up, by the address of their globals."""
        self._kept: list[tuple[Mapping[str, Any], Any]] = []
        self._classes: list[Mapping[str, Any]] = []
        self._functions: list[FunctionType] = []
        self._values: list[Any] = []
        self._state: list[Any] = []

    def __enter__(self) -> Ran:
        self.seen = sys.gettrace() is None
        if self.seen:
            sys.settrace(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self.seen:
            sys.settrace(None)

    @property
    def has_warned(self) -> bool:
        """Whether a warning was shown, which a replay would not repeat."""
        shows: Any = warnings
        return shows._showwarnmsg.__code__ in self._codes

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        """Note a function when it is called; its lines are not traced."""
        if frame.f_code not in self._codes:
            self._codes.add(frame.f_code)
            self._called.setdefault(id(frame.f_globals), set()).update(frame.f_code.co_names)

    def keep(self, kinds: Iterable[type]) -> None:
        """Take the functions as they are now for unchanged, and those of some classes."""
        if not _places.keys() >= {code for code in self._codes if not code.co_name.startswith("<")}:
            _places.update({code: [] for code in self._codes})
            _find(_of_libraries())
        own = {base for kind in kinds for base in kind.__mro__ if base.__module__.partition(".")[0] not in _OTHERS}
        names = {code.co_name for code in self._codes}
        found = [place for code in self._codes for place in _places.get(code, ())]
        for kind in own:  # of a library's class, only what has run, or may hide it
            found += [(kind, name) for name in vars(kind) if name in names or not is_of_libraries(kind.__module__)]
        called = set[str]().union(*self._called.values())
        found += [(vars(one), name) for one in _TORCH for name in called.intersection(vars(one))]
        several: dict[int, tuple[Any, dict[str, None]]] = {}
        for owner, name in found:
            if isinstance(owner, type) or self._is_used(owner, name):
                several.setdefault(id(owner), (owner, {}))[1][name] = None
        owners = [(vars(owner) if isinstance(owner, type) else owner, of) for owner, of in several.values()]
        self._kept = [(space, operator.itemgetter(*of, *list(of)[:1])) for space, of in owners]
        self._classes = [vars(owner) for owner, _ in several.values() if isinstance(owner, type)]
        self._classes.append(vars(torch.Tensor))
        self._values = self._present()
        ran = (one for value in self._values for one in functions(value) if one.__code__ in self._codes)
        self._functions = list({id(one): one for one in ran}.values())
        self._state = self._now()

    def _is_used(self, space: Mapping[str, Any], name: str) -> bool:
        """Whether a module's functions look up a name of it, or other modules do where it is defined."""
        if name in self._called.get(id(space), ()) or any(space is vars(one) for one in _TORCH):
            return True
        return any(one.__globals__ is space for one in functions(space.get(name)))

    def _present(self) -> list[Any]:
        return [value for space, of in self._kept for value in of(space)]

    def _now(self) -> list[Any]:
        return [*map(len, self._classes), *map(_code, self._functions)]

    def is_as_before(self) -> bool:
        """Whether the functions are where they were, with the same code."""
        try:
            return all(map(operator.is_, self._present(), self._values)) and self._now() == self._state
        except KeyError:
            return False


def _of_libraries() -> Iterator[Any]:
    """Yield the classes of the libraries, and the namespaces of their modules."""
    classes = dict[int, type]()
    for name, module in list(sys.modules.items()):
        if is_of_libraries(name) and module is not None:
            yield vars(module)
            own = list(vars(module).values())
            classes |= {id(one): one for one in own if isinstance(one, type) and is_of_libraries(one.__module__)}
    yield from classes.values()


def _find(owners: Iterable[Any]) -> None:
    """Note where the functions are that have been run."""
    names = {code.co_name for code in _places}
    for owner in owners:
        space = vars(owner) if isinstance(owner, type) else owner
        for name in names.intersection(space):
            for one in functions(space[name]):
                places = _places.get(one.__code__) if one.__code__.co_name == name else None
                if places is not None and not any(owner is there for there, _ in places):
                    places.append((owner, name))
