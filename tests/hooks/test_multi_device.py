"""Models with a `MultiDeviceKernel` on a machine without accelerators are those of the kernel in it."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, MultiDeviceKernel, RBFKernel, ScaleKernel
from support.models import ExactModel

import autokern

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without accelerators")


def over_devices(kernel):
    return MultiDeviceKernel(kernel, device_ids=[CPU, CPU], output_device=CPU)


@pytest.fixture(autouse=True)
def _hooks():
    with autokern.enabled():
        yield


def found(kernel, n):
    """Loss, gradients in the order of the parameters, mean, variances and joint covariance."""
    drawn = torch.rand(n + 7, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    x, y = drawn[:n, :2].contiguous(), (6 * drawn[:n, 0]).sin() + 0.1 * drawn[:n, 2]
    model = ExactModel(x, y, kernel).double()
    loss = -gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)(model(x), y)
    loss.backward()
    model.eval()
    with torch.no_grad():
        out = model(drawn[n:, :2])
        both = [loss.detach(), out.mean, out.variance, out.covariance_matrix]
    return [*both, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("n", [1, 12, 400])
@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        (lambda: over_devices(ScaleKernel(RBFKernel())), lambda: ScaleKernel(RBFKernel())),
        (lambda: ScaleKernel(over_devices(MaternKernel(2.5))), lambda: ScaleKernel(MaternKernel(2.5))),
        (lambda: over_devices(RBFKernel(active_dims=(1,))), lambda: RBFKernel(active_dims=(1,))),
    ],
    ids=["whole", "inner", "active"],
)
def test_a_model_over_no_devices_is_the_model_of_its_kernel(wrapped, plain, n):
    for one, two in zip(found(wrapped(), n), found(plain(), n), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-9)


def test_products_take_the_kernel_in_it():
    x = torch.rand(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = ScaleKernel(MaternKernel(2.5)).double()
    for other in (x, x[:7] + 0.1):
        out = autokern.covariance.matmul(over_devices(kernel), other, x, x[:, :1])
        torch.testing.assert_close(out, autokern.covariance.matmul(kernel, other, x, x[:, :1]))


def test_the_library_alone_serves_no_such_kernel():
    x = torch.rand(5, 2)
    autokern.disable()
    try:
        with pytest.raises(AttributeError, match="dim"):
            over_devices(RBFKernel())(x).to_dense()
    finally:
        autokern.enable()
