"""Hooks into torch's optimizers, which import torch's compiler for seconds, only to tell it to leave them alone.

While the compiler is not imported it traces nothing, and there is nothing to tell.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from autokern.hooks.install import hook, is_enabled

_DISABLED = ("add_param_group", "state_dict", "load_state_dict", "zero_grad")
"""Methods that torch wraps by `torch._disable_dynamo`, around the plain one."""


def _absent() -> bool:
    """Whether the hooks are in force and the compiler is not imported."""
    return is_enabled() and "torch._dynamo" not in sys.modules


def _plainly(name: str, stock: Callable[..., Any]) -> None:
    plain: Callable[..., Any] = stock.__wrapped__  # type: ignore[attr-defined]

    @hook(Optimizer, name)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (plain if _absent() else stock)(*args, **kwargs)


def _stepping(kind: Any, stock: Any) -> None:
    """Take a step in the grad mode of the optimizer, as `torch.optim.optimizer._use_grad_for_differentiable` does.

    torch wraps `step` for its profiler and for hooks of steps when the first optimizer of a class is made. That is done
    for both forms here, so that it is done once.
    """
    plain = stock.__wrapped__

    def step(*args: Any, **kwargs: Any) -> Any:
        if not _absent():
            return stock(*args, **kwargs)
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            return plain(*args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    wrapped = _profiled(stock)
    wrapped.__wrapped__ = stock
    kind.step = wrapped
    hook(kind, "step")(_profiled(step))


def _profiled(step: Callable[..., Any]) -> Any:
    wrapped: Any = Optimizer.profile_hook_step(step)
    wrapped.hooked = True
    return wrapped


def _code(function: Any) -> tuple[str, str]:
    """Return the names of the file and the function in which the code of a function stands."""
    code = getattr(function, "__code__", None)
    return ("", "") if code is None else (code.co_filename.replace("\\", "/").partition("/torch/")[2], code.co_name)


def _optimizers() -> list[type[Optimizer]]:
    kinds = (kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer))
    return [kind for kind in kinds if _code(vars(kind).get("step")) == ("optim/optimizer.py", "_use_grad")]


if "torch._dynamo" not in sys.modules:
    for _name in _DISABLED:
        if _code(vars(Optimizer).get(_name)) == ("_compile.py", "inner"):
            _plainly(_name, vars(Optimizer)[_name])
    for _kind in _optimizers():
        _stepping(_kind, vars(_kind)["step"])
