"""covariance.matmul: what it takes, what it refuses, what it gives."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.kernels import LinearKernel, RBFKernel, ScaleKernel
from support.tiling import KERNELS, assert_near, prepared, random

import autokern
from autokern import covariance
from autokern.core.errors import MemoryBudgetError, SettingsError
from autokern.core.registry import get
from autokern.runtime import dispatch

CANDIDATES = [c.name for c in get("kernel_matmul").candidates if "4096" not in c.name and "8192" not in c.name]
SLOW = {"keops": pytest.mark.slow}  # it compiles for each kernel


@pytest.mark.parametrize("name", ["scaled rbf", "matern 1/2", "sum of products"])
@pytest.mark.parametrize("candidate", [pytest.param(name, marks=SLOW.get(name, ())) for name in CANDIDATES])
def test_every_candidate_gives_what_gpytorch_gives(name, candidate, small_tiles):
    kernel, x, z, rhs = prepared(KERNELS[name]), random(40, 3), random(30, 3, seed=2), random(40, 2, seed=3)
    with autokern.using(force={"kernel_matmul": candidate}):
        assert_near(covariance.matmul(kernel, x, None, rhs), kernel(x) @ rhs, torch.float64, 1e4)
        assert_near(covariance.matmul(kernel, z, x, rhs), kernel(z, x) @ rhs, torch.float64, 1e4)


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


@pytest.mark.parametrize("shape", [(0, 5, 2), (5, 0, 2), (5, 5, 0)])
@pytest.mark.parametrize("candidate", ["stock", "tiled"])
def test_empty_is_what_gpytorch_gives(shape, candidate):
    n, m, t = shape
    with autokern.using(force={"kernel_matmul": candidate}):
        found = covariance.matmul(RBFKernel(), torch.rand(n, 3), torch.rand(m, 3), torch.rand(m, t))
    assert found.shape == (n, t)
    assert not found.any()


@pytest.mark.parametrize("known", [True, False])
def test_sizes_that_do_not_fit_are_refused_in_words(known):
    kernel = RBFKernel() if known else LinearKernel()
    with pytest.raises(SettingsError, match="3 and 2 input dimensions"):
        covariance.matmul(kernel, torch.rand(5, 3), torch.rand(4, 2), torch.rand(4, 1))
    with pytest.raises(SettingsError, match=r"rhs has 5 rows.*4 points"):
        covariance.matmul(kernel, torch.rand(5, 3), torch.rand(4, 3), torch.rand(5, 1))
    with pytest.raises(SettingsError, match="rhs has 5 rows"):
        covariance.matmul(kernel, torch.rand(5, 3), torch.rand(4, 3), torch.rand(5))


def test_lengthscales_that_do_not_fit_are_an_error():
    with pytest.raises((SettingsError, RuntimeError)):
        covariance.matmul(RBFKernel(ard_num_dims=2), torch.rand(5, 3), None, torch.rand(5, 1))


def test_types_are_gpytorchs_business():
    x = torch.rand(6, 2)
    with pytest.raises(RuntimeError, match="dtype"):
        covariance.matmul(RBFKernel(), x, None, torch.rand(6, 1).double())


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


def test_hooks_are_not_needed_and_change_nothing():
    kernel, x, rhs = RBFKernel().double(), random(30, 3), random(30, 2, seed=3)
    plain = covariance.matmul(kernel, x, None, rhs)
    with autokern.enabled():
        assert covariance.matmul(kernel, x, None, rhs).equal(plain)
    with gpytorch.settings.max_cholesky_size(1):
        assert covariance.matmul(kernel, x, None, rhs).equal(plain)
