"""The log density on a grid, under a kernel that is a product over its axes: a Kronecker product of small matrices.

With ``K = scale (x) T_j`` and ``T_j = Q_j diag(l_j) Q_j'`` all of it is elementwise in the basis of all Q_j (Saatçi
2011, "Scalable inference for structured Gaussian process models", section 5.2). Each T_j is the kernel on one line of
the grid, so that every one has the variance of a point as a factor: the scale is that variance to the power 1 - axes.
Gradients by T_j are products in that basis, without differences of eigenvalues. Second derivatives go through the plain
formula.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from gpytorch.kernels import ConstantKernel, Kernel, RBFKernel, ScaleKernel

from autokern.core.autograd import each_cotangent, plain_gradients
from autokern.gp import likelihood, structure
from autokern.gp.marginal import Marginal
from autokern.gp.repeats import is_clear
from autokern.gp.structure import Grid, Structure
from autokern.kernels import tree as trees
from autokern.kernels.far import centre_of

__all__ = ["found", "log_prob", "structure_of"]

_LOG_2_PI = math.log(2 * math.pi)
_Columns = list[set[int]]


def found(kernel: Kernel, x: torch.Tensor) -> Grid | None:
    """Return the grid that points are to a kernel, which is a tree; None where they are none."""
    seen = structure.of(x)
    return None if seen is None else _on(seen, kernel)


def structure_of(kernel: Kernel, x: torch.Tensor) -> tuple[int, bool]:
    """Return how many rows the largest factor takes by the structure of points ``(..., n, d)``, and whether of a grid.

    Those are the values along the longest axis of a grid, or else the points that differ.
    """
    seen = structure.of(x)
    grid = None if seen is None else _on(seen, kernel)
    if seen is None or grid is None:
        return x.shape[-2] if seen is None else seen.distinct, False
    return max(grid.shape), True


def _on(seen: Structure, kernel: Kernel) -> Grid | None:
    if not seen.may_be_grid:
        return None
    try:
        groups = _groups(kernel, range(seen.points.shape[1]))
    except IndexError:  # active dimensions that there are not
        return None
    return seen.grid(tuple(sorted(tuple(sorted(group)) for group in groups)))


def _groups(kernel: Kernel, columns: Any) -> _Columns:
    """Return the columns of the points in groups over which the kernel is a product."""
    kind = type(kernel)
    if kind is ConstantKernel:
        return []
    if kind is ScaleKernel:
        return _groups(kernel.base_kernel, columns)
    if kind not in trees.BRANCHES:
        return _joined([{column} for column in columns] if kind is RBFKernel else [set(columns)])
    several: _Columns = []
    for child in kernel.kernels:
        active = child.active_dims
        several += _groups(child, columns if active is None else [columns[at] for at in active.tolist()])
    return _joined(several if trees.BRANCHES[kind] == "product" else [set().union(*several)])


def _joined(groups: _Columns) -> _Columns:
    """Return groups of which no two have a column in common."""
    apart: _Columns = []
    for group in groups:
        meeting = [one for one in apart if one & group]
        apart = [one for one in apart if not one & group] + [group.union(*meeting)]
    return apart


def log_prob(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor | None:
    """Return the log density of a value ``(n,)`` under a marginal with a kernel that is a tree, and noise ``(1,)``.

    None is returned where the points are no grid, and where `is_clear` says no.
    """
    x, kernel, noise = marginal.lazy.x1, marginal.lazy.kernel, marginal.noise
    grid = found(kernel, x)
    if grid is None or noise.shape != (1,):
        return None
    read = [_line(kernel, x.detach().index_select(0, line).double()) for line in grid.lines]
    variance = trees.diagonal(kernel, x[:1], torch.Size([1]))
    if not all(is_clear(tree, variance, noise, len(x), exact) for tree in read):
        return None
    factors = [trees.dense(tree) for tree in read]
    residual = (value - marginal.distribution.loc).index_select(0, grid.order)
    scale = variance.double() ** (1 - len(factors))
    basis = _basis([factor.detach() for factor in factors], scale.item(), noise.item())
    if basis is None:
        return None
    out: torch.Tensor = _LogProb.apply(basis, scale, noise.double(), residual.double(), *factors)
    return out.to(x.dtype)


def _line(kernel: Kernel, points: torch.Tensor) -> trees.Tree:
    return trees.read(kernel, points, centre_of(points))


class _Basis:
    """The basis in which the covariance is diagonal, and its diagonal without and with noise, of the grid's shape."""

    def __init__(self, vectors: list[torch.Tensor], values: list[torch.Tensor], scale: float, noise: float) -> None:
        self.vectors, self.values, self.scale = vectors, values, scale
        self.product = functools.reduce(torch.mul, (self.along(at) for at in range(len(values))))
        self.noisy = self.product * scale + noise

    def along(self, at: int) -> torch.Tensor:
        """Return the eigenvalues along an axis so that they broadcast over the grid."""
        return self.values[at].view([-1 if axis == at else 1 for axis in range(len(self.values))])

    def others(self, at: int) -> torch.Tensor:
        """Return the products of the eigenvalues along all other axes."""
        rest = [self.along(axis) for axis in range(len(self.values)) if axis != at]
        return functools.reduce(torch.mul, rest).expand(self.product.shape)

    def turned(self, a: torch.Tensor, back: bool = False) -> torch.Tensor:
        """Return an array on the grid in the basis, or out of it."""
        for vectors in self.vectors:
            a = torch.tensordot(a, vectors.mT if back else vectors, dims=([0], [0]))  # the axis becomes the last one
        return a


