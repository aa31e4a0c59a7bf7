"""Where kernels meet odd arguments: shapes, dtypes, devices, numbers; everything as stock has it."""

from __future__ import annotations

import random

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from support import covariances

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
