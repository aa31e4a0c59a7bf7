"""Whether calling an object may have side effects, which a replay would leave out.

Code of the libraries counts as free of them, except for the names below. So does a function of the user's whose
bytecode only combines its arguments, constants, tensors, and functions and contexts of the libraries. The objects that
these hold are examined, too. While a computation runs, `Leaving` notices numbers that leave torch.
"""

from __future__ import annotations

import dis
import functools
import math
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import TorchFunctionMode

from autokern.core.releases import LIBRARIES, is_installed
from autokern.core.releases.recorded import content

_LIBRARIES = LIBRARIES | {"autokern", "jax", "jaxlib", "torch"}
PLAIN = frozenset(
    (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device,
     torch.layout, torch.memory_format, slice, range)
)  # fmt: skip
_CONTAINERS = frozenset((list, tuple, set, frozenset))
_BUILTINS = frozenset(
    (abs, all, any, bool, dict, enumerate, float, getattr, int, isinstance, len, list, map, max, min, range, reversed,
     round, slice, sum, super, tuple, type, zip)
)  # fmt: skip
_STORES = ("STORE_GLOBAL", "STORE_ATTR", "STORE_DEREF", "STORE_SUBSCR", "STORE_NAME", "STORE_SLICE")
_OTHERS = ("DELETE_", "GET_AWAITABLE", "IMPORT_", "INPLACE_", "YIELD_")
_NAMES = frozenset(
    ("manual_seed", "seed", "set_rng_state", "save", "load", "backward", "compile", "distributed",
     "initialize", "logger", "logging", "train", "zero_grad", "step", "profile", "record_function",
     "numpy", "tolist", "data_ptr", "write", "__setattr__", "__delattr__",
     # torch's state as Python's numbers
     "are_deterministic_algorithms_enabled", "get_float32_matmul_precision", "get_num_interop_threads",
     "get_num_threads", "get_rng_state", "initial_seed", "is_autocast_enabled",
     "associative_scan", "cond", "flex_attention", "scan", "while_loop",  # operators that torch compiles
     # of containers
     "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "extendleft", "insert",
     "intersection_update", "move_to_end", "pop", "popitem", "popleft", "remove", "reverse", "rotate", "setdefault",
     "sort", "subtract", "symmetric_difference_update", "update",
     "__setitem__", "__delitem__", "__iadd__", "__iand__", "__imul__", "__ior__", "__isub__", "__ixor__",
     # of NumPy's arrays
     "byteswap", "fill", "itemset", "partition", "put", "resize", "setfield", "setflags"))  # fmt: skip
"""Names of functions and methods that have side effects, or through which numbers leave torch or enter."""
_PREFIXES = ("set_", "_set_", "load_", "save_", "register_", "add_scalar", "add_histogram", "add_module")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
STANDARD = frozenset(("abc", "builtins", "collections", "enum", "functools", "math", "types", "typing", "weakref"))
_BASES = "pyro.distributions."  # bases of gpytorch's distributions, and functions in torch's, where Pyro is installed
_AROUND = frozenset(("abc", "contextlib", "dataclasses", "functools", "typing", "typing_extensions"))
"""Modules of Python whose functions wrap functions of the libraries."""
_DESCRIPTORS = frozenset(
    (property, classmethod, staticmethod, functools.cached_property, types.MemberDescriptorType,
     types.GetSetDescriptorType)
)  # fmt: skip
_EMPTY = frozenset((object, types.EllipsisType, types.NotImplementedType, types.SimpleNamespace))
"""Python's own classes of objects that hold nothing but attributes."""
_COUNTING = torch.quasirandom.SobolEngine, type(functools.cache(int))  # classes whose objects change with use
_MOST = 20_000
_LEAVING = ("__array__", "__dlpack__", "__repr__", "_pack_padded_sequence", "apply_", "data_ptr", "map2_", "map_",
            "numpy", "storage", "tensor_split", "tolist", "untyped_storage")  # fmt: skip
_BUILDING, _INDEXING = ("as_tensor", "asarray", "new", "new_tensor", "tensor"), ("__getitem__", "__setitem__")
_READING = "__float__", "__format__", "__index__", "__int__"
_WAYS = {name: names for names in (_LEAVING, _BUILDING, _READING, _INDEXING) for name in names}


