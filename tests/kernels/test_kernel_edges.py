"""Where kernels meet odd arguments: shapes, dtypes, devices, numbers; everything as stock has it."""

from __future__ import annotations

import random
import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from support import covariances
from support.models import ExactModel

import autokern
from autokern import kernels
from autokern.kernels import graph
from autokern.kernels.tree import Node, Parts

RBF = Parts(Node("scale", "", (Node("leaf", "rbf"),)), 1, None, 0, 1)
_LAYOUTS = {"gemm": "whole", "tiled": "tiled"}


@pytest.fixture(autouse=True)
def _enabled():
    with autokern.enabled():
        yield


def drawn(seed):
    """Return a kernel and two sets of points, odd in whatever way."""
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    d, batch = pick.choice([1, 1, 2, 3, 7]), pick.choice([(), (), (2,), (3, 1), (1,)])
    ard, own = pick.random() < 0.5, pick.choice([(), batch, (1,) * len(batch)])
    options = {"ard_num_dims": d if ard else None, "batch_shape": torch.Size(own)}
    base = pick.choice([RBFKernel, lambda **o: MaternKernel(pick.choice([0.5, 1.5, 2.5]), **o)])(**options)
    base.lengthscale = torch.rand(base.lengthscale.shape, generator=generator) + 0.3
    kernel = base
    if pick.random() < 0.7:
        kernel = ScaleKernel(base, batch_shape=torch.Size(pick.choice([(), own])))
        kernel.outputscale = torch.rand(kernel.outputscale.shape, generator=generator) + 0.5

    def points():
        n, lead = pick.choice([1, 2, 5, 17, 40]), pick.choice([(), batch])
        x = torch.rand(*lead, n, d, generator=generator, dtype=torch.float64)
        how = pick.choice(["plain", "turned", "expanded", "strided"])
        if how == "turned":
            x = x.mT.contiguous().mT
        if how == "expanded" and not lead:
            x = x.expand(*batch, n, d)
        if how == "strided":
            x = x.repeat_interleave(2, -2)[..., ::2, :]
        return x

    x1 = points()
    return kernel.double(), x1, pick.choice([x1, x1.clone(), points()])


def derived(function, kernel, x1, x2, second):
    """Return value, gradients and, if wanted, gradients of those."""
    first = x1.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    other = first if x2 is x1 else x2.detach().clone().requires_grad_()
    value = function(kernel, first, other)
    inputs = [*kernel.parameters(), first, *([] if other is first else [other])]
    v = torch.sin(torch.arange(value.numel(), dtype=torch.float64)).view(value.shape)
    gradients = torch.autograd.grad((value * v).sum(), inputs, create_graph=second)
    found = [value, *gradients]
    if second:
        total = sum((g.square()).sum() for g in gradients)
        found += torch.autograd.grad(total, inputs)
    return [f.detach() for f in found]


def explicit(kernel, x1, x2):
    return covariances.reference(covariances.recognise(kernel), x1, x2)


SEEDS = [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 120))]


@pytest.mark.parametrize("seed", SEEDS)
def test_any_shape_is_as_stock_has_it(seed):
    kernel, x1, x2 = drawn(seed)
    truth = derived(explicit, kernel, x1, x2, True)
    with autokern.using(force={"kernel_matrix": "stock"}):
        expected = kernel(x1.detach(), x2.detach()).to_dense().detach()
    for name, layout in _LAYOUTS.items():
        found = derived(
            lambda k, a, b, layout=layout: covariances.matrix(covariances.recognise(k), a, b, layout),
            kernel,
            x1,
            x2,
            True,
        )
        for one, other in zip(found, truth, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=2e-7)
        with autokern.using(force={"kernel_matrix": name}), torch.no_grad():
            values = kernel(x1, x2).to_dense()
        assert values.shape == expected.shape
        assert values.dtype == expected.dtype
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize(("m", "n", "d"), [(0, 3, 2), (3, 0, 2), (0, 0, 1), (3, 3, 0), (1, 1, 1)])
@pytest.mark.parametrize("base", [RBFKernel, MaternKernel])
def test_nothing_at_all(m, n, d, base):
    kernel, x1, x2 = ScaleKernel(base()), torch.rand(m, d), torch.rand(n, d)

    def run():
        try:
            return kernel(x1, x2).to_dense().detach()
        except Exception as error:
            return type(error)

    with autokern.using(force={"kernel_matrix": "stock"}):
        expected = run()
    for name in _LAYOUTS:
        with autokern.using(force={"kernel_matrix": name}):
            found = run()
        assert found is expected if isinstance(expected, type) else torch.allclose(found, expected)


