"""Kernel matrices by torch's own machinery: cdist, and torch.compile on plain tensors.

Each is often recommended, so each is a candidate that a calibration measures on the user's machine.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch

from autokern.kernels.family import TINY
from autokern.kernels.matrix import matrix
from autokern.kernels.tree import Parts, Tree, apart, by_formula, by_leaf, families_of, leaves
from autokern.system.host import compiler


def by_cdist(tree: Tree, others: list[torch.Tensor] | None) -> torch.Tensor:
    """Return the kernel matrix ``(..., n, m)`` by torch.cdist in its mode without matmul, whose result is not PSD."""
    pairs = zip(by_leaf(tree), others or tree.points, strict=True)
    way = "donot_use_mm_for_euclid_dist"
    us = (torch.cdist(a, b, compute_mode=way).square() * of.gamma for (of, a, _), b in pairs)
    found: torch.Tensor = by_formula(tree.node, us, tree.shapes, [w[..., None, None] for w in tree.weights])
    return found


def _formula(parts: Parts) -> Callable[..., torch.Tensor]:
    """Return the kernel matrix as a function of tensors only, for compilers; `off` clears the diagonal."""

    families = families_of(parts.node)

    def formula(off: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        tree, others = parts.pair(tensors)
        us = []
        for of, a, b in zip(families, tree.points, others or tree.points, strict=True):
            found = a.square().sum(-1, keepdim=True) + b.square().sum(-1).unsqueeze(-2) - 2 * (a @ b.mT)
            # Clamped to a positive value, where the clamp's gradient is zero: it multiplies the huge slopes that some
            # formulae have near zero by zero, not by the rounding of equal points.
            us.append(found.clamp_min(TINY) * off * of.gamma)
        k: torch.Tensor = by_formula(tree.node, us, tree.shapes, tree.weights)
        return k

    return formula


def _is_far(tree: Tree, others: list[torch.Tensor] | None) -> bool:
    """Whether points are too far apart for `_formula`, which expands squared distances in the points' dtype."""
    sides = (tree.points,) if others is None else (tree.points, others)
    norms = [[z.square().sum(-1) for z in points] for points in zip(*sides, strict=True)]
    return any(of.reach(*own).far for (of, *_), own in zip(by_leaf(tree), norms, strict=True))


@functools.cache
def _compiled(parts: Parts, dtype: torch.dtype, same: bool) -> Callable[..., torch.Tensor]:
    """Return a compiled formula with a code object of its own, since torch limits recompilations per code object."""
    formula, name = _formula(parts), "_".join(leaves(parts.node))
    formula.__code__ = formula.__code__.replace(co_name=f"{name}_{str(dtype)[6:]}_{'same' if same else 'cross'}")
    return torch.compile(formula, dynamic=True, fullgraph=True)


def compiled(tree: Tree, others: list[torch.Tensor] | None, same: bool) -> torch.Tensor:
    """Return the kernel matrix by torch.compile; the first call of a process compiles for seconds.

    Sizes are dynamic, except that the compiler treats a size of one as a constant.
    """
    if _is_far(tree, others):
        return matrix(tree, others, same)
    first = tree.points[0]
    off = 1 - torch.eye(first.shape[-2], dtype=first.dtype, device=first.device) if same else first.new_ones(())
    parts, tensors = apart(tree._replace(weights=[w[..., None, None] for w in tree.weights]), others)
    return _compiled(parts, first.dtype, same)(off, *tensors)


def compiler_problem() -> str | None:
    """Return why torch.compile is unsupported here, or None, without compiling."""
    if sys.platform != "linux":
        return "torch.compile is used on Linux only"
    return "torch.compile needs a C++ compiler, and none was found" if compiler() is None else None
