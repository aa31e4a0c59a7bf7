"""gpytorch's KeOps kernels with the hooks in: its own tests of them, products by tiles, and memory without pykeops."""

import contextlib
import sys
import unittest
import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import ScaleKernel, keops
from gpytorch.test.base_keops_test_case import BaseKeOpsTestCase
from gpytorch.test.base_kernel_test_case import BaseKernelTestCase
from linear_operator.utils.warnings import NumericalWarning
from support.programs import said

import autokern
from autokern.backends.keops_product import keops_problem
from autokern.hooks.kernel_operator import MatrixFreeKernelOperator
from autokern.runtime import dispatch

pytestmark = [
    pytest.mark.usefixtures("only_tiles"),
    pytest.mark.skipif(keops_problem() is not None, reason=f"needs KeOps: {keops_problem()}"),
]
KINDS = {
    "rbf": (keops.RBFKernel, gpytorch.kernels.RBFKernel),
    "matern 1/2": (lambda **k: keops.MaternKernel(nu=0.5, **k), lambda **k: gpytorch.kernels.MaternKernel(nu=0.5, **k)),
    "matern 3/2": (lambda **k: keops.MaternKernel(nu=1.5, **k), lambda **k: gpytorch.kernels.MaternKernel(nu=1.5, **k)),
    "matern 5/2": (lambda **k: keops.MaternKernel(nu=2.5, **k), lambda **k: gpytorch.kernels.MaternKernel(nu=2.5, **k)),
    "periodic": (keops.PeriodicKernel, gpytorch.kernels.PeriodicKernel),
    "sum": (
        lambda: keops.RBFKernel() + ScaleKernel(keops.MaternKernel(nu=2.5)),
        lambda: gpytorch.kernels.RBFKernel() + ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5)),
    ),
}
each_kind = pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)


class _Hooked:
    def run(self, result=None):
        with autokern.enabled():
            return super().run(result)


class TestRBF(_Hooked, BaseKeOpsTestCase, unittest.TestCase):
    k1, k2 = keops.RBFKernel, gpytorch.kernels.RBFKernel


class TestMatern(_Hooked, BaseKeOpsTestCase, unittest.TestCase):
    k1, k2 = keops.MaternKernel, gpytorch.kernels.MaternKernel

    def test_other_smoothness(self):
        for nu in (0.5, 1.5):
            self.test_forward_x1_eq_x2(nu=nu)
            self.test_forward_x1_neq_x2(nu=nu)


class TestPeriodic(_Hooked, BaseKeOpsTestCase, unittest.TestCase):
    k1, k2 = keops.PeriodicKernel, gpytorch.kernels.PeriodicKernel


class TestPlainRBF(_Hooked, BaseKernelTestCase, unittest.TestCase):
    def create_kernel_no_ard(self, **kwargs):
        return keops.RBFKernel(**kwargs)

    def create_kernel_ard(self, num_dims, **kwargs):
        return keops.RBFKernel(ard_num_dims=num_dims, **kwargs)


class TestPlainPeriodic(TestPlainRBF):
    def create_kernel_no_ard(self, **kwargs):
        return keops.PeriodicKernel(**kwargs)

    def create_kernel_ard(self, num_dims, **kwargs):
        return keops.PeriodicKernel(ard_num_dims=num_dims, **kwargs)


@each_kind
@pytest.mark.parametrize("same", [True, False], ids=["same", "cross"])
def test_products_and_gradients_are_those_of_the_plain_kernel(kinds, same):
    x, z, rhs = torch.rand(50, 2).double(), torch.rand(40, 2).double(), torch.rand(50 if same else 40, 2).double()
    found = []
    for make, context in zip(kinds, (autokern.enabled(), contextlib.nullcontext()), strict=True):
        kernel, points = ScaleKernel(make()).double(), x.clone().requires_grad_()
        with context:
            op = (kernel(points) if same else kernel(points, z)).evaluate_kernel()
            out = op @ rhs
        assert (type(op) is MatrixFreeKernelOperator) == (make is kinds[0])
        found.append([out, *torch.autograd.grad(out.sum(), [points, *kernel.parameters()])])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
    assert set(dispatch.stats()["kernel_matmul"]) == {"tiled"}


@each_kind
def test_an_order_of_the_user_leaves_the_kernel_to_the_library(kinds):
    kernel = kinds[0]()
    with autokern.enabled(), gpytorch.settings.max_cholesky_size(10_000):
        assert type(kernel(torch.rand(50, 2)).evaluate_kernel()) is not MatrixFreeKernelOperator


def test_a_product_of_them_is_exact_where_the_library_multiplies_roots_with_jitter():
    x = torch.rand(60, 2, generator=torch.Generator().manual_seed(0)).double()
    with autokern.enabled(), autokern.using(force={"kernel_matmul": "stock"}), warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        found = (keops.RBFKernel() * keops.PeriodicKernel()).double()(x).to_dense()
    truth = (gpytorch.kernels.RBFKernel() * gpytorch.kernels.PeriodicKernel()).double()(x).to_dense()
    torch.testing.assert_close(found, truth, rtol=1e-13, atol=1e-13)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_without_pykeops_no_differences_of_all_points_are_formed():
    code = """
        import sys

        sys.modules["pykeops"] = sys.modules["keopscore"] = None  # they cannot be imported
        import torch, gpytorch, autokern
        from gpytorch.kernels import ScaleKernel, keops

        def high():
            return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

        kernel, x = ScaleKernel(keops.RBFKernel(ard_num_dims=20)), torch.rand(4000, 20)
        with autokern.enabled():
            (kernel(x[:900]) @ torch.ones(900, 1)).sum().backward()
            before = high()
            (kernel(x) @ torch.ones(4000, 1)).sum().backward()
            print(high() - before)
    """
    assert float(said(code)[-1]) < 100, "MiB; the differences have 1221"
