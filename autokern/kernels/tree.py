"""Kernel trees: sums, products and scales of families, read from gpytorch kernels.

A tree is a `Node` (its form, hashable) and the tensors of its leaves and scales in order: weights, shapes, and points,
embedded so that a leaf is a function of their squared distances. Lengthscales, periods and active dimensions are thus
ordinary differentiable steps on ``n x d`` points, and only the ``n x n`` part needs closed forms. Kernels are
recognised by exact type, since a subclass may change the formula.

Autograd functions take flat lists of tensors: `apart` takes a tree apart, and `Parts` rebuilds it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import AdditiveKernel, ConstantKernel, Kernel, ProductKernel, ScaleKernel
from gpytorch.kernels.keops import KeOpsKernel

from autokern.kernels.family import OWN, Family, code_of, family, formula_of

_FEW = {True: 64**2, False: 200**2}  # pairs of points, with and without gradients, for which a choice takes too long
_MOST_DIFFERENCES = 2**24  # most elements of an array of all differences of points
BRANCHES = {AdditiveKernel: "sum", ProductKernel: "product"}
"""The kind of node of each gpytorch kernel with several children."""
_SHAPES = {"raw_lengthscale": (1, 0), "raw_period_length": (1, 0), "raw_alpha": (1,), "raw_constant": (1,),
           "raw_outputscale": ()}  # fmt: skip
"""Shapes of parameters after the batch; 0 stands for the number of lengthscales."""


class Node(NamedTuple):
    """The form of a tree."""

    kind: str  # "leaf", "constant", "scale", "sum" or "product"
    family: str = ""  # of a leaf
    children: tuple[Node, ...] = ()


class Tree(NamedTuple):
    """A form with its tensors, in order from left to right."""

    node: Node
    points: list[torch.Tensor]  # embedded points of the leaves, ``(..., n, d)``
    shapes: list[torch.Tensor]  # parameters of the leaves that have one, ``(..., 1, 1)``
    weights: list[torch.Tensor]  # output scales and constants, ``(...)``

    def each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Tree:
        """Return the tree with a function applied to each tensor."""
        return Tree(self.node, *([function(t) for t in part] for part in self[1:]))

    def at(self, places: torch.Tensor | slice) -> Tree:
        """Return the tree with the points at these indices; points have no batch."""
        return self._replace(points=[z[places] for z in self.points])


def form(kernel: Kernel, keops: bool = False) -> Node | None:
    """Return the form of a kernel, or None if any part of it is unsupported.

    The user of a KeOps kernel expects that no large ``n x n`` matrix is held. KeOps kernels are supported only with
    `keops`, for code that forms no matrix, or none larger than gpytorch would.
    """
    kinds: set[type] = set()
    node = described(kernel, keops, kinds)
    return node if node is not None and code_of(frozenset(kinds)).holds() else None


def described(kernel: Kernel, keops: bool, kinds: set[type]) -> Node | None:
    """Return the form of a kernel or None, whether or not its code is known, and add its classes to `kinds`."""
    kind, own = type(kernel), kernel.__dict__
    kinds.add(kind)
    if not OWN.isdisjoint(own):
        return None
    for name, tensor in own["_parameters"].items():
        sizes = [size or own.get("ard_num_dims") or 1 for size in _SHAPES.get(name, ())]
        if tensor is not None and name in _SHAPES and tensor.shape != (*own.get("_batch_shape", ()), *sizes):
            return None  # the library raises, or computes something else
    found = formula_of(kernel)
    if found is not None:
        return Node("leaf", found.name) if keops or not isinstance(kernel, KeOpsKernel) else None
    if kind is ConstantKernel:
        return Node("constant")
    if kind is ScaleKernel:
        inner = described(kernel.base_kernel, keops, kinds)
        return None if inner is None else Node("scale", children=(inner,))
    if kind not in BRANCHES:
        return None
    children = tuple(described(child, keops, kinds) for child in kernel.kernels)
    return None if None in children else Node(BRANCHES[kind], children=children)  # type: ignore[arg-type]


def are_few(rows: int, columns: int, graded: bool) -> bool:
    """Whether a candidate saves less than the choice takes, so that the library serves kernels in float64."""
    return rows * columns <= _FEW[graded]


def family_name(kernel: Kernel) -> str | None:
    """Return the family of a kernel that is one leaf, or one scaled leaf; None for all others."""
    node = form(kernel)
    inner = node.children[0] if node is not None and node.kind == "scale" else node
    return inner.family if inner is not None and inner.kind == "leaf" else None


def leaves(node: Node) -> list[str]:
    """Return the names of the families in a form, from left to right."""
    return [node.family] if node.kind == "leaf" else [name for child in node.children for name in leaves(child)]


def families_of(node: Node) -> list[Family]:
    """Return the families in a form, from left to right."""
    return list(map(family, leaves(node)))


def by_leaf(tree: Tree) -> Iterator[tuple[Family, torch.Tensor, torch.Tensor | None]]:
    """Yield for each leaf its family, its points, and its shape parameter or None."""
    shapes = iter(tree.shapes)
    for of, points in zip(families_of(tree.node), tree.points, strict=True):
        yield of, points, None if of.shape is None else next(shapes)


def peeled(tree: Tree) -> tuple[Tree, torch.Tensor | None]:
    """Return a tree without the scales at its root, and the product of these scales, None if there are none."""
    node, weights, scale = tree.node, list(tree.weights), None
    while node.kind == "scale":
        weight = weights.pop(0)
        scale, node = weight if scale is None else scale * weight, node.children[0]
    return Tree(node, tree.points, tree.shapes, weights), scale


def key(kernel: Kernel) -> Any:
    """Return a cache key of form, shapes and required gradients; computed at every call, so cheap."""
    own = kernel.__dict__
    parameters = tuple(
        (p.shape, p.dtype, p.requires_grad, p.device) for p in own["_parameters"].values() if p is not None
    )
    parts = own["_modules"]
    kind = kernel.__class__
    if kind is ScaleKernel:
        inner: Any = key(parts["base_kernel"])
    elif kind in BRANCHES:
        inner = tuple(key(child) for child in parts["kernels"])
    else:
        inner = own.get("nu")
    return (kind, parameters, own["_buffers"].get("active_dims") is None, OWN.isdisjoint(own), inner)


def centre_of(x: torch.Tensor) -> torch.Tensor:
    """Return the detached mean of points ``(..., n, d)``, shape ``(..., 1, d)``, or zeros for no points."""
    return x.detach().mean(-2, keepdim=True) if x.shape[-2] else x.new_zeros(x.shape[-1])


def read(kernel: Kernel, x: torch.Tensor, centre: torch.Tensor | None = None) -> Tree:
    """Return the tree of a kernel whose `form` is not None; all its tensors are differentiable.

    The root kernel's active dimensions must be selected already. `centre`, the `centre_of` these or the other points,
    is subtracted from the points, which changes no distance: points far from the origin keep their digits, and the tree
    shares no memory with the caller's points.
    """
    x = x if centre is None else x - centre
    parts: tuple[list[torch.Tensor], ...] = [], [], []
    return Tree(_collected(kernel, x, *parts), *parts)


def _collected(kernel: Kernel, x: torch.Tensor, points: list[Any], shapes: list[Any], weights: list[Any]) -> Node:
    """Return the form of a kernel, and append its tensors; no closure, whose cycle would hold them."""
    kind, parts = type(kernel), (points, shapes, weights)
    if kind is ScaleKernel:
        weights.append(kernel.outputscale)
        return Node("scale", "", (_collected(kernel.base_kernel, x, *parts),))
    if kind is ConstantKernel:
        weights.append(kernel.constant.squeeze(-1))
        return Node("constant")
    if kind in BRANCHES:
        chosen = [(child, child.active_dims) for child in kernel.kernels]
        inputs = [x if active is None else x.index_select(-1, active) for _, active in chosen]
        children = [_collected(child, own, *parts) for (child, _), own in zip(chosen, inputs, strict=True)]
        return Node(BRANCHES[kind], "", tuple(children))
    found = formula_of(kernel)
    assert found is not None
    points.append(found.embed(kernel, x))
    if found.shape is not None:
        shapes.append(found.shape.read(kernel))
    return Node("leaf", found.name)


def dense(tree: Tree, others: list[torch.Tensor] | None = None) -> torch.Tensor:
    """Return the kernel matrix by plain torch steps, differentiable to any order: the reference for all other ways."""
    columns: Sequence[torch.Tensor | None] = others or [None] * len(tree.points)
    us = (_square_distances(z, other) * of.gamma for (of, z, _), other in zip(by_leaf(tree), columns, strict=True))
    return by_formula(tree.node, us, tree.shapes, [w[..., None, None] for w in tree.weights], lambda of: of)


def by_formula(
    node: Node, us: Iterable[Any], shapes: Iterable[Any], weights: Iterable[Any],
    formula: Callable[[Family], Callable[..., Any]] = lambda of: of.formula,
) -> Any:  # fmt: skip
    """Evaluate a form on tensors or KeOps' LazyTensors: u of each leaf from left to right, shapes and weights."""
    return _valued(node, iter(us), iter(shapes), iter(weights), formula)


