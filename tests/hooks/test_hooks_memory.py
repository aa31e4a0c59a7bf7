"""hooks/memory.py: what cannot fit is refused at every position, at once, and nothing is lost by it."""

import time
from unittest import mock

import gpytorch
import pytest
import torch
from gpytorch import kernels
from linear_operator import operators
from linear_operator import settings as library
from linear_operator.operators import DenseLinearOperator, DiagLinearOperator, RootLinearOperator
from support.losses import Own
from support.models import points

import autokern
from autokern.core.errors import MemoryBudgetError

pytestmark = pytest.mark.usefixtures("enabled")
FEW = 3000
"""Points whose kernel matrix takes 69 MiB in float64."""


def test_a_matrix_that_no_machine_holds_is_refused_at_once():
    kernel, x = kernels.ScaleKernel(kernels.RBFKernel()).double(), points(400_000)
    for call in (kernel(x).to_dense, kernel(x, x[:-1]).to_dense, kernel(x).cholesky):
        before = time.process_time()
        with pytest.raises(MemoryBudgetError, match=r"400000 x (400000|399999), torch.float64, cpu.*fewer points"):
            call()
        assert time.process_time() - before < 1


REFUSED = {
    "evaluate_kernel": lambda: kernels.RBFKernel().double()(points(FEW)).evaluate_kernel(),
    "evaluate_kernel of AdditiveKernel": lambda: (
        (kernels.RBFKernel() + kernels.RQKernel()).double()(points(FEW)).to_dense()
    ),
    "covar_dist of Own": lambda: Own().double()(points(FEW)).to_dense(),
    "evaluate_kernel of RBFKernel, 600 x 600": lambda: (
        kernels.keops.RBFKernel().double()(points(600, d=20)).to_dense()  # without KeOps at this size
    ),
    "evaluate_kernel of SpectralMixtureKernel": lambda: (
        kernels.SpectralMixtureKernel(3, ard_num_dims=2).double()(points(900)).to_dense()
    ),
    "to_dense of RootLinearOperator": lambda: RootLinearOperator(points(FEW)).to_dense(),
    "to_dense of DiagLinearOperator": lambda: DiagLinearOperator(points(FEW)[:, 0]).to_dense(),
    "to_dense of KroneckerProductLinearOperator": lambda: operators.KroneckerProductLinearOperator(
        DenseLinearOperator(points(60, d=60)), DenseLinearOperator(points(50, d=50))
    ).to_dense(),
    "cholesky.m=3000": lambda: DenseLinearOperator(torch.eye(FEW, dtype=torch.float64))._cholesky(),
}


@pytest.mark.parametrize("position", REFUSED)
def test_refused_at(position):
    factorised = gpytorch.settings.max_cholesky_size(10**6)  # what is only multiplied goes matrix-free instead
    refused = pytest.raises(MemoryBudgetError, match=f"{position}.*may be taken")
    with factorised, autokern.using(memory="65MiB"), refused:
        REFUSED[position]()
    assert REFUSED[position]().shape[-1] > 1


def test_what_is_there_or_costs_nothing_is_not_refused():
    a = torch.rand(FEW, FEW, dtype=torch.float64)
    lazy = kernels.RBFKernel().double()(points(FEW))
    lazy.evaluate_kernel()
    linear = kernels.LinearKernel().double()(points(FEW))
    with autokern.using(memory="1MiB"):
        assert DenseLinearOperator(a).to_dense() is a
        assert operators.TriangularLinearOperator(a).to_dense() is a
        lazy.evaluate_kernel()
        lazy.to_dense()
        linear.evaluate_kernel()  # stays a root
        lazy.diagonal()


def test_transformed_code_is_left_alone():
    x = points(FEW)
    with autokern.using(memory="1MiB"):
        found = torch.func.vmap(lambda x: RootLinearOperator(x).to_dense())(x.unsqueeze(0))
        with library.trace_mode():
            RootLinearOperator(x).to_dense()
    torch.testing.assert_close(found[0], x @ x.mT)


@pytest.mark.parametrize("outer", [lambda kernel: kernel, kernels.ScaleKernel, lambda kernel: kernel + Own()])
def test_active_dimensions_survive_an_exception(outer):
    inner = kernels.RBFKernel(active_dims=[2])
    kernel, x = outer(inner).double(), points(20, d=3)
    lazy, expected = kernel(x), kernel(x).to_dense()
    with mock.patch.object(inner, "forward", side_effect=ArithmeticError):
        for read in (lazy.evaluate_kernel, lazy.to_dense):
            with pytest.raises(ArithmeticError):
                read()
            assert inner.active_dims.tolist() == [2]
    torch.testing.assert_close(lazy.to_dense(), expected)


def test_batch_shapes_may_be_plain_tuples():
    kernel = kernels.ConstantKernel(batch_shape=(2,))
    assert kernel(torch.rand(2, 3, 1)).to_dense().shape == (2, 3, 3)
