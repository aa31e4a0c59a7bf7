"""Hook into torch: broadcast shapes, which are read hundreds of times a step.

`torch.broadcast_shapes` of torch 2.13 supports symbolic sizes: it takes ten microseconds a call, and its first call
imports a computer algebra system for half a second. Plain integers need neither. All other sizes, and errors, go to
torch's own code. The function stays the same object with other code: scripts and pickles know it by identity.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

from autokern.hooks.install import recode, stock_of

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

    return sys.modules["autokern.hooks.shapes"].stock(*shapes)


if isinstance(stock, FunctionType):  # not if a later torch implements it in C++
    _function, stock = stock, FunctionType(stock.__code__, stock.__globals__, stock.__name__)
    recode(_function, broadcast_shapes)
