"""Kernels, means, priors and noise of every kind that readings know: values and gradients of the library's."""

from __future__ import annotations

import math
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
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
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.likelihoods.hadamard_gaussian_likelihood import HadamardGaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.priors import (
    GammaPrior,
    HalfNormalPrior,
    LKJCovariancePrior,
    LogNormalPrior,
    NormalPrior,
    SmoothedBoxPrior,
    UniformPrior,
)
from linear_operator.utils.warnings import NumericalWarning
from support.readings import D, agree, made, read

from autokern.density.exact_objective import Reading
from autokern.kernels import array_formulas as formulas
from autokern.model import kernel_parts
from autokern.model.arrays import UnreadError


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
    "constant in a product": lambda: RBFKernel() * ConstantKernel(constant_prior=GammaPrior(2.0, 1.0)),
}


@pytest.mark.parametrize("n", [1, 2, 13, 40])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_kernels(kernel, n):
    mll = made(kernel(), n=n)
    reading = agree(mll, digits=10.0)
    with torch.no_grad():  # the next step of an optimiser
        for p in mll.parameters():
            p.mul_(0.8)
    agree(mll, reading, digits=10.0)


def test_a_kernel_is_read_after_what_the_guide_adds(monkeypatch):
    guide = (Path(__file__).parents[2] / "docs" / "contributing.md").read_text()

    def block(file):
        return guide.partition(f"# in autokern/{file}\n")[2].partition("```")[0]

    kernel = ScaleKernel(CosineKernel(active_dims=[1]))
    monkeypatch.setattr(
        kernel_parts, "_READ", {k: how for k, how in kernel_parts._READ.items() if k is not CosineKernel}
    )
    with pytest.raises(UnreadError, match="a kernel CosineKernel"):
        Reading(made(kernel, n=13))
    space = dict(vars(formulas))
    exec(block("kernels/array_formulas.py"), space)
    monkeypatch.setitem(formulas.FORMULAS, "cosine", space["_cosine"])
    kernel_parts._READ.update(eval(f"{{{block('model/kernel_parts.py')}}}", vars(kernel_parts)))
    agree(made(kernel, n=13), digits=10.0)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_points_that_meet_and_points_far_away(kernel):
    """The library's distances have lost digits there, and so has a polynomial of large numbers."""
    mll = made(kernel(), n=9)
    x = mll.model.train_inputs[0].clone()
    x[1] = x[0]
    x[3] = x[2] + 1e-9
    for moved in (x, x + 4.0):
        mll.model.set_train_data(moved, strict=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)  # the library factorises a summand by itself
            agree(mll, digits=1e5)


def test_a_mixture_finer_than_all_differences_has_gradients_of_zero():
    """Points that meet pull at no scale; as differences of large sums their pull would be noise, which Adam follows."""
    mll = made(mixture(2, active_dims=[0]), n=9)
    x = 1000 * mll.model.train_inputs[0]
    x[1] = x[0]
    mll.model.set_train_data(x, strict=False)
    mll.model.covar_module.mixture_scales = 20.0
    parameters = dict(mll.named_parameters())
    _, gradients = Reading(mll).evaluate(parameters)
    found = dict(zip(parameters, gradients, strict=True))
    assert (found["model.covar_module.raw_mixture_scales"].abs() < 1e-12).all()
    assert (found["model.covar_module.raw_mixture_means"].abs() < 1e-9).all()
    assert (found["model.covar_module.raw_mixture_weights"].abs() > 1e-6).all()


def rough(mll):
    """The negative density per point by differences alone."""
    x, y, kernel = mll.model.train_inputs[0], mll.model.train_targets, mll.model.covar_module
    apart = ((x[:, None] - x) / kernel.lengthscale[0]).square().sum(-1)
    where = torch.eye(len(x), dtype=torch.bool) | (apart == 0)
    k = torch.where(where, 1.0, (-torch.where(where, 1.0, apart).sqrt()).exp())
    k = k + mll.likelihood.noise * torch.eye(len(x), dtype=x.dtype)
    mean = mll.model.mean_module(x)
    return -torch.distributions.MultivariateNormal(mean, k).log_prob(y) / len(x)


