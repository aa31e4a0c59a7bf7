"""covariance.matmul: what it takes, what it refuses, what it gives."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import LinearKernel, RBFKernel, ScaleKernel
from support.tiling import random

import autokern
from autokern import covariance
from autokern.core.errors import MemoryBudgetError, SettingsError
from autokern.runtime import dispatch


@pytest.mark.parametrize("kernel", [LinearKernel(), RBFKernel() * LinearKernel(), type("Mine", (RBFKernel,), {})()])
def test_kernels_that_are_not_known_are_gpytorchs(kernel):
    kernel, x, rhs = kernel.double(), random(10, 3), random(10, 2, seed=3)
    torch.testing.assert_close(covariance.matmul(kernel, x, None, rhs), kernel(x).to_dense() @ rhs)
    torch.testing.assert_close(covariance.matmul(kernel, x[:4], x, rhs), kernel(x[:4], x).to_dense() @ rhs)


def test_a_vector_gives_a_vector_and_points_may_have_one_dimension():
    kernel, x = RBFKernel().double(), random(10)
    expected = kernel(x) @ x
    torch.testing.assert_close(covariance.matmul(kernel, x, None, x), expected)
    torch.testing.assert_close(covariance.matmul(kernel, x.unsqueeze(-1), x, x), expected)


def test_active_dimensions_are_selected():
    for kernel in (RBFKernel(active_dims=(1,)).double(), RBFKernel(active_dims=(0, 2), ard_num_dims=2).double()):
        x, z, rhs = random(12, 3), random(9, 3, seed=2), random(9, 2, seed=3)
        torch.testing.assert_close(covariance.matmul(kernel, x, z, rhs), kernel(x, z) @ rhs)


def test_batches_broadcast():
    kernel = ScaleKernel(RBFKernel(batch_shape=torch.Size([2])), batch_shape=torch.Size([2])).double()
    x, rhs = random(3, 1, 12, 3), random(12, 2, seed=3)
    assert covariance.matmul(kernel, x, None, rhs).shape == (3, 2, 12, 2)
    torch.testing.assert_close(covariance.matmul(kernel, x, None, rhs), kernel(x).to_dense() @ rhs)


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
