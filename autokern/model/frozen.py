"""Frozen kernels, for deferred evaluations that must read the hyperparameters of the original call.

A frozen kernel shares no mutable state with its original. Its tensors are nodes of the caller's graph, so gradients
reach the original parameters, also parameters that `functional_call` swapped in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.priors import Prior

from autokern.core.releases import LIBRARIES

_CHANGING = frozenset(
    {
        "DistributionalInputKernel", "GridInterpolationKernel", "GridKernel", "InducingPointKernel", "LCEAKernel",
        "MultiDeviceKernel", "OrthogonalAdditiveKernel", "RFFKernel",
    }
)  # fmt: skip
"""Library kernels whose evaluation draws, moves or caches state, or calls other objects."""
_ORIGINAL = "_autokern_frozen_from"
_THEIRS = LIBRARIES | {"torch"}


def is_library(module: torch.nn.Module) -> bool:
    """Whether a module and all its submodules are of the libraries' own classes and stateless in evaluation.

    Classes and callables of the user may keep state, count their calls or redefine methods.
    """
    kind = type(module)
    changing = kind.__name__ in _CHANGING and module.__dict__.get("device_ids") != []  # no devices: a plain wrapper
    if not _is_theirs(kind) or changing or not all(map(_is_theirs, _functions(module))):
        return False
    return all(part is None or is_library(part) for part in module._modules.values())


def _functions(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the callable attributes of a module."""
    own = module.__dict__.values()
    return (v for v in own if callable(v) and not isinstance(v, (torch.Tensor, type)))


def _is_theirs(thing: Any) -> bool:
    """Whether a class or function comes from one of the libraries, or is built in."""
    return (getattr(thing, "__module__", None) or "torch").partition(".")[0] in _THEIRS


def frozen(module: torch.nn.Module, of: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Any:
    """Return a copy of a library module whose tensors are copied by `of`, by default within the present graph.

    Unlike `copy.deepcopy`, it supports parameters that are not autograd leaves. Priors are shared, since no covariance
    reads them. A module that is frozen already is returned unchanged.
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
    """Return the original of a frozen module, or the module itself if it is not frozen."""
    original: torch.nn.Module = module.__dict__.get(_ORIGINAL, module)
    return original


def by_kernel(kernel: Any, lazy: Any) -> LazyEvaluatedKernelTensor:
    """Return the lazy covariance of the points of `lazy` under another kernel."""
    return LazyEvaluatedKernelTensor(lazy.x1, lazy.x2, kernel=kernel, **lazy.params)
