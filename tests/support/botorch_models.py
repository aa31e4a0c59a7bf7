"""Small models of BoTorch by name, with hyperparameters off their defaults: kernels, outputs, tasks and categories."""

import copy
import functools
import types
from unittest import mock

import numpy as np
import torch
from botorch.models import MixedSingleTaskGP, MultiTaskGP, SingleTaskGP, SingleTaskMultiFidelityGP, fully_bayesian
from botorch.models.kernels import CategoricalKernel
from botorch.models.map_saas import EnsembleMapSaasSingleTaskGP
from botorch.models.transforms import Normalize
from botorch.models.utils.gpytorch_modules import get_matern_kernel_with_gamma_prior
from botorch.optim.closures import get_loss_closure_with_grads
from gpytorch import kernels
from gpytorch.kernels import IndexKernel, LinearKernel, MaternKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.means import ConstantMean, LinearMean, ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood

from autokern.hooks import later

later.look()  # or the first closure of a process, which no other call came before, is the library's own

D = 3
F64 = {"dtype": torch.float64}


def data(n=15, outputs=1):
    generator = torch.Generator().manual_seed(n)
    x = torch.rand(n, D, generator=generator, **F64)
    y = torch.stack([(x * (k + 1)).sum(-1).sin() for k in range(outputs)], -1)
    y = y + 0.1 * torch.randn(y.shape, generator=generator, **F64)
    return x, (y - y.mean(0)) / y.std(0) if n > 1 else y