def _basis(factors: list[torch.Tensor], scale: float, noise: float) -> _Basis | None:
    """Return the basis, None where the covariance is not positive definite in it, or no number."""
    if not all(torch.isfinite(factor).all() for factor in factors):
        return None
    pairs = [torch.linalg.eigh(factor) for factor in factors]
    made = _Basis([q for _, q in pairs], [values for values, _ in pairs], scale, noise)
    return made if made.noisy.amin() > 0 and torch.isfinite(made.noisy).all() else None


class _LogProb(torch.autograd.Function):
    """The density with closed-form first derivatives by scale, noise, residual and factors."""

    @staticmethod
    def forward(ctx, basis, scale, noise, residual, *factors):  # type: ignore[no-untyped-def]
        white = basis.turned(residual.view(basis.product.shape))
        ctx.basis, ctx.solved = basis, white / basis.noisy
        ctx.save_for_backward(scale, noise, residual, *factors)
        total = (white * ctx.solved).sum() + basis.noisy.log().sum() + residual.numel() * _LOG_2_PI
        return -0.5 * total

    @staticmethod
    @each_cotangent
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return None, *plain_gradients(_plain, tensors, wanted, grad)
        pairs = zip(_slopes(ctx), tensors, wanted, strict=True)
        return None, *((slope * grad).view(of.shape) if want else None for slope, of, want in pairs)


def _slopes(ctx: Any) -> list[torch.Tensor]:
    """Return the derivatives by scale, noise, residual and factors."""
    basis, solved = ctx.basis, ctx.solved
    inverse = basis.noisy.reciprocal()
    spread = 0.5 * (solved.square() - inverse)  # by the diagonal in the basis
    slopes = [(spread * basis.product).sum(), spread.sum(), -basis.turned(solved, back=True).flatten()]
    for axis, vectors in enumerate(basis.vectors):
        others = basis.others(axis)
        left, right = (a.movedim(axis, 0).flatten(1) for a in (solved, solved * others))
        middle = left @ right.mT
        middle.diagonal().sub_((inverse * others).movedim(axis, 0).flatten(1).sum(1))
        slopes.append(vectors @ middle @ vectors.mT * (0.5 * basis.scale))
    return slopes


def _plain(scale: torch.Tensor, noise: torch.Tensor, residual: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
    return likelihood.of_matrix(scale * functools.reduce(torch.kron, factors), noise, residual)
