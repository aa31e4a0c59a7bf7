"""covariance.matmul: what it takes, what it refuses, what it gives."""

import pytest
import torch
from gpytorch.kernels import LinearKernel, RBFKernel, ScaleKernel
from support.tiling import random

import autokern
from autokern import covariance
from autokern.core.errors import MemoryBudgetError, SettingsError
from autokern.runtime import dispatch

X, Z, RHS = random(12, 3), random(9, 3, seed=2), random(9, 2, seed=3)
PAIR = torch.Size([2])
CASES = {
    "another kernel": (LinearKernel(), X, Z, RHS),
    "a product with it": (RBFKernel() * LinearKernel(), X, Z, RHS),
    "a subclass": (type("Mine", (RBFKernel,), {})(), Z, None, RHS),
    "an active dimension": (RBFKernel(active_dims=(1,)), X, Z, RHS),
    "active dimensions": (RBFKernel(active_dims=(0, 2), ard_num_dims=2), X, Z, RHS),
    "a batch": (ScaleKernel(RBFKernel(batch_shape=PAIR), batch_shape=PAIR), random(3, 1, 9, 3), None, RHS),
    "points in one dimension": (RBFKernel(), X[:, 0], None, X),
    "a vector": (RBFKernel(), X[:, 0], X[:, :1], X[:, 0]),
}


@pytest.mark.parametrize(("kernel", "x", "z", "rhs"), CASES.values(), ids=CASES)
def test_products_are_gpytorchs(kernel, x, z, rhs):
    expected = kernel.double()(x, z).to_dense() @ rhs
    found = covariance.matmul(kernel, x, z, rhs)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("known", [True, False])
def test_sizes_that_do_not_fit_are_refused_in_words(known):
    kernel = RBFKernel() if known else LinearKernel()
    with pytest.raises(SettingsError, match="3 and 2 input dimensions"):
        covariance.matmul(kernel, torch.rand(5, 3), torch.rand(4, 2), torch.rand(4, 1))
    with pytest.raises(SettingsError, match=r"rhs has 5 rows.*4 points"):
        covariance.matmul(kernel, torch.rand(5, 3), torch.rand(4, 3), torch.rand(5, 1))
    with pytest.raises(SettingsError, match="rhs has 5 rows"):
        covariance.matmul(kernel, torch.rand(5, 3), torch.rand(4, 3), torch.rand(5))


def test_no_way_that_fits_is_a_memory_error():
    """KeOps takes the least, but must not be compiled for a single call where it cannot be."""
    excluded = autokern.using(memory="1MiB", exclude=["keops"])
    with excluded, pytest.raises(MemoryBudgetError, match=r"kernel_matmul.*1 MiB may be taken"):
        covariance.matmul(RBFKernel(), torch.rand(5000, 2), None, torch.rand(5000, 1))


def test_without_room_for_the_matrix_tiles_multiply():
    x, rhs = torch.rand(6000, 2), torch.rand(6000, 1)
    with autokern.using(memory="64MiB"):
        covariance.matmul(RBFKernel(), x, None, rhs).sum().backward()
    assert all(name.startswith("tiled") for name in dispatch.stats()["kernel_matmul"])