def moved(model):
    """Give every hyperparameter a value of its own."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.rand(p.shape, generator=generator, **F64))
    return model


def closure(model):
    """A model's marginal likelihood, its parameters that want gradients, and BoTorch's closure of these."""
    mll = ExactMarginalLogLikelihood(model.likelihood, model).train()
    parameters = {name: p for name, p in mll.named_parameters() if p.requires_grad}
    return mll, parameters, get_loss_closure_with_grads(mll, parameters)


def with_kernel(kernel, n=15, **more):
    return lambda: moved(SingleTaskGP(*data(n), covar_module=kernel(), **more))


def of_two(kernel):
    two = torch.Size([2])
    return ScaleKernel(kernel(ard_num_dims=D, batch_shape=two), batch_shape=two)


def single(outputs=1, n=15, **more):
    return lambda: moved(SingleTaskGP(*data(n, outputs), **copy.deepcopy(more)))


def of_tasks(values=(0, 1, 2), column=3, **more):
    x, y = data()
    tasks = torch.tensor(values, **F64)[torch.arange(15) % len(values), None]

    def make():
        torch.manual_seed(0)  # covariances of tasks start at random
        return moved(
            MultiTaskGP(torch.cat([x[:, :column], tasks, x[:, column:]], -1), y, column, **copy.deepcopy(more))
        )

    return make


def of_fidelities(outputs=1, **more):
    x, y = data(outputs=outputs)
    x[:, 1:] = (2 * x[:, 1:]).round() / 2
    return lambda: moved(SingleTaskMultiFidelityGP(x, y, **more))


def of_categories():
    x, y = data()
    return torch.cat([x[:, :1], torch.arange(15)[:, None] % 2, torch.arange(15)[:, None] % 3], -1), y


def of_a_table():
    x, y = data()
    x[:, 1] = torch.arange(15) % 3
    torch.manual_seed(0)
    return SingleTaskGP(x, y, covar_module=RBFKernel(active_dims=[0, 2]) * IndexKernel(3, 2, active_dims=[1]))


def linear_mean(**more):
    torch.manual_seed(0)  # weights start at random
    return LinearMean(D, **more)


def of_samples(kind=fully_bayesian.SaasFullyBayesianSingleTaskGP, **more):
    """A fully Bayesian model of four samples; JAX, which only draws them, is not needed."""
    x, y = data()
    of_jax = {"_HAS_JAX": True, "jnp": types.SimpleNamespace(array=np.array)}
    with mock.patch.multiple(fully_bayesian, create=True, **of_jax):
        model = kind(x, y, **copy.deepcopy(more))
    generator = torch.Generator().manual_seed(3)
    drawn = {name: torch.rand(4, generator=generator, **F64) for name in ("outputscale", "mean", "noise")}
    model.load_mcmc_samples({"lengthscale": 0.3 + torch.rand(4, D, generator=generator, **F64), **drawn})
    return model


def ensemble():
    return moved(EnsembleMapSaasSingleTaskGP(*data(), num_taus=3))


KNOWN = torch.full((15, 1), 0.02, **F64)
OF_OTHER_KERNELS = {
    "rough": with_kernel(lambda: ScaleKernel(MaternKernel(0.5, ard_num_dims=D))),
    "rough in a product": with_kernel(lambda: MaternKernel(0.5, active_dims=[1]) * RBFKernel()),
    "rational": with_kernel(lambda: ScaleKernel(RQKernel(ard_num_dims=D)) + RQKernel(active_dims=[2, 0])),
    "periodic": with_kernel(lambda: ScaleKernel(PeriodicKernel(ard_num_dims=D))),
    "locally periodic": with_kernel(lambda: ScaleKernel(PeriodicKernel(active_dims=[1]) * RBFKernel(active_dims=[1]))),
    "piecewise": with_kernel(lambda: ScaleKernel(kernels.PiecewisePolynomialKernel(2, ard_num_dims=D))),
    "piecewise of some": with_kernel(lambda: kernels.PiecewisePolynomialKernel(1, active_dims=[2]) + RBFKernel()),
    "very smooth piecewise": with_kernel(lambda: kernels.PiecewisePolynomialKernel(3)),
    "polynomial": with_kernel(lambda: ScaleKernel(kernels.PolynomialKernel(3)) + RBFKernel()),
    "squares in a product": with_kernel(lambda: kernels.PolynomialKernel(2, active_dims=[0]) * RBFKernel()),
    "linear in a sum": with_kernel(lambda: RBFKernel() + ScaleKernel(LinearKernel(ard_num_dims=D))),
    "linear in a product": with_kernel(lambda: RBFKernel() * LinearKernel(active_dims=[2])),
    "constant": with_kernel(lambda: ScaleKernel(RBFKernel()) + kernels.ConstantKernel()),
    "spectral mixture": with_kernel(lambda: kernels.SpectralMixtureKernel(3, ard_num_dims=D)),
    "spectral mixture of one": with_kernel(lambda: kernels.SpectralMixtureKernel(2, active_dims=[1]) * RBFKernel()),
    "fidelity": of_fidelities(data_fidelities=[2]),
    "two fidelities": of_fidelities(iteration_fidelity=1, data_fidelities=[2], nu=1.5),
    "each fidelity": of_fidelities(data_fidelities=[2, 1]),
    "fidelities by decay": of_fidelities(iteration_fidelity=2, data_fidelities=[1], linear_truncated=False),
    "two outputs of a fidelity": of_fidelities(2, data_fidelities=[2]),
    "two outputs by decay": of_fidelities(2, iteration_fidelity=1, data_fidelities=[2], linear_truncated=False),
    "linear mean": lambda: moved(SingleTaskGP(*data(), mean_module=linear_mean())),
    "linear mean without bias": lambda: moved(SingleTaskGP(*data(), mean_module=linear_mean(bias=False))),
    "linear means of two outputs": lambda: moved(
        SingleTaskGP(*data(outputs=2), mean_module=linear_mean(batch_shape=torch.Size([2])))
    ),
    "two rough outputs": single(2, covar_module=of_two(functools.partial(MaternKernel, 0.5))),
    "two rational outputs": single(2, covar_module=of_two(RQKernel)),
    "two periodic outputs": single(2, covar_module=of_two(PeriodicKernel)),
    "two polynomials": single(2, covar_module=kernels.PolynomialKernel(2, batch_shape=torch.Size([2]))),
    "two outputs of sums": single(2, covar_module=of_two(LinearKernel) + of_two(RBFKernel)),
}
OF_SAMPLES = {
    "samples": of_samples,
    "samples of normalised inputs": functools.partial(of_samples, input_transform=Normalize(D)),
    "ensemble": ensemble,
}
MODELS = {
    "usual": single(),
    "known noise": single(train_Yvar=KNOWN),
    "scaled": with_kernel(lambda: get_matern_kernel_with_gamma_prior(D), outcome_transform=None),
    "normalised inputs": single(input_transform=Normalize(D)),
    "two outputs": single(2),
    "two scaled outputs": single(2, covar_module=of_two(MaternKernel)),
    "isotropic": with_kernel(RBFKernel, mean_module=ZeroMean()),
    "sum": with_kernel(lambda: ScaleKernel(RBFKernel(active_dims=[2, 0], ard_num_dims=2)) + MaternKernel(1.5)),
    "product": with_kernel(lambda: ScaleKernel(RBFKernel(active_dims=[1]) * MaternKernel(2.5, ard_num_dims=D))),
    "one point": single(n=1, outcome_transform=None),
    "no dimensions": with_kernel(lambda: RBFKernel(active_dims=[])),
    "tasks": of_tasks(),
    "tasks of other values": of_tasks((3, 7), column=1),
    "one task of two": of_tasks((0, 1), column=0, output_tasks=[1], rank=1, mean_module=ConstantMean()),
    "tasks of known noise": of_tasks((2, 1), train_Yvar=KNOWN, covar_module=MaternKernel()),
    "table": of_a_table,
    "categories": lambda: moved(MixedSingleTaskGP(*of_categories(), cat_dims=[1, 2])),
    "categories of one lengthscale": lambda: moved(
        SingleTaskGP(*of_categories(), covar_module=ScaleKernel(CategoricalKernel(active_dims=[2, 1])) + RBFKernel())
    ),
    "cosine": with_kernel(lambda: ScaleKernel(kernels.CosineKernel(active_dims=[1])) + RBFKernel()),
    **OF_OTHER_KERNELS,
}
ROUGH = {"rough", "two rough outputs"}
"""Where roots of the library's squared distances have lost half of the digits."""
