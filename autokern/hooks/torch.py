"""Hooks into torch: broadcasts of shapes, and optimizers, both of which import much that they do not need.

`torch.broadcast_shapes` of torch 2.13 supports symbolic sizes: it takes ten microseconds a call, and its first call
imports a computer algebra system for half a second. Plain integers need neither. All other sizes, and errors, go to
torch's own code. The function stays the same object with other code: scripts and pickles know it by identity.

Optimizers import torch's compiler, which takes seconds, only to exclude themselves from its traces. A compiler that is
not imported traces nothing, so this import is skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from autokern.hooks.install import hook, is_enabled, recode, stock_of

_DISABLED = ("add_param_group", "state_dict", "load_state_dict", "zero_grad")
"""Methods that torch wraps by `torch._disable_dynamo`; the plain method is the wrapper's ``__wrapped__``."""
stock: Any = stock_of(torch, "broadcast_shapes")


def broadcast_shapes(*shapes):  # type: ignore[no-untyped-def]
    """Template for `torch.broadcast_shapes`: it runs with the globals of `torch.functional`."""
    if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None:
        rank = 0
        for shape in shapes:
            if shape.__class__ is not torch.Size and shape.__class__ is not tuple and shape.__class__ is not list:
                rank = -1
                break
            rank = max(rank, len(shape))
        if rank >= 0:
            common = [1] * rank
            for shape in shapes:
                if rank < 0:
                    break
                place = rank - len(shape)
                for size in shape:
                    if size.__class__ is not int or size < 0 or size != common[place] != 1 != size:
                        rank = -1
                        break
                    if size != 1:
                        common[place] = size
                    place += 1
            if rank >= 0:
                return torch.Size(common)
    import sys

    return sys.modules["autokern.hooks.torch"].stock(*shapes)


if isinstance(stock, FunctionType):  # not if a later torch implements it in C++
    _function, stock = stock, FunctionType(stock.__code__, stock.__globals__, stock.__name__)
    recode(_function, broadcast_shapes)


def _plainly(name: str, stock: Callable[..., Any]) -> None:
    plain: Callable[..., Any] = stock.__wrapped__  # type: ignore[attr-defined]

    @hook(Optimizer, name, relies=None)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (plain if is_enabled() and "torch._dynamo" not in sys.modules else stock)(*args, **kwargs)


def _use_grad_for_differentiable(func: Any) -> Any:
    """Template of torch's decorator of this name, without the import of the compiler."""

    def _use_grad(*args, **kwargs):  # type: ignore[no-untyped-def]
        import sys

        compiler = "torch._dynamo" in sys.modules
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            if compiler:
                torch._dynamo.graph_break()
            return func(*args, **kwargs)
        finally:
            if compiler:
                torch._dynamo.graph_break()
            torch.set_grad_enabled(before)

    return _use_grad


def _code(function: Any) -> tuple[str, str]:
    """Return the file below torch/ and the name of a function's code, empty if it has no code."""
    code = getattr(function, "__code__", None)
    return ("", "") if code is None else (code.co_filename.replace("\\", "/").partition("/torch/")[2], code.co_name)


def _steps() -> list[Any]:
    """Return the `step` functions of torch's optimizers that import the compiler, without torch's later wrappers."""
    found = []
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) and issubclass(kind, Optimizer) else None
        while step is not None and _code(step) != ("optim/optimizer.py", "_use_grad"):
            step = getattr(step, "__wrapped__", None)
        found += [] if step is None else [step]
    return found


if "torch._dynamo" not in sys.modules:
    for _name in _DISABLED:
        if _code(vars(Optimizer).get(_name)) == ("_compile.py", "inner"):
            _plainly(_name, vars(Optimizer)[_name])
    for _step in _steps():
        recode(_step, _use_grad_for_differentiable(None))