def walked(of: Iterable[Any], but: Iterable[tuple[dict[str, Any], str]] = ()) -> dict[int, Any] | str:
    """Return all objects that the objects `of` hold, but for attributes `but`, by id, or the side effect of calls."""
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return "a hook on all modules"
    seen: dict[int, Any] = {}
    modules, kinds, read, left = set[str](), set[type](), set[type](), {(id(own), name) for own, name in but}
    waiting = list(of)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or type(one) in PLAIN or isinstance(one, np.generic):
            continue
        if isinstance(one, torch.Tensor) and type(one) not in (torch.Tensor, torch.nn.Parameter):
            return f"a tensor of class {type(one).__name__}"
        if len(seen) > _MOST:
            return f"more than {_MOST:,} objects"
        seen[id(one)] = one
        if isinstance(one, torch.Tensor) or (type(one) is np.ndarray and not one.dtype.hasobject):
            continue
        found = _inside(one, read, left)
        if isinstance(found, str):
            return found
        waiting += found
        if type(one) in kinds:
            continue
        kinds.add(type(one))
        for base in type(one).__mro__:
            if base.__module__ not in modules and is_library(base.__module__):
                modules.add(base.__module__)
                there = getattr(sys.modules.get(base.__module__), "__dict__", {}).values()
                waiting += (value for value in there if type(value).__module__ == "unittest.mock")
                functions = (value for value in there if type(value) is FunctionType)
                waiting += (one for one in functions if not is_installed(one.__code__.co_filename))  # the user's
    return seen


def _inside(one: Any, read: set[type], left: set[tuple[int, str]]) -> list[Any] | str:
    """Return the objects and methods that an object holds (not of classes in `read`), or the side effect of a call."""
    if type(one) in _CONTAINERS or (isinstance(one, tuple) and hasattr(one, "_fields")):
        return list(one)
    if isinstance(one, _COUNTING):
        return f"a {type(one).__name__}, which changes when it is used"
    if isinstance(one, weakref.ref):
        of = type(one())
        return [] if of is types.NoneType or is_of_library(of) else f"a weak reference to a {of.__name__}"
    if isinstance(one, dict) and (type(one).__module__ in STANDARD or is_library(type(one).__module__)):
        return [*one.keys(), *_values(one, left)]
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, MethodType):
        return [one.__func__, one.__self__]
    if isinstance(one, FunctionType):
        return _of_function(one)
    if isinstance(one, MethodWrapperType):
        return f"{one!r} is called"
    if isinstance(one, (BuiltinFunctionType, ModuleType, type)):
        named = one.__name__ if isinstance(one, ModuleType) else one.__module__
        plain = not (isinstance(one, BuiltinFunctionType) and _is_named(one.__name__))
        return [] if plain and (is_library(named) or one in _BUILTINS or one is math) else f"{one!r} is called"
    kind = type(one)
    if isinstance(one, Iterator):
        return f"a {kind.__name__} yields its next value"
    if isinstance(one, torch.nn.Module) and any(vars(one).get(name) for name in HOOKS):
        return f"a hook on a {kind.__name__}"
    if not any(map(is_of_library, kind.__mro__)) and kind not in _EMPTY:
        return f"an object of class {kind.__name__}"
    bases = [base for base in kind.__mro__ if base not in read]
    read.update(bases)
    methods = [f for base in bases for f in _of_class(base, own=not is_of_library(base))]
    state = getattr(one, "__dict__", None)
    return [*methods, *(_values(state, left) if isinstance(state, dict) else ())]


def _values(of: dict[Any, Any], left: set[tuple[int, str]]) -> Iterable[Any]:
    return (value for key, value in of.items() if (id(of), key) not in left) if left else of.values()