@pytest.mark.parametrize("iso", [False, True])
def test_matern12_near_and_far(iso):
    """Against differences: the library's own are some 1e-10 off where ARD is on."""
    mll = made(MaternKernel(0.5, ard_num_dims=None if iso else D), n=30)
    x = mll.model.train_inputs[0].clone()
    x[1], x[3], x[5] = x[0], x[2] + 1e-7, x[4] + 1e-4
    for points in (x, x * 1e4, 40 + x):
        mll.model.set_train_data(points, strict=False)
        parameters = dict(mll.named_parameters())
        loss = rough(mll)
        expected = torch.autograd.grad(loss, list(parameters.values()))
        found, grads = Reading(mll).evaluate(parameters)
        assert math.isclose(found.item(), loss.item(), rel_tol=1e-11)
        for one, other in zip(grads, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


PRIORS = {
    "smoothed box": lambda: SmoothedBoxPrior(0.84, 0.9, sigma=0.1),
    "uniform": lambda: UniformPrior(0.0, 30.0),
    "half normal": lambda: HalfNormalPrior(0.7),
    "gamma": lambda: GammaPrior(2.0, 3.0),
}


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
def test_priors(prior):
    kernel = ScaleKernel(
        periodic(ard_num_dims=D, lengthscale_prior=prior(), period_length_prior=prior()), outputscale_prior=prior()
    )
    likelihood = GaussianLikelihood(noise_prior=prior())
    mll = made(kernel + LinearKernel(variance_prior=prior()), likelihood=likelihood)
    agree(mll)


def test_ways_to_register_a_prior():
    mll = made(ScaleKernel(RBFKernel()) + RQKernel() + PolynomialKernel(2))
    kernels = mll.model.covar_module.kernels
    kernels[0].register_prior("one", NormalPrior(0.0, 1.0), "outputscale")
    kernels[0].base_kernel.register_prior("two", NormalPrior(0.0, 1.0), lambda m: m.lengthscale)
    kernels[1].register_prior("three", NormalPrior(0.0, 1.0), "alpha")
    kernels[2].register_prior("four", NormalPrior(0.0, 1.0), lambda module: module.offset)
    mll.likelihood.register_prior("five", NormalPrior(0.0, 1.0), "noise")
    mll.double()
    reading = agree(mll)
    kernels[2]._priors["four"] = (kernels[2]._priors["four"][0], lambda m: m.offset**2, None)
    assert not reading.holds()
    assert read(mll) is None


@pytest.mark.parametrize(
    "closure",
    [lambda m: m.lengthscale.log(), lambda m: m.raw_lengthscale, lambda m, k=1: m.lengthscale, lambda m: m.kind],
)
def test_priors_of_something_else(closure):
    kernel = RBFKernel()
    kernel.kind = kernel.lengthscale
    kernel.register_prior("own", NormalPrior(0.0, 1.0), closure)
    assert read(made(kernel)) is None


@pytest.mark.parametrize("prior", [UniformPrior(2.0, 3.0), HalfNormalPrior(1.0)])
def test_values_that_a_prior_excludes_are_the_librarys_matter(prior):
    mll = made(mean=ConstantMean(constant_prior=prior))
    with torch.no_grad():
        mll.model.mean_module.raw_constant.fill_(-1.0)
    assert Reading(mll).evaluate(dict(mll.named_parameters())) is None


def tasks(mll, *values):
    x = mll.model.train_inputs[0].clone()
    for column, count in values:
        x[:, column] = torch.arange(len(x)) % count
    mll.model.set_train_data(x, strict=False)
    return mll


def test_tasks_and_categories():
    kernels = {
        "index": RBFKernel(active_dims=[0, 1]) * IndexKernel(3, rank=2, active_dims=[3]),
        "positive index": MaternKernel(1.5, active_dims=[0, 1]) * PositiveIndexKernel(3, rank=1, active_dims=[3]),
        "not of unit variance": RBFKernel() * PositiveIndexKernel(3, 3, unit_scale_for_target=False, active_dims=[3]),
        "another unit": RBFKernel() * PositiveIndexKernel(3, 2, target_task_index=2, active_dims=[3]),
        "categories": ScaleKernel(CategoricalKernel(active_dims=[3, 2], ard_num_dims=2)) + RBFKernel(active_dims=[0]),
        "categories alike": CategoricalKernel(active_dims=[2, 3], lengthscale_constraint=GreaterThan(1e-6)),
    }
    for kernel in kernels.values():
        for n in (13, 2, 1):
            agree(tasks(made(kernel, n=n), (2, 2), (3, 3)), digits=10.0)


def test_correlations_with_a_prior():
    from botorch.models.utils.priors import BetaPrior

    kernel = PositiveIndexKernel(4, 2, task_prior=BetaPrior(2.5, 1.5), active_dims=[2])
    mll = tasks(made(RBFKernel(active_dims=[0]) * kernel), (2, 4))
    reading = agree(mll)
    kernel.IndexKernelPrior._dirichlet.concentration.mul_(1.1)
    agree(mll, reading)
    prior = LKJCovariancePrior(3, 1.0, SmoothedBoxPrior(0.1, 2.0))
    assert read(tasks(made(RBFKernel() * IndexKernel(3, prior=prior, active_dims=[2])), (2, 3))) is None


def test_what_is_no_task():
    mll = made(RBFKernel(active_dims=[0]) * IndexKernel(3, active_dims=[2]))
    for value in (3.0, -1.0, math.nan):
        x = mll.model.train_inputs[0].clone()
        x[:, 2] = 1.0
        x[4, 2] = value
        mll.model.set_train_data(x, strict=False)
        assert Reading(mll).evaluate(dict(mll.named_parameters())) is None
    assert read(made(IndexKernel(3))) is None  # tasks of several columns


@pytest.mark.parametrize("values", [(0, 1, 2), (0, 2, 5)])
def test_noise_of_tasks(values):
    """What is no number of a task has no noise, as in the library."""
    mll = made(ScaleKernel(RBFKernel()), likelihood=HadamardGaussianLikelihood(3, task_feature_index=3))
    x = mll.model.train_inputs[0].clone()
    x[:, 3] = torch.tensor(values, dtype=x.dtype)[torch.arange(13) % 3]
    mll.model.set_train_data(x, strict=False)
    stock = mll.forward
    mll.forward = types.MethodType(lambda self, *args: stock(*args, x), mll)
    expected = -mll(mll.model(x), mll.model.train_targets)
    expected.backward()
    del mll.forward
    slopes = [p.grad.clone() for p in mll.parameters()]
    loss, grads = Reading(mll).evaluate(dict(mll.named_parameters()))
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-12)
    torch.testing.assert_close(list(grads), slopes, rtol=1e-9, atol=1e-11)


