"""Hook into torch: the broadcast of shapes, which the libraries ask for hundreds of times a step.

torch 2.13 computes it with symbolic sizes in mind: ten microseconds a call, and at the first one the import of a
computer algebra system, which takes half a second. Sizes that are plain integers need neither. Everything else, errors
included, is torch's own. The function stays the same object with other code: scripts and pickles know it by identity.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

from autokern.hooks.install import recode

stock: Any = torch.broadcast_shapes


def broadcast_shapes(*shapes):  # type: ignore[no-untyped-def]
    """Run in place of `torch.broadcast_shapes`, among the globals of `torch.functional`."""
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


if isinstance(stock, FunctionType):  # a torch that computes this in C++ needs no help
    _function, stock = stock, FunctionType(stock.__code__, stock.__globals__, stock.__name__)
    recode(_function, broadcast_shapes)