def _of_class(kind: type, own: bool) -> Iterator[Any]:
    """Yield the members of a class of the user's (`own`), or the replacements in a class of a library."""
    if is_of_python(kind):
        return
    for name, member in vars(kind).items():
        if type(member).__module__ == "unittest.mock":
            yield member
            continue
        if own and not (name.startswith("__") or name == "_abc_impl" or type(member) in _DESCRIPTORS):
            yield member
        if own and type(member) in (classmethod, staticmethod):
            yield member.__func__
        for one in (member, *(getattr(member, inner, None) for inner in ("fget", "__func__", "__wrapped__"))):
            theirs = isinstance(one, FunctionType) and is_library(one.__globals__.get("__name__"))
            if isinstance(one, FunctionType) and (name != "__init__" if own else not theirs):
                yield one


@functools.lru_cache(4096)
def is_library(module: Any) -> bool:
    """Whether a module of this name belongs to a library, or to Python's modules that wrap library functions."""
    root = str(module).partition(".")[0]
    return root in _LIBRARIES or root in _AROUND or str(module).startswith(_BASES)


def is_of_library(kind: type) -> bool:
    """Whether a class belongs to a library."""
    return is_library(kind.__module__) and not _is_made(kind)


def is_of_python(kind: type) -> bool:
    """Whether a class belongs to one of Python's modules in `STANDARD`."""
    return kind.__module__.partition(".")[0] in STANDARD and not _is_made(kind)


def _is_made(kind: type) -> bool:
    """Whether a call of `type` has made a class, which then has the module of its metaclass or of the call."""
    return kind.__module__ in ("abc", "types") and vars(sys.modules[kind.__module__]).get(kind.__name__) is not kind


def _of_function(function: Any) -> list[Any] | str:
    """Return the objects that a function holds and calls, or the reason why its code may have side effects."""
    cells = dict(zip(function.__code__.co_freevars, map(content, function.__closure__ or ()), strict=True))
    held = [*cells.values(), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if is_library(function.__globals__.get("__name__")) and (
        is_library(function.__module__)
        or is_installed(function.__code__.co_filename)  # the wrapper of a library's decorator has the user's module
    ):
        if _is_named(function.__name__) and function.__qualname__ == function.__name__:
            return f"{function.__name__} is called"
        return held
    named = f"{function.__qualname__}, a function of your own,"
    kind = cells.get("__class__")  # for `super()`, which calls methods that are examined with their object
    found = [one for one in (*held, *vars(function).values()) if one is not kind]
    spaces = function.__globals__, function.__builtins__
    for code in codes(function.__code__):
        operations = list(dis.get_instructions(code))
        for place, instruction in enumerate(operations):
            name, what = instruction.opname, instruction.argval
            if what == "__class__" and name not in ("LOAD_ATTR", "LOAD_METHOD"):
                following = [of.opname for of in operations[place : place + 3]]
                found += [] if "LOAD_SUPER_ATTR" in following else [kind]  # `super()` from Python 3.12 on
            if name == "BINARY_OP" and instruction.argrepr.endswith("="):
                name = "INPLACE_"
            own = name == "STORE_DEREF" and what in code.co_cellvars  # of this call
            if own or (name, code.co_name) == ("YIELD_VALUE", "<genexpr>"):
                continue
            if name in _STORES or name.startswith(_OTHERS) or (isinstance(what, str) and _is_named(what)):
                return f"{named} may change what others see ({name} {what})"
            if name in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = next((space[what] for space in spaces if what in space), spaces)
                if value is spaces or isinstance(value, set):
                    return f"{named} uses {what}, which {'is not defined' if value is spaces else 'can be changed'}"
                found.append(value)
    return found


def _is_named(name: str) -> bool:
    return name in _NAMES or name.startswith(_PREFIXES)


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of all functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


class Leaving(TorchFunctionMode):
    """Notices where numbers of a recording leave torch, also where torch reads lists of tensors, which no mode sees."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        way, recorder, kwargs = _WAYS.get(getattr(func, "__name__", "")), self._recorder, kwargs or {}
        if way is None:
            return func(*args, **kwargs)
        reads, found = recorder.reads, func(*args, **kwargs)
        values = (*args[1], *args[2:]) if way is _INDEXING and type(args[1]) is tuple else (*args, *kwargs.values())
        lists = [one for one in values if isinstance(one, (list, tuple))]
        if way is not _READING or recorder.reads == reads:
            with torch._C.DisableTorchFunction():
                recorder.noticed(recorder.leave, lists if way in (_BUILDING, _INDEXING) else values)
        return found
