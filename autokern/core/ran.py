"""The functions that a computation has run, to notice later that somebody has replaced one of them."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch

from autokern.core.recorded import functions

__all__ = ["Ran"]

_LIBRARIES = ("botorch", "gpytorch", "linear_operator")
_Place = tuple[Mapping[str, Any], str]
_code = operator.attrgetter("__code__", "__defaults__")
_places: dict[CodeType, list[_Place]] = {}
"""Where the libraries keep a function: namespaces of modules and classes, and names."""


class Ran:
    """Notes the functions that this thread runs while it is entered, those of the libraries and of given classes.

    Of torch, all functions that may have been called count.
    """

    def __init__(self) -> None:
        self.seen = True
        """Whether it can note anything: Python has one tracer only."""
        self._codes: set[CodeType] = set()
        self._modules: dict[int, Mapping[str, Any]] = {}
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

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        """Note a function when it is called; its lines are not traced."""
        if frame.f_code not in self._codes:
            self._codes.add(frame.f_code)
            self._modules[id(frame.f_globals)] = frame.f_globals

    def keep(self, kinds: Iterable[type]) -> None:
        """Take the functions as they are now for unchanged, and those of some classes."""
        if not _places.keys() >= {code for code in self._codes if not code.co_name.startswith("<")}:
            _places.update({code: [] for code in self._codes})
            _find(_of_libraries())
        own = {base for kind in kinds for base in kind.__mro__ if base.__module__ != "builtins"}
        names = {code.co_name for code in self._codes}
        found = [place for code in self._codes for place in _places.get(code, ())]
        for kind in own:  # of a library's class, only what has run, or may hide it
            found += [(vars(kind), name) for name in vars(kind) if name in names or not _is_library(kind.__module__)]
        called = {name for code in self._codes for name in code.co_names}
        torchs = [vars(one) for one in (torch, torch.linalg, torch.nn.functional)]
        found += [(space, name) for space in torchs for name in called.intersection(space)]
        self._modules |= {id(space): space for space in torchs}
        classes = {id(space): space for space, _ in found if not isinstance(space, dict)}
        classes[id(torch.Tensor)] = vars(torch.Tensor)
        classes |= {id(kind): vars(kind) for kind in own}
        several: dict[int, tuple[Mapping[str, Any], dict[str, None]]] = {}
        for space, name in found:
            if not isinstance(space, dict) or id(space) in self._modules:
                several.setdefault(id(space), (space, {}))[1][name] = None
        self._kept = [(space, operator.itemgetter(*of, *list(of)[:1])) for space, of in several.values()]
        self._classes = list(classes.values())
        self._values = self._present()
        ran = (one for value in self._values for one in functions(value) if one.__code__ in self._codes)
        self._functions = list({id(one): one for one in ran}.values())
        self._state = self._now()

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


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _of_libraries() -> Iterator[Mapping[str, Any]]:
    """Yield the namespaces of the libraries' modules and classes."""
    classes = dict[int, type]()
    for name, module in list(sys.modules.items()):
        if _is_library(name) and module is not None:
            yield vars(module)
            own = list(vars(module).values())
            classes |= {id(one): one for one in own if isinstance(one, type) and _is_library(one.__module__)}
    yield from map(vars, classes.values())


def _find(spaces: Iterable[Mapping[str, Any]]) -> None:
    """Note where the functions are that have been run."""
    names = {code.co_name for code in _places}
    for space in spaces:
        for name in names.intersection(space):
            for one in functions(space[name]):
                places = _places.get(one.__code__) if one.__code__.co_name == name else None
                if places is not None and not any(space is there for there, _ in places):
                    places.append((space, name))
