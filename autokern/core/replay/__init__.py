"""Computations of small tensors that are recorded once and replayed (`recording`), and checks before each replay.

`Held` notices changes of objects, `Ran` replaced functions. `Numbers` compares tensors by value, since writes through
``.data``, by gpytorch's setters, or by fused optimisers change no version counter.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from autokern.core.errors import caught
from autokern.core.releases import LIBRARIES, is_of_libraries
from autokern.core.releases.comparison import names_in
from autokern.core.releases.recorded import content, functions
from autokern.core.replay.effects import is_library, is_of_library, is_of_python, walked

_FEW = 32  # most elements for which comparing Python numbers is faster than `torch.equal`
_MOST = 2**21  # elements of all tensors together that are compared before each replay
_COMPARABLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
               torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}  # fmt: skip
"""Dtypes of tensors that torch can compare."""
_SETTINGS = "_state", "_global_value", "_global_float_value", "_global_double_value"
"""Attributes in which settings of the libraries keep their values."""
_OTHERS = frozenset(("abc", "builtins", "collections", "contextlib", "enum", "functools", "numpy", "torch", "types",
                     "typing", "weakref"))  # fmt: skip
"""Packages whose classes are not watched."""
_TORCH = torch, torch.linalg, torch.nn.functional
_code = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def as_bytes(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the contents of tensors on one device, of any dtypes, concatenated as bytes on that device."""
    return torch.cat([t.detach().reshape(-1).contiguous().view(torch.uint8) for t in tensors])


def are_equal(pairs: Pairs) -> bool:
    """Whether the tensors of each pair have equal contents; all pairs on one accelerator take a single read."""
    elsewhere: dict[torch.device, Pairs] = {}
    for now, then in pairs:
        if now.shape != then.shape or now.dtype is not then.dtype or now.device != then.device:
            return False
        if not now.is_cpu:
            elsewhere.setdefault(now.device, []).append((now, then))
        elif not torch.equal(now, then) and not torch.equal(as_bytes([now]), as_bytes([then])):
            return False  # NaN (missing observations) equals itself only as bytes
    return all(torch.equal(*map(as_bytes, zip(*group, strict=True))) for group in elsewhere.values())


class Numbers:
    """The numbers of tensors; the tensors are kept alive, so that no `id` is reused."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        every = list(tensors)
        few = [(t, t.tolist()) for t in every if t.is_cpu and t.numel() <= _FEW]
        self._little = [(t, numbers) for t, numbers in few if t.tolist() == numbers]  # NaN is unequal to itself
        little = {id(t) for t, _ in self._little}
        self._others = [(t, t.detach().clone()) for t in every if id(t) not in little]

    def hold(self) -> bool:
        """Whether all tensors have the same numbers."""
        return all(t.tolist() == numbers for t, numbers in self._little) and are_equal(self._others)


def held(*of: Any, but: Collection[tuple[dict[str, Any], str]] = (), most: int = _MOST, **options: Any) -> Held | str:
    """Return the `Held` of objects without the attributes `but`, or why calls of them are not recorded."""
    seen = walked(of, but)
    if isinstance(seen, str):
        return seen
    tensors = _fixed(seen.values(), options.get("inputs", ()))
    if sum(one.numel() for one in tensors) > most:
        return "tensors of so many numbers that comparing them takes long"
    if any(one.dtype not in _COMPARABLE or (one.numel() and not one.untyped_storage().nbytes()) for one in tensors):
        return "a tensor of another dtype, or without memory"
    return Held(seen.values(), without={name for _, name in but}, **options)


def _fixed(every: Iterable[Any], inputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the strided CPU tensors among objects, except `inputs`."""
    varying = set(map(id, inputs))
    tensors = (one for one in every if isinstance(one, torch.Tensor) and id(one) not in varying)
    return [one for one in tensors if one.is_cpu and one.layout is torch.strided]


