"""Kernels of every form that arrays know, by name, and models of them."""

import functools

import torch
from botorch.models.kernels.categorical import CategoricalKernel
from botorch.models.kernels.downsampling import DownsamplingKernel
from botorch.models.kernels.exponential_decay import ExponentialDecayKernel
from botorch.models.kernels.linear_truncated_fidelity import LinearTruncatedFidelityKernel
from botorch.models.kernels.positive_index import PositiveIndexKernel
from gpytorch import kernels as k
from gpytorch.constraints import GreaterThan, Interval, LessThan, Positive
from gpytorch.priors import (
    GammaPrior,
    HalfNormalPrior,
    LogNormalPrior,
    NormalPrior,
    SmoothedBoxPrior,
    UniformPrior,
)
from support.densities import D

gamma = functools.partial(GammaPrior, 3.0, 6.0)


def periodic(**options):
    kernel = k.PeriodicKernel(**options)
    kernel.period_length = 1.7
    return kernel


def mixture(count=3, **options):
    torch.manual_seed(count)
    kernel = k.SpectralMixtureKernel(count, **options)
    kernel.initialize(mixture_weights=torch.rand(count), mixture_means=torch.rand(count, 1, kernel.ard_num_dims))
    kernel.mixture_scales = 0.1 + 0.3 * torch.rand(count, 1, kernel.ard_num_dims)
    return kernel


def on(dims, kernel):
    kernel.active_dims = torch.tensor(dims)
    return kernel


