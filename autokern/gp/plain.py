"""Kernel matrices by plain steps of torch, one part at a time: the truth, and differentiable to any order.

The library adds and multiplies operators, some of which it factorises by itself, with jitter.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import ScaleKernel
from linear_operator import to_dense

from autokern.kernels import tree as trees
from autokern.kernels.far import centre_of

__all__ = ["dense"]


def dense(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the matrix of points, whose active dimensions are chosen already."""
    if trees.form(kernel, keops=True) is not None:
        return trees.dense(trees.read(kernel, x, centre_of(x)))
    kind = type(kernel)
    if kind is ScaleKernel:
        return kernel.outputscale[..., None, None] * dense(kernel.base_kernel, x)
    if kind not in trees.BRANCHES:
        found: torch.Tensor = to_dense(kernel.forward(x, x))
        return found
    chosen = [(child, child.active_dims) for child in kernel.kernels]
    parts = [dense(child, x if active is None else x.index_select(-1, active)) for child, active in chosen]
    total = parts[0]
    for part in parts[1:]:
        total = total + part if trees.BRANCHES[kind] == "sum" else total * part
    return total