@pytest.mark.parametrize("parameter", ["outputscale", "lengthscale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_of_another_dtype_are_stocks(parameter, dtype):
    kernel = ScaleKernel(RBFKernel()).to(dtype)
    other = torch.float64 if dtype is torch.float32 else torch.float32
    (kernel if parameter == "outputscale" else kernel.base_kernel).to(other)
    if parameter == "outputscale":
        kernel.base_kernel.to(dtype)
    x = torch.rand(70, 2, dtype=dtype)
    with autokern.using(force={"kernel_matrix": "stock"}):
        expected = kernel(x).to_dense()
    for name in _LAYOUTS:
        with autokern.using(force={"kernel_matrix": name}):
            kernel.to(dtype)(x).to_dense()  # a key that is known must not serve the other
            (kernel if parameter == "outputscale" else kernel.base_kernel).to(other)
            if parameter == "outputscale":
                kernel.base_kernel.to(dtype)
            found = kernel(x).to_dense()
        assert found.dtype is expected.dtype
        assert torch.allclose(found, expected)


@pytest.mark.parametrize("name", ["rbf", "matern12", "matern52"])
@pytest.mark.parametrize("layout", covariances.LAYOUTS)
@pytest.mark.parametrize("scale", [0.0, 1e-320])
def test_an_outputscale_that_has_vanished(name, layout, scale):
    x, g = torch.rand(70, 2, dtype=torch.float64), torch.rand(70, 70, dtype=torch.float64)
    one = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    none = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    lengthscale = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    found = []
    for outputscale in (one, none):
        k = covariances.matrix(covariances.Covariance(kernels.family(name), lengthscale, outputscale), x, x, layout)
        found.append(torch.autograd.grad(k, (outputscale, lengthscale), g))
    torch.testing.assert_close(found[1][0], found[0][0])
    assert found[1][1].abs().max() <= 1e-300


_WAYS = [
    {"exact_log_prob": "fused"},
    {"exact_log_prob": "stock", "kernel_matrix": "gemm", "inv_quad_logdet": "potri"},
    {"exact_log_prob": "stock", "kernel_matrix": "tiled", "inv_quad_logdet": "stock"},
]
_STOCK = {"exact_log_prob": "stock", "kernel_matrix": "stock", "inv_quad_logdet": "stock"}


def model_of(n=200, base=RBFKernel):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    y = x.sum(-1).sin()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = ExactModel(x, y, ScaleKernel(base()), likelihood).double()
    return model, gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model), x, y


@pytest.mark.parametrize("way", _WAYS)
def test_a_default_device_that_is_not_the_datas(way):
    model, mll, x, y = model_of()
    with autokern.using(force=_STOCK):
        expected = torch.autograd.grad(mll(model(x), y), list(model.parameters()))
    model.train()
    with warnings.catch_warnings(), autokern.using(force=way):
        warnings.simplefilter("error")
        with torch.device("meta"):
            found = torch.autograd.grad(mll(model(x), y), list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("target", [0.3, torch.rand(7, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)])
def test_targets_that_are_none_of_ours(target):
    model, mll, x, _ = model_of(60)

    def outcome(way):
        with warnings.catch_warnings(record=True) as caught, autokern.using(force=way):
            warnings.simplefilter("always")
            try:
                told = f"{mll(model(x), target).item():.9g}"
            except Exception as error:
                told = type(error), str(error)
        return told, [str(w.message) for w in caught]

    expected = outcome(_STOCK)
    for way in _WAYS[:2]:
        assert outcome(way) == expected


@pytest.mark.parametrize("n", [1, 40, 200])
@pytest.mark.parametrize("base", [RBFKernel, MaternKernel])
def test_points_that_are_no_numbers(n, base):
    model, mll, x, y = model_of(n, base)
    x[0, 0] = torch.nan
    model.set_train_data(x, y, strict=False)

    def outcome(way):
        with autokern.using(force=way):
            try:
                return mll(model(x), y).item()
            except Exception as error:
                return type(error), str(error)

    expected = outcome(_STOCK)
    for way in _WAYS:
        assert repr(outcome(way)) == repr(expected)
    with autokern.using(force={"kernel_matrix": "stock"}):
        counts = model.covar_module(x).to_dense().isnan().sum()
    for name in _LAYOUTS:
        with autokern.using(force={"kernel_matrix": name}):
            assert model.covar_module(x).to_dense().isnan().sum() == counts


def test_what_is_traced_remembers_nothing_of_its_caller():
    x = torch.rand(30, 2)
    known = covariances.recognise(ScaleKernel(RBFKernel()).requires_grad_(False))
    expected = covariances.reference(known, x, x)
    for state in (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.device("meta"),
    ):
        graph._scripted.cache_clear()
        with state():
            graph._scripted(RBF)
        found = covariances.scripted(known, x, x)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    graph._scripted.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        graph._scripted(RBF)
    finally:
        torch.set_default_dtype(torch.float32)
    assert covariances.scripted(known, x, x).dtype is torch.float32


@pytest.mark.parametrize("layout", covariances.LAYOUTS)
@pytest.mark.parametrize(("name", "orders"), [("rbf", 7), ("matern12", 4), ("matern32", 4), ("matern52", 5)])
def test_derivatives_of_any_order_by_points(layout, name, orders):
    covariance = covariances.Covariance(kernels.family(name), torch.full((1, 1), 0.8, dtype=torch.float64), None)
    x = torch.tensor([[0.1], [0.7], [0.1]], dtype=torch.float64)

    def derivative(at, order):
        at = at.clone().requires_grad_()
        value = covariances.matrix(covariance, at, x, layout)[0, 1]
        for _ in range(order):
            (slope,) = torch.autograd.grad(value, at, create_graph=True)
            value = slope[0, 0]
        return value.detach()

    step = torch.zeros_like(x)
    step[0] = 1e-4
    for order in range(1, orders):
        ours = derivative(x, order)
        around = (derivative(x + step, order - 1) - derivative(x - step, order - 1)) / 2e-4
        assert ours.item() == pytest.approx(around.item(), rel=1e-4, abs=1e-5)
    at = x.clone().requires_grad_()
    value = covariances.matrix(covariance, at, at, layout).sum()
    for _ in range(4):
        (slope,) = torch.autograd.grad(value, at, create_graph=True)
        assert slope.isfinite().all()
        value = slope.square().sum()
