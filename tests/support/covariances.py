"""What the tests of kernel matrices share: one leaf and its scale as tensors, its matrix by each way, and the truth."""

from typing import NamedTuple

import torch
from gpytorch.kernels import ScaleKernel

from autokern.kernels import embedded
from autokern.kernels import matrix as matrices
from autokern.kernels.family import Family, formula_of
from autokern.kernels.matrix import same_points
from autokern.kernels.tree import Node, Tree

LAYOUTS = ("whole", "tiled")


class Covariance(NamedTuple):
    """A family, its lengthscale ``(..., 1, d or 1)``, and its outputscale ``(...)`` or None."""

    family: Family
    lengthscale: torch.Tensor
    outputscale: torch.Tensor | None


def recognise(kernel):
    """Read them off a kernel."""
    scale, base = (kernel.outputscale, kernel.base_kernel) if type(kernel) is ScaleKernel else (None, kernel)
    return Covariance(formula_of(base), base.lengthscale, scale)


def pair(covariance, x1, x2):
    """The tree, the points of the columns, and whether both are equal, as `kernels.matrix.both` reads them."""
    of, lengthscale, scale = covariance
    same = same_points(x1, x2)
    one = x1 is x2 or (same and not (x1.requires_grad or x2.requires_grad))
    centre = embedded._common(x1, None if one else x2)
    leaf = Node("leaf", of.name)
    node, weights = (leaf, []) if scale is None else (Node("scale", "", (leaf,)), [scale])
    tree = Tree(node, [(x1 - centre) / lengthscale], [], weights)
    return tree, None if one else [(x2 - centre) / lengthscale], same


def matrix(covariance, x1, x2, layout="whole"):
    return matrices.matrix(*pair(covariance, x1, x2), layout)


def by_cdist(covariance, x1, x2):
    return matrices.by_cdist(*pair(covariance, x1, x2)[:2])


def reference(covariance, x1, x2):
    """The truth in float64, by explicit differences."""
    difference = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    scaled = difference / covariance.lengthscale.unsqueeze(-2)
    k = covariance.family(scaled.square().sum(-1) * covariance.family.gamma)
    return k if covariance.outputscale is None else k * covariance.outputscale[..., None, None]
