"""Hooks into torch and gpytorch: shapes that are broadcast, which the libraries ask for hundreds of times a step.

torch 2.13 computes it with symbolic sizes in mind: ten microseconds a call, and at the first one the import of a
computer algebra system, which takes half a second. Sizes that are plain integers need neither. Everything else, errors
included, is torch's own. The function stays the same object with other code: scripts and pickles know it by identity.

The batch shape of a kernel is that of all kernels in it. gpytorch walks through its modules by several generators for
each of them anew, thirty microseconds for a scaled one at each prior. One walk finds the same.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from gpytorch.kernels import Kernel

from autokern.core.known import relied
from autokern.hooks.install import hook, recode, stock_of

stock: Any = stock_of(torch, "broadcast_shapes")


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


class _Property(property):
    """A property that can be declared as a hook."""


_stock_batch_shape: Any = stock_of(Kernel, "batch_shape")
_stock = relied("gpytorch.kernels.kernel:Kernel.batch_shape")


def _batch_shape(kernel: Any) -> Any:
    own, waiting, seen = kernel._batch_shape, [kernel], {id(kernel)}
    same = own.__class__ is torch.Size and not torch.compiler.is_compiling() and _stock.holds()
    while same and waiting:
        for child in waiting.pop()._modules.values():
            if child is None or id(child) in seen:
                continue
            seen.add(id(child))
            waiting.append(child)
            if isinstance(child, Kernel) and (
                child.__class__.batch_shape is not Kernel.batch_shape or child._batch_shape != own
            ):
                same = False
    return own if same else _stock_batch_shape.fget(kernel)


hook(Kernel, "batch_shape")(_Property(_batch_shape, _stock_batch_shape.fset))