def _valued(node: Node, *given: Any) -> Any:
    distances, left, scales, formula = given
    if node.kind == "leaf":
        of = family(node.family)
        return formula(of)(next(distances), *(() if of.shape is None else (next(left),)))
    if node.kind == "constant":
        return next(scales)
    if node.kind == "scale":
        return next(scales) * _valued(node.children[0], *given)
    values = (_valued(child, *given) for child in node.children)
    return functools.reduce(operator.add if node.kind == "sum" else operator.mul, values)


def diagonal(tree: Tree, shape: torch.Size) -> torch.Tensor:
    """Return the variances of points under a tree, expanded to `shape`."""
    weights = (w[..., None] for w in tree.weights)
    found = by_formula(tree.node, tree.points, tree.shapes, weights, lambda of: lambda *u: 1.0)  # at distance zero
    return found.expand(shape) if isinstance(found, torch.Tensor) else tree.points[0].new_full(shape, found)


def _square_distances(z: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """Return the squared distances of points by differences, or expanded if differences need too much memory."""
    other = z if columns is None else columns
    if z.shape[-2] * other.numel() <= _MOST_DIFFERENCES:
        return (z.unsqueeze(-2) - other.unsqueeze(-3)).square().sum(-1)
    dtype, centre = z.dtype, centre_of(z).double()
    z, other = z.double() - centre, other.double() - centre
    norms, other_norms = z.square().sum(-1, keepdim=True), other.square().sum(-1, keepdim=True)
    square = (norms + other_norms.mT - 2 * (z @ other.mT)).clamp_min(0).to(dtype)
    return square * (1 - torch.eye(z.shape[-2], dtype=dtype, device=z.device)) if columns is None else square


class Parts(NamedTuple):
    """The form of a tree and the number of its tensors of each kind, in the order of `apart`."""

    node: Node
    points: int  # of the rows
    columns: int | None  # None for the same points as the rows
    shapes: int
    weights: int

    @property
    def dims(self) -> list[int]:
        """The number of dimensions of each tensor after its batch dimensions."""
        return [2] * (self.points + (self.columns or 0) + self.shapes) + [0] * self.weights

    def pair(self, tensors: Sequence[Any]) -> tuple[Tree, list[Any] | None]:
        """Return tensors, or values in their place, as a tree and the columns' points."""
        left = iter(tensors)
        points, columns, shapes, weights = (list(itertools.islice(left, count or 0)) for count in self[1:])
        return Tree(self.node, points, shapes, weights), None if self.columns is None else columns

    def tree(self, tensors: Sequence[Any]) -> Tree:
        """Return tensors as a tree."""
        return self.pair(tensors)[0]

    def dense(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the kernel matrix of tensors by plain torch steps."""
        return dense(*self.pair(tensors))


def apart(tree: Tree, others: list[torch.Tensor] | None = None) -> tuple[Parts, list[torch.Tensor]]:
    """Return the form and the tensors of a tree with its columns' points."""
    columns = None if others is None else len(others)
    parts = Parts(tree.node, len(tree.points), columns, len(tree.shapes), len(tree.weights))
    return parts, [*tree.points, *(others or ()), *tree.shapes, *tree.weights]


def flattened(tensors: list[torch.Tensor], dims: list[int]) -> tuple[torch.Size, list[torch.Tensor]]:
    """Return the common batch shape of tensors, and the tensors with it broadcast and flattened to one dimension.

    `dims` is each tensor's number of dimensions after its batch. Without any batch, the tensors are unchanged.
    """
    if [t.dim() for t in tensors] == dims:
        return torch.Size(), tensors
    leads = [t.shape[: t.dim() - dim] for t, dim in zip(tensors, dims, strict=True)]
    shape = torch.broadcast_shapes(*leads)
    batch = torch.Size([shape.numel()])

    def flat(t: torch.Tensor, lead: torch.Size) -> torch.Tensor:
        own = t.shape[len(lead) :]
        return t if lead == batch else t.expand(*shape, *own).reshape(*batch, *own)

    return shape, [flat(t, lead) for t, lead in zip(tensors, leads, strict=True)]
