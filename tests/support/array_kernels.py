"""Kernels of every form that arrays know, by name, and models of them."""

from __future__ import annotations

import torch
from botorch.models.kernels.categorical import CategoricalKernel
from botorch.models.kernels.positive_index import PositiveIndexKernel
from gpytorch.constraints import GreaterThan, Interval, LessThan, Positive
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    CosineKernel,
    IndexKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    PolynomialKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior
from support.densities import D


def periodic(**options):
    kernel = PeriodicKernel(**options)
    kernel.period_length = 1.7
    return kernel


def mixture(count=3, **options):
    torch.manual_seed(count)
    kernel = SpectralMixtureKernel(count, **options)
    kernel.initialize(mixture_weights=torch.rand(count), mixture_means=torch.rand(count, 1, kernel.ard_num_dims))
    kernel.mixture_scales = 0.1 + 0.3 * torch.rand(count, 1, kernel.ard_num_dims)
    return kernel


def on(dims, kernel):
    kernel.active_dims = torch.tensor(dims)
    return kernel


KERNELS = {
    "rbf": RBFKernel,
    "ard": lambda: RBFKernel(ard_num_dims=D),
    "matern32": lambda: MaternKernel(1.5),
    "matern52": lambda: ScaleKernel(MaternKernel(2.5, ard_num_dims=D)),
    "scaled twice": lambda: ScaleKernel(ScaleKernel(RBFKernel())),
    "active": lambda: RBFKernel(active_dims=[2, 0], ard_num_dims=2),
    "scaled active": lambda: ScaleKernel(RBFKernel(active_dims=[3], ard_num_dims=1)),
    "sum of some": lambda: (
        ScaleKernel(RBFKernel(active_dims=[0, 1])) + MaternKernel(1.5, active_dims=[3, 1], ard_num_dims=2)
    ),
    "sum of three": lambda: AdditiveKernel(RBFKernel(), MaternKernel(1.5), ScaleKernel(RBFKernel(active_dims=[1]))),
    "product of some": lambda: ScaleKernel(
        ProductKernel(RBFKernel(active_dims=[0]), MaternKernel(2.5), RBFKernel(ard_num_dims=D))
    ),
    "nested and some": lambda: on(
        [1, 3, 0], AdditiveKernel(RBFKernel(), ProductKernel(RBFKernel(active_dims=[2]), MaternKernel(1.5)))
    ),
    "lognormal": lambda: RBFKernel(ard_num_dims=D, lengthscale_prior=LogNormalPrior(0.3, 1.7)),
    "gamma": lambda: ScaleKernel(
        MaternKernel(2.5, lengthscale_prior=GammaPrior(3.0, 6.0)), outputscale_prior=GammaPrior(2.0, 0.15)
    ),
    "normal": lambda: RBFKernel(lengthscale_prior=NormalPrior(1.0, 0.5)),
    "greater": lambda: RBFKernel(ard_num_dims=D, lengthscale_constraint=GreaterThan(2.5e-2)),
    "no transform": lambda: RBFKernel(lengthscale_constraint=GreaterThan(2.5e-2, transform=None, initial_value=0.7)),
    "interval": lambda: RBFKernel(lengthscale_constraint=Interval(0.1, 3.0)),
    "less": lambda: ScaleKernel(RBFKernel(), outputscale_constraint=LessThan(9.0)),
    "exponential": lambda: RBFKernel(lengthscale_constraint=Positive(transform=torch.exp, inv_transform=torch.log)),
    "spectral mixture": lambda: mixture(active_dims=[2]),
    "spectral mixture of each": lambda: mixture(2, ard_num_dims=D),
    "spectral mixture in a sum": lambda: ScaleKernel(mixture(1, active_dims=[3])) * RBFKernel() + LinearKernel(),
    "matern12": lambda: ScaleKernel(MaternKernel(0.5)),
    "rq": lambda: ScaleKernel(RQKernel(ard_num_dims=D)),
    "rq of some": lambda: RQKernel(active_dims=[2, 1], alpha_constraint=Interval(0.1, 9.0)),
    "periodic": periodic,
    "periodic of each": lambda: ScaleKernel(periodic(ard_num_dims=D)),
    "locally periodic": lambda: ScaleKernel(periodic(active_dims=[1]) * RBFKernel(active_dims=[1])),
    "cosine": lambda: CosineKernel(active_dims=[0]) + RBFKernel(),
    "linear": LinearKernel,
    "linear of each": lambda: LinearKernel(ard_num_dims=D),
    "linear in a sum": lambda: ScaleKernel(RBFKernel(ard_num_dims=D)) + ScaleKernel(LinearKernel(active_dims=[3, 1])),
    "linear in a product": lambda: ScaleKernel(RBFKernel() * LinearKernel(active_dims=[0])),
    "nested": lambda: AdditiveKernel(RBFKernel(), AdditiveKernel(LinearKernel(active_dims=[1]), RQKernel())),
    "polynomial": lambda: ScaleKernel(PolynomialKernel(3, active_dims=[1, 3])),
    "piecewise": lambda: ScaleKernel(PiecewisePolynomialKernel(2, ard_num_dims=D)),
    "piecewise of some": lambda: RBFKernel() + PiecewisePolynomialKernel(1, active_dims=[3, 1]),
    "very smooth piecewise": lambda: PiecewisePolynomialKernel(3),
    "constant": lambda: RBFKernel() + ConstantKernel(),
    "a product of one": lambda: ScaleKernel(AdditiveKernel(ProductKernel(RBFKernel()), ProductKernel(MaternKernel()))),
    "a column twice": lambda: MaternKernel(0.5, active_dims=[0, 0]) + PolynomialKernel(3, active_dims=[1, 1]),
    "constant in a product": lambda: RBFKernel() * ConstantKernel(constant_prior=GammaPrior(2.0, 1.0)),
}
TASKS = {
    "index": lambda: RBFKernel(active_dims=[0, 1]) * IndexKernel(3, rank=2, active_dims=[3]),
    "positive index": lambda: MaternKernel(1.5, active_dims=[0, 1]) * PositiveIndexKernel(3, rank=1, active_dims=[3]),
    "not of unit variance": lambda: (
        RBFKernel() * PositiveIndexKernel(3, 3, unit_scale_for_target=False, active_dims=[3])
    ),
    "another unit": lambda: RBFKernel() * PositiveIndexKernel(3, 2, target_task_index=2, active_dims=[3]),
    "categories": lambda: (
        ScaleKernel(CategoricalKernel(active_dims=[3, 2], ard_num_dims=2)) + RBFKernel(active_dims=[0])
    ),
    "categories alike": lambda: CategoricalKernel(active_dims=[2, 3], lengthscale_constraint=GreaterThan(1e-6)),
}
"""Those that take the last two columns for numbers of categories and of tasks."""
KERNELS |= TASKS


def tasks(mll, *values):
    """Let columns of a model's points hold as many numbers each as told."""
    x = mll.model.train_inputs[0].clone()
    for column, count in values:
        x[:, column] = torch.arange(len(x)) % count
    mll.model.set_train_data(x, strict=False)
    return mll


def of_kernel(name, made, **options):
    """What `made` makes of a kernel, with points that suit it."""
    mll = made(KERNELS[name](), **options)
    return tasks(mll, (2, 2), (3, 3)) if name in TASKS else mll
