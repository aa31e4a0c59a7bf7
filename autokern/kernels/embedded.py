"""Embedded kernels: a kernel with its points transformed, as a form and tensors.

The autograd functions of linear_operator take operators apart and rebuild them, so operators must consist of tensors
and plain values. The embedded points of all leaves are concatenated in one tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpytorch.kernels import ConstantKernel, Kernel, ScaleKernel

from autokern.kernels import tree as trees
from autokern.kernels.family import family
from autokern.kernels.tree import Node, Tree, centre_of


class Embedded(NamedTuple):
    """A kernel of embedded points."""

    node: Node
    widths: tuple[int, ...]  # dimensions of each leaf's points, which are concatenated from left to right
    shapes: tuple[torch.Tensor, ...]  # ``(..., 1, 1)``
    weights: tuple[torch.Tensor, ...]  # output scales and constants, ``(...)``


def embed(kernel: Kernel, x1: torch.Tensor, x2: torch.Tensor | None) -> tuple[Embedded, torch.Tensor, torch.Tensor]:
    """Return the embedded form of a kernel with a supported `form`, and both sets of points, embedded.

    The root kernel's active dimensions must be selected already. If `x2` is None, both sets are one tensor.
    """
    centre = _common(x1, x2)
    first = trees.read(kernel, x1, centre)
    widths = tuple(z.shape[-1] for z in first.points)
    left = _beside(first.points)
    right = left if x2 is None else _beside(trees.read(kernel, x2, centre).points)
    return Embedded(first.node, widths, tuple(first.shapes), tuple(first.weights)), left, right


def _beside(points: list[torch.Tensor]) -> torch.Tensor:
    if len(points) == 1:
        return points[0].contiguous()
    lead = torch.broadcast_shapes(*(z.shape[:-1] for z in points))
    return torch.cat([z.expand(*lead, z.shape[-1]) for z in points], -1)


def _common(x1: torch.Tensor, x2: torch.Tensor | None) -> torch.Tensor:
    """Return a centre to subtract from two sets of points that enlarges the batch of neither."""
    alike = x2 is None or x1.shape[:-2] == x2.shape[:-2]
    return centre_of(x1) if alike else centre_of(x1.flatten(0, -2)).view(-1)


def read(kernel: Kernel | Embedded, x: torch.Tensor, centre: torch.Tensor | None = None) -> Tree:
    """Return the tree of a kernel with the points `x`; embedded points are centred already and ignore `centre`."""
    if isinstance(kernel, Embedded):
        return Tree(kernel.node, list(x.split(kernel.widths, -1)), list(kernel.shapes), list(kernel.weights))
    return trees.read(kernel, x, centre)


def both(kernel: Kernel | Embedded, x1: torch.Tensor, x2: torch.Tensor) -> tuple[Tree, list[torch.Tensor] | None]:
    """Return the tree with the rows' points, and the columns' points, None if both are the same tensor."""
    centre = None if isinstance(kernel, Embedded) else _own_centre(kernel, x1)
    return read(kernel, x1, centre), None if x1 is x2 else read(kernel, x2, centre).points


def _own_centre(kernel: Kernel, x1: torch.Tensor) -> torch.Tensor:
    """Return the centre of the rows' points in each batch: the mean, or a median for families of differences."""
    node = trees.described(kernel, True, set())  # the caller has checked that its code is known
    differences = node is not None and any(of.differences for of in trees.families_of(node))
    if not differences or not x1.shape[-2]:
        return centre_of(x1)
    # as in stock, which forms differences, a far or NaN point affects only its own row and column
    return x1.detach().nanmedian(-2, keepdim=True).values.nan_to_num()


def key(kernel: Kernel | Embedded) -> Any:
    """Return a cache key of form, shapes and required gradients; computed at every call, so cheap."""
    if not isinstance(kernel, Embedded):
        return trees.key(kernel)
    node, widths, shapes, weights = kernel
    return node, widths, *((t.shape, t.dtype, t.requires_grad) for t in (*shapes, *weights))


def plain(kernel: Embedded, dtype: torch.dtype) -> Kernel:
    """Return a detached gpytorch kernel of the embedded points with the same values; it unpickles without autokern."""
    each = torch.arange(sum(kernel.widths), device="cpu").split(kernel.widths)
    dims = iter(each if len(each) > 1 else (None,))  # a single leaf reads all dimensions
    shapes, weights = iter(kernel.shapes), iter(kernel.weights)

    def made(node: Node) -> Kernel:
        if node.kind == "leaf":
            of = family(node.family)
            alpha = None if of.shape is None else next(shapes)
            leaf = of.plain(batch_shape=torch.Size() if alpha is None else alpha.shape[:-2]).to(dtype)
            leaf.lengthscale = 1.0 if alpha is None else (2 * alpha).rsqrt()
            if alpha is not None:
                leaf.alpha = alpha.squeeze(-1)
            leaf.active_dims = next(dims)
            return leaf
        if node.kind == "constant":
            weight = next(weights)
            constant = ConstantKernel(batch_shape=weight.shape).to(dtype)
            constant.constant = weight.unsqueeze(-1)
            return constant
        if node.kind == "scale":
            weight = next(weights)
            scaled = ScaleKernel(made(node.children[0]), batch_shape=weight.shape).to(dtype)
            scaled.outputscale = weight
            return scaled
        branch = next(kernel for kernel, kind in trees.BRANCHES.items() if kind == node.kind)
        return branch(*map(made, node.children))

    with torch.no_grad():
        return made(kernel.node).requires_grad_(False)
