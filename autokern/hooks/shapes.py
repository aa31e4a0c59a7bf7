"""Hook into torch: the broadcast of shapes, which the libraries ask for hundreds of times a step.

torch 2.13 computes it with symbolic sizes in mind: ten microseconds a call, and at the first one the import of a
computer algebra system, which takes half a second. Sizes that are plain integers need neither. Everything else, errors
included, is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from autokern.hooks.install import hook, is_enabled

_stock: Callable[..., torch.Size] = torch.broadcast_shapes
_compiling: Callable[[], bool] = torch.compiler.is_compiling
_tracing: Callable[[], Any] = torch._C._get_tracing_state
_SHAPES = (torch.Size, tuple, list)


def _broadcast_shapes(*shapes: Any) -> torch.Size:
    if not is_enabled() or _compiling() or _tracing() is not None:
        return _stock(*shapes)
    rank = 0
    for shape in shapes:
        if shape.__class__ not in _SHAPES:
            return _stock(*shapes)
        rank = max(rank, len(shape))
    common = [1] * rank
    for shape in shapes:
        place = rank - len(shape)
        for size in shape:
            if size.__class__ is not int or size < 0 or size != common[place] != 1 != size:
                return _stock(*shapes)
            if size != 1:
                common[place] = size
            place += 1
    return torch.Size(common)


if isinstance(_stock, FunctionType):  # a torch that computes this in C++ needs no help
    hook(torch, "broadcast_shapes", everywhere="botorch")(_broadcast_shapes)