class Held:
    """Notices changed objects: their attributes, items, closures, globals, the user's classes, and library settings.

    Numbers written in place are noticed in NumPy arrays and in CPU tensors, except `inputs`.
    Attributes whose names are in `without` may change.
    """

    def __init__(
        self,
        every: Iterable[Any],
        inputs: Iterable[torch.Tensor] = (),
        spaces: Iterable[Mapping[str, Any]] = (),
        without: Iterable[str] = (),
    ) -> None:
        self.tensors, self.objects = list[torch.Tensor](), list[Any]()
        for one in every:
            (self.tensors if isinstance(one, torch.Tensor) else self.objects).append(one)
        self._functions = [one for one in self.objects if isinstance(one, FunctionType)]
        self._modules = [one for one in self.objects if isinstance(one, torch.nn.Module)]
        self._arrays = [one for one in self.objects if isinstance(one, np.ndarray)]
        self._tensors = [one for one in _fixed(self.tensors, inputs) if not one.is_inference()]
        bases = {base for kind in self.kinds() for base in kind.__mro__}
        own = [base for base in bases if not (is_of_library(base) or is_of_python(base))]
        self._own = [f for f in self._functions if not is_library(f.__globals__.get("__name__"))]
        self.own = bool(own or self._own)  # whether any class or function is the user's
        modules = [sys.modules.get(f"{name}.settings") for name in LIBRARIES]
        kinds = {one for module in modules if module for one in vars(module).values() if isinstance(one, type)}
        self._settings = [(kind, name) for kind in kinds for name in _SETTINGS if hasattr(kind, name)]
        self._more, self._without = [*spaces, *map(vars, own)], frozenset(without)
        self.renew()

    def kinds(self) -> set[type]:
        """Return the classes of the objects."""
        return set(map(type, self.objects))

    def renew(self) -> None:
        """Take the present state as the reference of `is_as_before`."""
        plain = (one for one in self.objects if not isinstance(one, (FunctionType, ModuleType)))
        both = (space for one in plain for space in (one, getattr(one, "__dict__", None)))
        spaces = [space for space in both if isinstance(space, dict)]
        spaces += [f.__kwdefaults__ for f in self._functions if f.__kwdefaults__] + list(map(vars, self._own))
        several = {id(space): space for space in (*self._more, *spaces)}.values()
        self._partly, self._spaces = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
        for space in several:
            partly = weakref.ref in map(type, space.values()) or not self._without.isdisjoint(space)
            (self._partly if partly else self._spaces).append(space)
        modules = list(map(vars, self._modules))
        inner = {id(value) for own in modules for name, value in own.items() if name.startswith("_")}
        keyed = [one for one in self.objects if isinstance(one, dict) and id(one) not in inner]
        self._lists = [*(one for one in self.objects if isinstance(one, (list, set))), *keyed]  # of dicts, the keys
        self._cells = [cell for one in self._functions for cell in one.__closure__ or ()]
        self._globals = [(f.__globals__, name) for f in self._own for name in names_in(f.__code__)]
        self._kept = self._contents()  # keeps the objects alive: no address is reused
        self._filters = list(warnings.filters)
        self._copies = [one.tobytes() for one in self._arrays]
        self._numbers, self._places = Numbers(self._tensors), self._memory()
        self._modes = [getattr(*place) for place in self._settings] + [one.training for one in self._modules]

    def is_as_before(self) -> bool:
        """Whether nothing has changed since `renew`."""
        try:
            found = self._contents()
        except caught(RuntimeError):  # another thread changes a container at this moment
            return False
        return (
            len(found) == len(self._kept)
            and all(map(operator.is_, found, self._kept))
            and warnings.filters == self._filters  # may have hidden a warning of the recording
            and [one.tobytes() for one in self._arrays] == self._copies
            and self._memory() == self._places  # a replay reads this memory
            and self._numbers.hold()
        )

    @contextlib.contextmanager
    def as_kept(self) -> Iterator[None]:
        """Within the block, settings of the libraries and training modes have the values of the last `renew`."""
        places = [*self._settings, *((one, "training") for one in self._modules)]

        def put(values: list[Any]) -> None:
            for place, value in zip(places, values, strict=True):
                if getattr(*place) is not value:
                    setattr(*place, value)

        before = [getattr(*place) for place in places]
        try:
            put(self._modes)
            yield
        finally:
            put(before)

    def _memory(self) -> list[Any]:
        return [(one.data_ptr(), one.stride(), one.requires_grad) for one in self._tensors]

    def _contents(self) -> list[Any]:
        found = [*chain.from_iterable(map(_values, self._spaces)), *chain.from_iterable(self._lists)]
        partly = [value for space in self._partly for name, value in space.items() if name not in self._without]
        # dead weak references are alike: torch 2.11 makes one at each evaluation of a prior
        found += [None if type(value) is weakref.ref and value() is None else value for value in partly]
        found += [*map(type, self._modules), *map(len, self._spaces)]
        found += map(content, self._cells)
        found += [space.get(name) for space, name in self._globals]
        found += chain.from_iterable(map(_code, self._own))
        found += [getattr(kind, name) for kind, name in self._settings]
        found.append(torch.get_default_dtype())
        return found