class Own(LinearKernel):
    pass


@pytest.mark.parametrize("kernel", [Own(), LinearKernel(batch_shape=torch.Size([2])), PolynomialKernel(np.float64(2))])
def test_what_is_not_exactly_known(kernel):
    assert read(made(kernel)) is None


CHANGES = {
    "a power": lambda m: setattr(m.kernels[1], "power", 3),
    "a unit": lambda m: setattr(m.kernels[2], "unit_scale_for_target", False),
    "a target": lambda m: setattr(m.kernels[2], "target_task_index", 1),
    "a factor": lambda m: setattr(
        m.kernels[2], "raw_covar_factor", torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    ),
    "smoothness": lambda m: setattr(m.kernels[0], "nu", 1.5),
    "columns": lambda m: m.kernels[2].active_dims.copy_(torch.tensor([2])),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changes_are_seen(change):
    parts = (MaternKernel(0.5, active_dims=[0]), PolynomialKernel(2), PositiveIndexKernel(3, 2, active_dims=[3]))
    mll = tasks(made(AdditiveKernel(*parts)), (2, 2), (3, 3))
    reading = Reading(mll)
    assert reading.holds()
    change(mll.model.covar_module)
    assert not reading.holds()
    agree(mll, digits=1e3)


def test_parameters_that_want_no_gradient_or_serve_twice():
    mll = made(ScaleKernel(LinearKernel()) + RQKernel())
    mll.model.covar_module.kernels[0].base_kernel.raw_variance.requires_grad_(False)
    agree(mll)
    mll = made(LinearKernel() + LinearKernel())
    mll.model.covar_module.kernels[1].raw_variance = mll.model.covar_module.kernels[0].raw_variance
    assert read(mll) is None
