"""Products without blocks that are nearly zero: what is left out is bounded, nothing is where boxes bound nothing."""

import pytest
import torch
from gpytorch.kernels import CosineKernel, MaternKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel

from autokern.kernels import families, near
from autokern.kernels import tree as trees
from autokern.kernels.near import Near

KERNELS = {
    "matern52": lambda: ScaleKernel(MaternKernel(2.5, ard_num_dims=2)),
    "sum": lambda: ScaleKernel(MaternKernel(1.5)) + RBFKernel(active_dims=[1]) * MaternKernel(0.5, active_dims=[0]),
    "rq": lambda: ScaleKernel(RQKernel()),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(near, "_TILE", 48)


def given(kernel, n, wide=60.0):
    draw = torch.Generator().manual_seed(n)
    x = wide * torch.rand(n, 2, generator=draw, dtype=torch.float64)
    with torch.no_grad():
        tree = trees.read(kernel.double(), x)
    return tree, 0.01 + 0.1 * torch.rand(n, generator=draw, dtype=torch.float64), draw


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("n", [1, 47, 48, 49, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_left_out_is_bounded_by_the_noise(name, n, dtype):
    tree, noise, draw = given(KERNELS[name](), n)
    found = Near(tree.each(lambda t: t.to(dtype)), noise.to(dtype))
    matrix = trees.dense(tree) + torch.diag(noise)
    image = found.multiply(torch.eye(n, dtype=dtype))
    assert image.dtype is dtype
    gap = (image.double() - matrix).abs().sum(-1)
    rounding = 1e-5 * matrix.abs().sum(-1)
    assert (gap <= near._LEFT_OUT * noise.min() + rounding).all()
    v = torch.randn(n, 3, generator=draw, dtype=torch.float64).to(dtype)
    torch.testing.assert_close(found.multiply(v), image @ v, rtol=1e-3, atol=1e-4)


def test_far_blocks_are_left_out():
    tree, noise, _ = given(KERNELS["matern52"](), 700, wide=400.0)
    found = Near(tree, noise)
    assert found.share < 0.5
    evaluated = found.multiply(torch.eye(700, dtype=torch.float64))
    assert (evaluated == 0).double().mean() >= 1 - found.share - 1e-9


@pytest.mark.parametrize("kernel", [lambda: ScaleKernel(CosineKernel()), lambda: RBFKernel() + CosineKernel()])
def test_all_of_a_kernel_that_rises_again_is_evaluated(kernel):
    tree, noise, _ = given(kernel(), 300, wide=400.0)
    assert Near(tree, noise).share == 1.0


def test_periodic_points_lie_on_circles():
    kernel = PeriodicKernel().double()
    kernel.period_length, kernel.lengthscale = 3.0, 1e-3
    tree, noise, _ = given(kernel, 300)
    found = Near(tree, noise).multiply(torch.eye(300, dtype=torch.float64))
    torch.testing.assert_close(found, trees.dense(tree) + torch.diag(noise), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_a_decreasing_family_is_positive_and_falls(family):
    u = torch.linspace(0, 50, 2001, dtype=torch.float64) * (1 if family.gamma > 0 else -1)
    k = family(u)
    assert family.decreasing == bool((k >= 0).all() and (k.diff() <= 0).all())