_values = operator.methodcaller("values")


class Ran:
    """Notes the functions of the libraries and of given classes that this thread runs, of torch by name, to compare."""

    def __init__(self) -> None:
        self.seen = True  # false while another tracer is active: Python has only one
        self._codes: dict[int, CodeType] = {}  # by address, since the hash of code is slow
        self._called: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
        """The globals of functions by their address, and the names that are looked up there."""
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
        return id(shows._showwarnmsg.__code__) in self._codes

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        """Note a function when it is called; its lines are not traced."""
        code, space = frame.f_code, frame.f_globals
        if id(code) not in self._codes:
            self._codes[id(code)] = code
            self._called.setdefault(id(space), (space, set()))[1].update((code.co_name, *code.co_names))

    def keep(self, kinds: Iterable[type]) -> None:
        """Take the functions that ran, and those of the classes `kinds`, as the reference of `is_as_before`."""
        names, several = {code.co_name for code in self._codes.values()}, dict[int, tuple[Any, dict[str, None]]]()

        def watch(owner: Any, among: Iterable[str], every: bool = False) -> None:
            space = vars(owner) if isinstance(owner, type) else owner
            if found := [name for name in among if name in space and (every or any(self._ran(space[name])))]:
                several.setdefault(id(owner), (owner, {}))[1].update(dict.fromkeys(found))

        for space, called in self._called.values():
            if is_of_libraries(module := space.get("__name__")):
                watch(space, called)
                for kind in [one for one in space.values() if isinstance(one, type) and one.__module__ == module]:
                    watch(kind, names)
        for base in {base for one in kinds for base in one.__mro__}:
            if base.__module__.partition(".")[0] not in _OTHERS:  # its attributes may shadow others
                watch(base, names if is_of_libraries(base.__module__) else vars(base), True)
        for one in _TORCH:
            watch(vars(one), set[str]().union(*(called for _, called in self._called.values())), True)
        owners = [(vars(owner) if isinstance(owner, type) else owner, of) for owner, of in several.values()]
        self._kept = [(space, operator.itemgetter(*of, *list(of)[:1])) for space, of in owners]
        self._classes = [vars(owner) for owner, _ in several.values() if isinstance(owner, type)]
        self._classes.append(vars(torch.Tensor))
        self._values = self._present()
        ran = (one for value in self._values for one in self._ran(value))
        self._functions = list({id(one): one for one in ran}.values())
        self._state = self._now()

    def _ran(self, value: Any) -> Iterator[FunctionType]:
        """Yield the functions of an attribute that have run."""
        return (one for one in functions(value) if id(one.__code__) in self._codes)

    def _present(self) -> list[Any]:
        return [value for space, of in self._kept for value in of(space)]

    def _now(self) -> list[Any]:
        return [*map(len, self._classes), *map(_code, self._functions)]

    def is_as_before(self) -> bool:
        """Whether the functions are the same objects, with the same code."""
        try:
            return all(map(operator.is_, self._present(), self._values)) and self._now() == self._state
        except KeyError:
            return False
