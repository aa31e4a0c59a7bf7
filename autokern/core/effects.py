"""Whether calling an object can be noticed by the user's program otherwise than by its result.

Modules, functions and other objects of torch, GPyTorch, linear_operator and BoTorch count as free of effects, with all
that they hold. So do functions of the user's own whose bytecode only combines their arguments, constants, tensors and
functions of these libraries: ``lambda samples, X: -(samples - target).square().sum(-1)``.
"""

from __future__ import annotations

import dis
import functools
import math
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import _has_any_global_hook

__all__ = ["effect"]

_LIBRARIES = ("autokern", "botorch", "gpytorch", "linear_operator", "torch")
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    np.ndarray,
    torch.Size,
    torch.dtype,
    torch.device,
    slice,
    range,
)
_BUILTINS = frozenset(
    (abs, all, any, bool, dict, enumerate, float, getattr, int, isinstance, len, list, map, max, min, range, reversed,
     round, slice, sum, super, tuple, type, zip)
)  # fmt: skip
_STORES = ("STORE_GLOBAL", "STORE_ATTR", "STORE_DEREF", "STORE_SUBSCR", "STORE_NAME", "STORE_SLICE")
_OTHERS = ("BEFORE_WITH", "DELETE_", "GET_AWAITABLE", "IMPORT_", "INPLACE_", "LOAD_SPECIAL", "SETUP_WITH", "YIELD_")
_NAMES = frozenset(
    ("manual_seed", "seed", "set_rng_state", "save", "load", "backward", "register_hook", "compile",
     "numpy", "tolist", "data_ptr", "append", "extend", "insert", "pop", "popitem", "remove", "clear", "update",
     "setdefault", "write", "__setitem__", "__delitem__", "__setattr__"))  # fmt: skip
"""Functions and methods, by their names, that do more than compute."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STANDARD = frozenset(("abc", "builtins", "collections", "enum", "functools", "math", "types", "typing", "weakref"))
_AROUND = frozenset(("abc", "contextlib", "dataclasses", "functools", "typing", "typing_extensions"))
"""Modules of Python whose functions wrap those of the libraries."""
_MOST = 20_000


def effect(*of: Any) -> str | None:
    """Return what calling these objects may do beside computing, None if it is nothing."""
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return "a hook on all modules"
    seen: dict[int, Any] = {}
    waiting = list(of)
    while waiting:
        one = waiting.pop()
        if isinstance(one, (*_PLAIN, torch.Tensor)) or id(one) in seen:
            if isinstance(one, torch.Tensor) and type(one) not in (torch.Tensor, torch.nn.Parameter):
                return f"a tensor of class {type(one).__name__}"
            continue
        if len(seen) > _MOST:
            return "more objects than are looked at"
        seen[id(one)] = one
        found = _inside(one)
        if isinstance(found, str):
            return found
        waiting += found
    return None


def _inside(one: Any) -> list[Any] | str:
    """Return the objects that an object consists of, or what calling it may do."""
    if isinstance(one, (list, tuple, set, frozenset)):
        return list(one)
    if isinstance(one, Mapping):
        return [*one.keys(), *one.values()]
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, MethodType):
        return [one.__func__, one.__self__]
    if isinstance(one, FunctionType):
        return _of_function(one)
    if isinstance(one, (BuiltinFunctionType, ModuleType, type)):
        named = one.__name__ if isinstance(one, ModuleType) else one.__module__
        return [] if _is_library(named) or one in _BUILTINS or one is math else f"{one!r} is called"
    kind = type(one)
    if isinstance(one, Iterator):
        return f"a {kind.__name__} yields its next value"
    if isinstance(one, torch.nn.Module) and any(vars(one).get(name) for name in _HOOKS):
        return f"a hook on a {kind.__name__}"
    if not any(_is_library(base.__module__) for base in kind.__mro__) and kind.__module__ not in _STANDARD:
        return f"an object of class {kind.__name__}"
    methods = [f for base in kind.__mro__ for f in _of_class(base, own=not _is_library(base.__module__))]
    return [*methods, *_state(one)]


def _of_class(kind: type, own: bool) -> Iterator[FunctionType]:
    """Yield the methods of a class of the user's own, and those that somebody put into a class of a library."""
    if kind.__module__ in _STANDARD:
        return
    for name, member in vars(kind).items():
        if name != "__init__" or not own:
            yield from (f for f in _functions(member) if own or not _is_library(f.__globals__.get("__name__")))


def _functions(member: Any) -> Iterator[FunctionType]:
    """Yield the functions of a class's attribute."""
    for one in (member, *(getattr(member, name, None) for name in ("fget", "__func__", "__wrapped__"))):
        if isinstance(one, FunctionType):
            yield one


def _state(one: Any) -> list[Any]:
    state = getattr(one, "__dict__", None)
    return list(state.values()) if isinstance(state, dict) else []


@functools.lru_cache(4096)
def _is_library(module: Any) -> bool:
    root = str(module).partition(".")[0]
    return root in _LIBRARIES or root in _AROUND


def _of_function(function: FunctionType) -> list[Any] | str:
    """Return what a function holds and calls, or the reason why its code may do more than compute."""
    cells = [_content(cell) for cell in function.__closure__ or ()]
    held = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if _is_library(function.__module__) and _is_library(function.__globals__.get("__name__")):
        return held
    named = f"{function.__qualname__}, a function of your own,"
    if any(isinstance(value, set) for value in held):
        return f"{named} uses a set, which can be changed"
    found = list(held)
    for code in _codes(function.__code__):
        for instruction in dis.get_instructions(code):
            name, what = instruction.opname, instruction.argval
            if name == "BINARY_OP" and instruction.argrepr.endswith("="):
                name = "INPLACE_"
            if name in _STORES or name.startswith(_OTHERS) or what in _NAMES:
                return f"{named} may change what others see ({name} {what})"
            if name in ("LOAD_GLOBAL", "LOAD_NAME"):
                spaces: tuple[Mapping[str, Any], ...] = function.__globals__, _builtins(function)
                value = next((space[what] for space in spaces if what in space), spaces)
                if value is spaces:
                    return f"{named} uses {what}, which is not defined"
                if isinstance(value, set):
                    return f"{named} uses {what}, which can be changed"
                found.append(value)
    return found


def _builtins(function: FunctionType) -> Mapping[str, Any]:
    found = function.__globals__.get("__builtins__", {})
    return found if isinstance(found, dict) else vars(found)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty yet
        return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
