"""Whether classes compute what they did when autokern was imported: users and mocks patch them, and hooks."""

from __future__ import annotations

import os
from typing import Any

from gpytorch.kernels import AdditiveKernel, ConstantKernel, Kernel, MultiDeviceKernel, ProductKernel, ScaleKernel

__all__ = ["HERE", "is_ours", "record", "unpatched"]

HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
"""The folder of the package, with the separator at its end."""
_ours: set[Any] = set()
"""Hooks of autokern that were found in place of something."""
_forwards: dict[type, Any] = {}
_space, _covar_dist = vars(Kernel), vars(Kernel)["covar_dist"]


def record(kind: type) -> None:
    """Remember what the `forward` of a class is."""
    _forwards[kind] = vars(kind).get("forward")


for _kind in (AdditiveKernel, ConstantKernel, MultiDeviceKernel, ProductKernel, ScaleKernel):
    record(_kind)


def is_ours(function: Any) -> bool:
    """Whether a function is code of autokern."""
    if function not in _ours:
        if not getattr(getattr(function, "__code__", None), "co_filename", "").startswith(HERE):
            return False
        _ours.add(function)
    return True


def unpatched(kind: type) -> bool:
    """Whether a recorded class of kernels has its own `forward`, or a hook of autokern, and so have distances."""
    found, distances = kind.__dict__.get("forward"), _space["covar_dist"]
    if found is not _forwards[kind] and not is_ours(found):
        return False
    return distances is _covar_dist or is_ours(distances)
