"""Frozen kernels: a late evaluation reads the hyperparameters of the call that made it.

A frozen kernel shares nothing that may change with the kernel it comes from, and its tensors are nodes of the caller's
graph: gradients reach the parameters that the kernel had, also those swapped in for one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpytorch.priors import Prior

__all__ = ["LIBRARIES", "frozen", "is_library", "thawed"]

_CHANGING = frozenset(
    {
        "DistributionalInputKernel", "GridInterpolationKernel", "GridKernel", "InducingPointKernel", "LCEAKernel",
        "MultiDeviceKernel", "OrthogonalAdditiveKernel", "RFFKernel",
    }
)  # fmt: skip
"""Kernels of the libraries that draw, move or cache something of their own while they are evaluated, or call others."""
_ORIGINAL = "_autokern_frozen_from"
LIBRARIES = frozenset({"gpytorch", "linear_operator", "botorch"})
"""Packages whose modules keep nothing in attributes that changes without meaning."""
_THEIRS = LIBRARIES | {"torch"}


def is_library(module: torch.nn.Module) -> bool:
    """Whether a module and all modules in it are of the libraries' own classes, which hide no state.

    Evaluating one of these changes nothing in it. A class of the user's, or a function of the user's that a module of
    the libraries calls, may keep anything anywhere, count its calls, or mean something else by a method.
    """
    kind = type(module)
    changing = kind.__name__ in _CHANGING and module.__dict__.get("device_ids") != []  # a kernel without devices rests
    if not _is_theirs(kind) or changing or not all(map(_is_theirs, _functions(module))):
        return False
    return all(part is None or is_library(part) for part in module._modules.values())


def _functions(module: torch.nn.Module) -> Iterator[Any]:
    """Yield what a module keeps as attributes and may call."""
    own = module.__dict__.values()
    return (v for v in own if callable(v) and not isinstance(v, (torch.Tensor, type)))


def _is_theirs(thing: Any) -> bool:
    """Whether a class or function comes from one of the libraries, or is built in."""
    return (getattr(thing, "__module__", None) or "torch").partition(".")[0] in _THEIRS


def frozen(module: torch.nn.Module, of: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Any:
    """Return a copy of a module of the libraries whose tensors are copies within the present graph.

    Unlike a deep copy it takes parameters that are no leaves of autograd. Priors, which no covariance reads, are
    shared. A frozen one is returned unchanged. `of` maps each tensor to the one in its place.
    """
    if _ORIGINAL in module.__dict__:
        return module
    copied = object.__new__(type(module))
    own = copied.__dict__
    own.update(module.__dict__)
    own[_ORIGINAL] = module
    for name, value in module.__dict__.items():
        if isinstance(value, torch.Tensor):
            own[name] = of(value)
    for kind in ("_parameters", "_buffers"):
        own[kind] = {name: t if t is None else of(t) for name, t in own[kind].items()}
    parts = own["_modules"].items()
    own["_modules"] = {name: p if p is None or isinstance(p, Prior) else frozen(p, of) for name, p in parts}
    return copied


def thawed(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that a frozen one was made from, any other itself."""
    original: torch.nn.Module = module.__dict__.get(_ORIGINAL, module)
    return original
