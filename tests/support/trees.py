"""What the tests of densities of trees share: kernels, and a tree of each with noise and residual."""

import torch
from gpytorch.kernels import ConstantKernel, MaternKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel

from autokern.kernels import tree as trees

KERNELS = {
    "matern52": lambda: ScaleKernel(MaternKernel(2.5, ard_num_dims=2)),
    "matern12": lambda: ScaleKernel(MaternKernel(0.5)),
    "bare": RBFKernel,
    "rbf": lambda: ScaleKernel(RBFKernel()),
    "scales": lambda: ScaleKernel(ScaleKernel(RQKernel())),
    "sum": lambda: ScaleKernel(MaternKernel(1.5)) + ScaleKernel(RBFKernel(active_dims=[1])),
    "product": lambda: ScaleKernel(MaternKernel(1.5, active_dims=[0]) * RBFKernel(active_dims=[1])),
    "periodic": lambda: ScaleKernel(PeriodicKernel(active_dims=[0]) * RBFKernel(active_dims=[1])) + ConstantKernel(),
}


def problem(kernel, n, noise=0.05, each=False, scale=1.0):
    """Return a tree, noise and residual whose leaves require gradients."""
    draw = torch.Generator().manual_seed(n)
    x = torch.rand(n, 2, generator=draw, dtype=torch.float64)
    residual = (6 * x[:, 0]).sin() + 0.2 * torch.randn(n, generator=draw, dtype=torch.float64)
    with torch.no_grad():
        tree = trees.read(KERNELS[kernel]().double(), 2 * x)
    tree = tree._replace(weights=[weight * scale for weight in tree.weights])
    tree = tree.each(lambda t: t.detach().clone().requires_grad_())
    variances = noise * scale * (1 + torch.rand(n if each else 1, generator=draw, dtype=torch.float64))
    return tree, variances.requires_grad_(), (residual * scale**0.5).requires_grad_()


def leaves(tree, noise, residual):
    return [noise, residual, *tree.points, *tree.shapes, *tree.weights]
