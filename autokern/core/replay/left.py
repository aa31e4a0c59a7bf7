"""Tensors and caches that an evaluation leaves in modules, recreated with the numbers of each replay.

New objects replace the former ones, which the program may hold. Entries that it has added to a cache are lost.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch

from autokern.core.errors import caught
from autokern.core.replay import Held
from autokern.core.replay.effects import STANDARD, is_library
from autokern.core.replay.operations import memory_of
from autokern.core.replay.recording import Recorder

_OURS = "_autokern"


class Left:
    """The attributes of modules that each evaluation sets anew."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        own = map(vars, modules)
        self._spaces = [space for one in own for space in (one, one["_buffers"], one.get("_added_loss_terms", {}))]
        self._first = self._all()
        self.at: list[tuple[dict[str, Any], str]] = []  # with the dictionaries of attributes
        self._known = frozenset[int]()
        self._made: list[bool] = []

    def _all(self) -> dict[tuple[int, str], Any]:
        every = ((own, name, one) for own in self._spaces for name, one in own.items() if not name.startswith(_OURS))
        ours = ((*at, one) for *at, one in every if not isinstance(one, torch.nn.Module))
        return {(id(own), n): one for own, n, one in ours if isinstance(one, dict) or is_library(type(one).__module__)}

    def find(self) -> None:
        """Find the attributes that evaluations have set since this object was made; only the first call does."""
        first, self._first = self._first, {}
        if first:
            names = {at[1] for at, one in self._all().items() if first.get(at) is not one}
            self.at = [(own, name) for own in self._spaces for name in names & own.keys()]

    def present(self) -> list[Any]:
        """Return the present values of the attributes."""
        return [own.get(name) for own, name in self.at]

    @contextlib.contextmanager
    def aside(self) -> Iterator[list[Any]]:
        """Empty the caches within the block, and restore the attributes after it; yields their values."""
        before, at = self.present(), self.at
        self._put([{} if isinstance(one, dict) else one for one in before], at)
        try:
            yield before
        finally:
            self._put(before, at)  # `computed` may have forgotten the attributes

    def _put(self, values: Iterable[Any], at: Iterable[tuple[dict[str, Any], str]]) -> None:
        for (own, name), value in zip(at, values, strict=True):
            own[name] = value

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors in the present values that a replay computes; none if the values cannot be read."""
        try:
            found = _Form(self.present(), self._known).tensors
        except caught(Exception):
            return []
        return [t for t, made in zip(found, self._made, strict=False) if made]

    def computed(self, recorder: Recorder, before: list[Any], held: Held) -> list[torch.Tensor]:
        """Return copies of the tensors that a recorded evaluation computed and left; `before` are the former values."""
        self._known = frozenset(map(id, (*held.tensors, *held.objects)))
        try:
            with torch._C.DisableTorchFunction():
                known = {memory_of(t) for t in held.tensors if t.layout is torch.strided}
                old, self._form = _Form(before, self._known), _Form(self.present(), self._known)
                self._made = [recorder.has_made(t) for t in self._form.tensors]
                others = [t for t, made in zip(self._form.tensors, self._made, strict=True) if not made]
                recorder.copies.stay(set(map(memory_of, others)))
                if any(memory_of(t) not in known for t in (*others, *filter(recorder.has_read, old.tensors))):
                    recorder.fail("an evaluation reads or keeps tensors that an earlier one has left")
        except caught(Exception) as reason:  # the evaluation itself is valid
            recorder.fail(f"an evaluation leaves objects that cannot be recreated: {reason}")
            self.at, self._form, self._made = [], _Form([], self._known), []
        return [t.detach().clone() for t in self.tensors()]

    def has_grown(self) -> bool:
        """Whether the attributes hold more tensors than when they were `computed`."""
        return len(_Form(self.present(), self._known).tensors) > len(self._made)

    def put(self, tensors: Iterable[torch.Tensor], of: Callable[[Any], Any] = lambda module: module) -> None:
        """Set the attributes anew, with these tensors in place of the computed ones, and `of` applied to modules."""
        self._put(self._form.again(self._made, iter(tensors), of), self.at)

    def alike(self, numbers: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield tensors with these numbers and the graph of the recorded ones, which a backward pass has freed."""
        made = (t for t, made in zip(self._form.tensors, self._made, strict=True) if made)
        for tensor, values in zip(made, numbers, strict=True):
            with torch.set_grad_enabled(tensor.requires_grad):
                new = tensor.view_as(tensor)
            new.data = values.clone()
            yield new


class _Form(pickle.Pickler):
    """Objects as bytes, except tensors and `known` objects, which are kept by reference."""

    def __init__(self, of: list[Any], known: frozenset[int]) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL)
        self._known, self._apart, self._places = known, list[Any](), dict[int, int]()
        self.dump(of)

    def persistent_id(self, one: Any) -> int | None:
        """Return the place of an object that is kept by reference, None for other objects."""
        if not (isinstance(one, torch.Tensor) or id(one) in self._known):
            named = type(one).__module__
            is_known = isinstance(one, type) or is_library(named) or named.partition(".")[0] in STANDARD
            if isinstance(one, torch.nn.Module) or not is_known:
                raise pickle.PicklingError(f"an object of class {type(one).__name__}")
            return None
        if id(one) not in self._places:
            self._places[id(one)] = len(self._apart)
            self._apart.append(one)
        return self._places[id(one)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are not `known`."""
        return [t for t in self._apart if isinstance(t, torch.Tensor) and id(t) not in self._known]

    def again(self, made: Iterable[bool], tensors: Iterator[torch.Tensor], of: Callable[[Any], Any]) -> list[Any]:
        """Return a copy of the objects, with the next of `tensors` for each tensor that is `made`, modules by `of`."""
        instead = {id(t): next(tensors) for t, new in zip(self.tensors, made, strict=True) if new}
        apart = [of(one) if isinstance(one, torch.nn.Module) else instead.get(id(one), one) for one in self._apart]
        unpickler = _Again(io.BytesIO(self._file.getvalue()))
        unpickler.apart = apart
        return cast("list[Any]", unpickler.load())


class _Again(pickle.Unpickler):
    apart: list[Any]

    def persistent_load(self, place: int) -> Any:  # Python 3.13.0 takes no attribute of this name
        return self.apart[place]
