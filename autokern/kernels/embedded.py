"""Embedded: a kernel applied up to distances, reduced to tensors and a plain form.

Operators that autograd functions of linear_operator take apart and rebuild must be made of tensors. The points of all
leaves lie side by side in one tensor, shapes and weights follow, and the form is a plain value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpytorch.kernels import ConstantKernel, Kernel, ScaleKernel

from autokern.kernels import tree as trees
from autokern.kernels.family import family
from autokern.kernels.far import centre_of
from autokern.kernels.tree import Node, Tree


class Embedded(NamedTuple):
    """A kernel with embedded points: tensors and a plain form."""

    node: Node
    widths: tuple[int, ...]  # dimensions of each leaf's points, from left to right, side by side
    shapes: tuple[torch.Tensor, ...]  # ``(..., 1, 1)``
    weights: tuple[torch.Tensor, ...]  # output scales and constants, ``(...)``


def embed(kernel: Kernel, x1: torch.Tensor, x2: torch.Tensor | None) -> tuple[Embedded, torch.Tensor, torch.Tensor]:
    """Return the embedded form of a kernel with known `form`, and both sets of points, embedded.

    Its own active dimensions are taken as selected already. With None for `x2`, both are one tensor.
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
    """Return the centre to subtract from two sets of points, without enlarging the batch of either."""
    if x2 is None or x1.shape[:-2] == x2.shape[:-2]:
        return centre_of(x1)
    return centre_of(x1.flatten(0, -2)).view(-1)


def read(kernel: Kernel | Embedded, x: torch.Tensor, centre: torch.Tensor | None = None) -> Tree:
    """Return the tree of a kernel, embedded or not, with the points `x`; embedded points are centred already."""
    if isinstance(kernel, Embedded):
        return Tree(kernel.node, list(x.split(kernel.widths, -1)), list(kernel.shapes), list(kernel.weights))
    return trees.read(kernel, x, centre)


def both(kernel: Kernel | Embedded, x1: torch.Tensor, x2: torch.Tensor) -> tuple[Tree, list[torch.Tensor] | None]:
    """Return the tree with the points of the rows, and those of the columns; None where they are the same tensor."""
    centre = None if isinstance(kernel, Embedded) else _own_centre(kernel, x1)
    return read(kernel, x1, centre), None if x1 is x2 else read(kernel, x2, centre).points


def _own_centre(kernel: Kernel, x1: torch.Tensor) -> torch.Tensor:
    """Return the centre of the points of the rows, batch by batch, as stock has it.

    Stock forms differences for some families, so that a point that is far or no number is a matter of its own row and
    column; there the centre is a median, which such points do not move.
    """
    node = trees.form(kernel, keops=True)
    differences = node is not None and any(family(name).differences for name in trees.leaves(node))
    if not differences or not x1.shape[-2]:
        return centre_of(x1)
    return x1.detach().nanmedian(-2, keepdim=True).values.nan_to_num()


def node_of(kernel: Kernel | Embedded) -> Node | None:
    """Return the form of a kernel, or None if any part of it is unknown."""
    return kernel.node if isinstance(kernel, Embedded) else trees.form(kernel, keops=True)


def parameters(kernel: Kernel | Embedded) -> list[torch.Tensor]:
    """Return the hyperparameters of a kernel."""
    return [*kernel.shapes, *kernel.weights] if isinstance(kernel, Embedded) else list(kernel.parameters())


def key(kernel: Kernel | Embedded) -> Any:
    """Return a key of form, shapes and wanted gradients; read on every call, so cheap."""
    if not isinstance(kernel, Embedded):
        return trees.key(kernel)
    node, widths, shapes, weights = kernel
    return node, widths, *((t.shape, t.dtype, t.requires_grad) for t in (*shapes, *weights))


def plain(kernel: Embedded, dtype: torch.dtype) -> Kernel:
    """Return the gpytorch kernel that is the same function of the embedded points, cut off from any graph.

    Its pickle loads with gpytorch alone.
    """
    each = torch.arange(sum(kernel.widths), device="cpu").split(kernel.widths)
    dims = iter(each if len(each) > 1 else (None,))  # a single leaf takes all
    shapes, weights = iter(kernel.shapes), iter(kernel.weights)

    def made(node: Node) -> Kernel:
        if node.kind == "leaf":
            of = family(node.family)
            leaf = of.plain(dtype, *(() if of.shape is None else (next(shapes),)))
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