KERNELS = {
    "rbf": k.RBFKernel,
    "ard": lambda: k.RBFKernel(ard_num_dims=D),
    "matern32": lambda: k.MaternKernel(1.5),
    "matern52": lambda: k.ScaleKernel(k.MaternKernel(2.5, ard_num_dims=D)),
    "scaled twice": lambda: k.ScaleKernel(k.ScaleKernel(k.RBFKernel())),
    "active": lambda: k.RBFKernel(active_dims=[2, 0], ard_num_dims=2),
    "scaled active": lambda: k.ScaleKernel(k.RBFKernel(active_dims=[3], ard_num_dims=1)),
    "sum of some": lambda: (
        k.ScaleKernel(k.RBFKernel(active_dims=[0, 1])) + k.MaternKernel(1.5, active_dims=[3, 1], ard_num_dims=2)
    ),
    "sum of three": lambda: k.AdditiveKernel(
        k.RBFKernel(), k.MaternKernel(1.5), k.ScaleKernel(k.RBFKernel(active_dims=[1]))
    ),
    "product of some": lambda: k.ScaleKernel(
        k.ProductKernel(k.RBFKernel(active_dims=[0]), k.MaternKernel(2.5), k.RBFKernel(ard_num_dims=D))
    ),
    "nested and some": lambda: on(
        [1, 3, 0], k.AdditiveKernel(k.RBFKernel(), k.ProductKernel(k.RBFKernel(active_dims=[2]), k.MaternKernel(1.5)))
    ),
    "lognormal": lambda: k.RBFKernel(ard_num_dims=D, lengthscale_prior=LogNormalPrior(0.3, 1.7)),
    "gamma": lambda: k.ScaleKernel(
        k.MaternKernel(2.5, lengthscale_prior=gamma()), outputscale_prior=GammaPrior(2.0, 0.15)
    ),
    "normal": lambda: k.RBFKernel(lengthscale_prior=NormalPrior(1.0, 0.5)),
    "box": lambda: k.RBFKernel(ard_num_dims=D, lengthscale_prior=SmoothedBoxPrior(0.75, 0.9, sigma=0.1)),
    "uniform": lambda: k.RBFKernel(lengthscale_prior=UniformPrior(0.0, 30.0)),
    "half normal": lambda: periodic(ard_num_dims=D, period_length_prior=HalfNormalPrior(0.7)),
    "greater": lambda: k.RBFKernel(ard_num_dims=D, lengthscale_constraint=GreaterThan(2.5e-2)),
    "no transform": lambda: k.RBFKernel(lengthscale_constraint=GreaterThan(2.5e-2, transform=None, initial_value=0.7)),
    "interval": lambda: k.RBFKernel(lengthscale_constraint=Interval(0.1, 3.0)),
    "less": lambda: k.ScaleKernel(k.RBFKernel(), outputscale_constraint=LessThan(9.0)),
    "exponential": lambda: k.RBFKernel(lengthscale_constraint=Positive(transform=torch.exp, inv_transform=torch.log)),
    "spectral mixture": lambda: mixture(active_dims=[2]),
    "spectral mixture of each": lambda: mixture(2, ard_num_dims=D),
    "spectral mixture in a sum": lambda: k.ScaleKernel(mixture(1, active_dims=[3])) * k.RBFKernel() + k.LinearKernel(),
    "matern12": lambda: k.ScaleKernel(k.MaternKernel(0.5)),
    "rq": lambda: k.ScaleKernel(k.RQKernel(ard_num_dims=D)),
    "rq of some": lambda: k.RQKernel(active_dims=[2, 1], alpha_constraint=Interval(0.1, 9.0)),
    "periodic": periodic,
    "periodic of each": lambda: k.ScaleKernel(periodic(ard_num_dims=D)),
    "locally periodic": lambda: k.ScaleKernel(periodic(active_dims=[1]) * k.RBFKernel(active_dims=[1])),
    "cosine": lambda: k.CosineKernel(active_dims=[0]) + k.RBFKernel(),
    "linear": k.LinearKernel,
    "linear of each": lambda: k.LinearKernel(ard_num_dims=D),
    "linear in a sum": lambda: (
        k.ScaleKernel(k.RBFKernel(ard_num_dims=D)) + k.ScaleKernel(k.LinearKernel(active_dims=[3, 1]))
    ),
    "linear in a product": lambda: k.ScaleKernel(k.RBFKernel() * k.LinearKernel(active_dims=[0])),
    "nested": lambda: k.AdditiveKernel(k.RBFKernel(), k.AdditiveKernel(k.LinearKernel(active_dims=[1]), k.RQKernel())),
    "polynomial": lambda: k.ScaleKernel(k.PolynomialKernel(3, active_dims=[1, 3])),
    "piecewise": lambda: k.ScaleKernel(k.PiecewisePolynomialKernel(2, ard_num_dims=D)),
    "piecewise of some": lambda: k.RBFKernel() + k.PiecewisePolynomialKernel(1, active_dims=[3, 1]),
    "very smooth piecewise": lambda: k.PiecewisePolynomialKernel(3),
    "constant": lambda: k.RBFKernel() + k.ConstantKernel(),
    "a product of one": lambda: k.ScaleKernel(
        k.AdditiveKernel(k.ProductKernel(k.RBFKernel()), k.ProductKernel(k.MaternKernel()))
    ),
    "a column twice": lambda: k.MaternKernel(0.5, active_dims=[0, 0]) + k.PolynomialKernel(3, active_dims=[1, 1]),
    "truncated": lambda: k.ScaleKernel(LinearTruncatedFidelityKernel([2], dimension=D, power_prior=gamma())),
    "truncated of two": lambda: LinearTruncatedFidelityKernel([3, 0], dimension=D, nu=1.5),
    "truncated of some": lambda: (
        LinearTruncatedFidelityKernel([1], active_dims=[3, 2, 0], power_constraint=Interval(0.5, 9.0)) + k.RBFKernel()
    ),
    "truncated twice": lambda: k.ProductKernel(
        *(LinearTruncatedFidelityKernel([0, i], dimension=D, power_prior=gamma()) for i in (1, 3))
    ),
    "truncated of its own kernels": lambda: LinearTruncatedFidelityKernel(
        [1, 2],
        dimension=D,
        covar_module_unbiased=k.ScaleKernel(k.RBFKernel(active_dims=[1])),
        covar_module_biased=k.LinearKernel() + k.MaternKernel(1.5),
    ),
    "downsampling": lambda: (
        k.RBFKernel(active_dims=[0, 2])
        * DownsamplingKernel(power_prior=gamma(), offset_prior=gamma(), active_dims=[3])
        * DownsamplingKernel(active_dims=[1])
    ),
    "decay": lambda: k.ScaleKernel(k.RBFKernel() * ExponentialDecayKernel(power_prior=gamma(), active_dims=[1])),
    "constant in a product": lambda: k.RBFKernel() * k.ConstantKernel(constant_prior=GammaPrior(2.0, 1.0)),
}
TASKS = {
    "index": lambda: k.RBFKernel(active_dims=[0, 1]) * k.IndexKernel(3, rank=2, active_dims=[3]),
    "positive index": lambda: k.MaternKernel(1.5, active_dims=[0, 1]) * PositiveIndexKernel(3, rank=1, active_dims=[3]),
    "not of unit variance": lambda: (
        k.RBFKernel() * PositiveIndexKernel(3, 3, unit_scale_for_target=False, active_dims=[3])
    ),
    "another unit": lambda: k.RBFKernel() * PositiveIndexKernel(3, 2, target_task_index=2, active_dims=[3]),
    "categories": lambda: (
        k.ScaleKernel(CategoricalKernel(active_dims=[3, 2], ard_num_dims=2)) + k.RBFKernel(active_dims=[0])
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
