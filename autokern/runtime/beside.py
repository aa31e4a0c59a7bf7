"""Beside: candidates run on the arguments of a call, of which the program sees nothing but the time that it takes."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from autokern.core.arguments import modules_in, rebuilt, tensors_in
from autokern.core.op import Op, inside
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.runtime import overlay
from autokern.system import randomness
from autokern.tuning.trial import Trialled, trial

__all__ = ["harmless", "trials", "unseen", "values"]

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad")
_HOOKS_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS_OF_ALL = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
"""Hooks of all modules, in `torch.nn.modules.module`."""
_OURS = ("torch", "gpytorch", "linear_operator", "botorch")
"""Packages whose modules may be called more often than the program calls them."""
_SILENCE = ("ignore", None, Warning, None, 0)
_task: Callable[[], int] = torch._C._current_graph_task_id


def harmless(args: tuple[Any, ...]) -> bool:
    """Whether computing with these arguments calls nothing of the user's: no class, no hook.

    Inside a backward pass that is not known.
    """
    tensors = [*tensors_in(args), *_written(args)]
    if _task() != -1 or any(getattr(t, name, None) for t in tensors for name in _HOOKS):
        return False
    modules = list(modules_in(args))
    if modules and any(getattr(torch.nn.modules.module, name, None) for name in _HOOKS_OF_ALL):
        return False
    return all(
        type(module).__module__.partition(".")[0] in _OURS
        and "forward" not in vars(module)
        and not any(getattr(module, name, None) for name in _HOOKS_OF_MODULES)
        for module in modules
    )


def trials(op: Op, problem: Problem, names: list[str], args: tuple[Any, ...]) -> dict[str, Callable[[], Trialled]]:
    """Return a trial of each candidate on the arguments of a call.

    Tensors are detached from the program's graph, unless the op is composite: its arguments keep caches.
    """
    copies: dict[int, torch.Tensor] = {}

    def detached(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.grad_fn is None:
            return value
        if id(value) not in copies:
            copies[id(value)] = value.detach().requires_grad_()
        return copies[id(value)]

    given = args if op.composite else rebuilt(args, detached)
    return {name: trial(op, op[name].run, problem, given) for name in names}


@contextlib.contextmanager
def unseen(settings: Settings, args: tuple[Any, ...], kept: overlay.Overlay | None = None) -> Iterator[None]:
    """Leave random numbers, gradients, counts of calls and heard warnings as they are.

    Warnings are held back where no other thread could be hearing its own: elsewhere one that a candidate gives may be
    heard twice.
    """
    active, measuring = inside.active, inside.measuring
    grads = [(tensor, tensor.grad) for tensor in _written(args)]
    quiet = _silence() if threading.active_count() == 1 else contextlib.nullcontext()
    try:
        inside.active = inside.measuring = True
        for tensor, _ in grads:
            tensor.grad = None
        with quiet, randomness.untouched(), overlay.apart(settings, kept):
            yield
    finally:
        inside.active, inside.measuring = active, measuring
        for tensor, grad in grads:
            tensor.grad = grad


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hold all warnings back.

    `warnings.catch_warnings` would let every place of the program that warns once warn once more.
    """
    filters = warnings.filters
    warnings.filters = [_SILENCE]
    try:
        yield
    finally:
        warnings.filters = filters


def values(op: Op, result: Trialled) -> list[torch.Tensor]:
    """Return copies of the entries of a result and of its gradients; a later trial may write into those."""
    return [t.detach().clone() for t in (*tensors_in(op.canonical(result.out)), *result.grads)]


def _written(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the parameters by name among the arguments, whose gradients an op may accumulate itself."""
    held = (tensor for part in args if isinstance(part, Mapping) for tensor in part.values())
    return [tensor for tensor in held if isinstance(tensor, torch.Tensor)]
