"""Models with a `MultiDeviceKernel` on a machine without accelerators are those of the kernel in it.

The library alone serves no such kernel there.
"""

import pytest
import torch
from gpytorch.kernels import MaternKernel, MultiDeviceKernel, RBFKernel, ScaleKernel
from support.exact_models import assert_close, moments
from support.models import ExactModel, points, step

import autokern

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without accelerators")


def over_devices(kernel):
    return MultiDeviceKernel(kernel, device_ids=[CPU, CPU], output_device=CPU)


def found(kernel, n):
    """A step, a prediction, and products."""
    x, others = points(n, seed=n), points(7, seed=n + 1)
    model = ExactModel(x, (6 * x[:, 0]).sin() + 0.1 * x[:, 1], kernel).double()
    with autokern.enabled():
        products = [autokern.covariance.matmul(kernel, z, x, x[:, :1]) for z in (x, others)]
        return step(model), moments(model.eval()(others)), products


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
    assert_close(found(wrapped(), n), found(plain(), n))
