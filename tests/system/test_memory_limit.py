"""The memory limit, the error beyond it, footprints, and huge pages where the system has them."""

from __future__ import annotations

import mmap
import os
import platform

import gpytorch
import pytest
import torch
from linear_operator.operators import AddedDiagLinearOperator, ConstantDiagLinearOperator, DenseLinearOperator
from support.models import ExactModel
from support.programs import said

import autokern
from autokern.core.errors import MemoryBudgetError
from autokern.core.output import sized
from autokern.core.settings import Settings
from autokern.hooks.memory import matrices_of
from autokern.runtime import dispatch
from autokern.system import host, memory
from autokern.system.memory import LARGE, Limit

GIB = 2**30


def available(device) -> int:
    return memory.current(device, memory._ordered()).bytes


def test_the_least_of_order_and_what_is_there_counts(free):
    assert available("cpu") == 4 * GIB
    with autokern.using(memory="1GiB"):
        assert available(torch.device("cpu")) == GIB
        with autokern.using(memory="2GiB"):
            assert available("cpu") == 2 * GIB
    with autokern.using(memory="8GiB"):
        assert available("cpu") == 4 * GIB
    dispatch.reset(Settings(memory=3 * GIB, calibrate="never"))
    assert available("cpu") == 3 * GIB


def test_nobody_looks_for_small_calls(free):
    free.bytes = 0
    assert memory.fits(LARGE - 1, "cpu")
    assert free.asked == 0
    assert not memory.fits(LARGE, "cpu")
    assert free.asked == 1


@pytest.mark.parametrize(
    ("left", "words"), [(None, "free RAM"), (GIB, "the memory limit of the control group"), (9 * GIB, "free RAM")]
)
def test_a_refusal_says_what_is_there_and_whence(monkeypatch, left, words):
    assert host.memory_limited_by("cuda") == "free memory of the GPU"
    monkeypatch.setattr(host, "ram", lambda: (8 * GIB, 4 * GIB))
    monkeypatch.setattr(host, "memory_left", lambda: left)
    size = 1 if left == GIB else 4
    with pytest.raises(MemoryBudgetError, match=rf"a matrix needs 7 GiB .* {size} GiB may be taken \({words}\)"):
        memory.refuse("a matrix", 7 * GIB, "cpu", "float64", of_kernel=False)
    with autokern.using(memory="512MiB"), pytest.raises(MemoryBudgetError, match=r"0.5 GiB .*AUTOKERN_MEMORY or using"):
        memory.refuse("a matrix", 7 * GIB, "cpu", "float64", of_kernel=False)


def test_advice_fits_the_dtype():
    def told(dtype: str, of_kernel: bool, need: int = 7) -> str:
        limit = Limit(4, memory.ORDER)
        return str(memory.refusal("a matrix", need, limit, "cpu", dtype, of_kernel)).partition("work: ")[2]

    assert (
        told("torch.float64", of_kernel=False)
        == "float32, which takes half of it; fewer points at once, or more memory"
    )
    assert "float32" not in told("float64", of_kernel=False, need=9)
    assert "float32" not in told("float32", of_kernel=True)
    assert "float32" in told("float64", of_kernel=True)
    assert all(words in told("float32", of_kernel=True) for words in ("kernel_matmul", "inducing points"))
    assert told("float32", of_kernel=False) == "fewer points at once, or more memory"


@pytest.mark.parametrize(
    ("count", "words"),
    [(7, "7 bytes"), (2**10, "1 KiB"), (3 * 2**19, "1.5 MiB"), (2 * GIB, "2 GiB"), (2000 * GIB, "2,000 GiB")],
)
def test_sizes_in_words(count, words):
    assert sized(count) == words


def test_a_kernel_matrix_takes_the_way_that_fits():
    x = torch.rand(3000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kernel = gpytorch.kernels.MaternKernel(2.5).double().requires_grad_(False)
    stock = kernel.forward(x, x)
    with autokern.enabled(), autokern.using(memory="90MiB"):  # of 69 MiB each, stock holds three, one GEMM three
        found = kernel(x).to_dense()
        assert autokern.stats()["kernel_matrix"].keys() == {"tiled"}
        decision = autokern.explain("kernel_matrix", m=3000, n=3000, d=2, variant="matern52/same/iso")
    torch.testing.assert_close(found, stock, rtol=1e-10, atol=1e-10)
    assert decision.reason.startswith("stock does not fit the memory")
    with autokern.using(force={"kernel_matrix": "gemm"}, memory="90MiB"):
        forced = autokern.explain("kernel_matrix", m=3000, n=3000, d=2, variant="matern52/same/iso")
    assert forced.candidate == "tiled"
    assert "gemm was forced" in forced.reason


@pytest.mark.slow
def test_training_goes_on_where_only_the_frugal_way_fits():
    x = torch.rand(2400, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    model = ExactModel(x, x.sum(-1).sin(), mean=gpytorch.means.ZeroMean()).double()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    factorised = gpytorch.settings.fast_computations(log_prob=False)  # to iterate takes no matrix
    with autokern.enabled(), factorised, autokern.using(memory="80MiB"):  # of 44 MiB each
        loss = -mll(model(*model.train_inputs), model.train_targets)
        loss.backward()
        (served,) = autokern.stats()["exact_log_prob"]
        assert served.startswith("fused")
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with autokern.enabled(), factorised:
        with (
            autokern.using(memory="20MiB"),
            pytest.raises(MemoryBudgetError, match=r"m=2400.*inducing"),
        ):
            mll(model(*model.train_inputs), model.train_targets)
        with autokern.using(force={"exact_log_prob": "fused"}):
            again = -mll(model(*model.train_inputs), model.train_targets)
    torch.testing.assert_close(again, loss)


def peak(kernel, grad: bool = False) -> float:
    return matrices_of(kernel.requires_grad_(grad)(torch.rand(5, 3))).peak


def test_what_is_not_known_counts_nothing():
    kernels = gpytorch.kernels
    unknown = kernels.LinearKernel()
    assert peak(unknown, grad=True) == 0
    assert peak(kernels.ScaleKernel(unknown), grad=True) == 0
    assert peak(unknown + kernels.LinearKernel()) == 0
    assert peak(unknown + kernels.RBFKernel()) == 1

    class Mine(kernels.RBFKernel):
        """May have another formula."""

    assert peak(Mine()) == 0


@pytest.mark.parametrize(("grad", "most"), [(False, [3, 3, 3]), (True, [3, 5, 5])])
def test_parts_of_sums_and_products_live_at_once(grad, most):
    kernels = gpytorch.kernels
    found = [peak(kernels.RBFKernel() + kernels.RBFKernel(), grad)]
    found += [peak(operation(*(kernels.MaternKernel() for _ in range(2))), grad)
              for operation in (kernels.AdditiveKernel, kernels.ProductKernel)]  # fmt: skip
    assert found == most


def test_what_is_dense_already_costs_nothing():
    a = torch.eye(5)
    dense = DenseLinearOperator(a)
    assert matrices_of(dense).peak == 0
    total = AddedDiagLinearOperator(dense, ConstantDiagLinearOperator(torch.ones(1), 5))
    assert matrices_of(total).peak > 0
    total.to_dense()
    assert matrices_of(total).peak == 0
    lazy = gpytorch.kernels.RBFKernel()(a)
    assert matrices_of(lazy).peak == 1
    lazy.evaluate_kernel()
    assert matrices_of(lazy).peak == 0


@pytest.fixture
def advised(monkeypatch):
    """What the system is asked for: start and length."""
    asked = []
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(memory, "_madvise", lambda: lambda start, length, advice: asked.append((start, length)))
    return asked


def test_a_large_tensor_is_an_ordinary_one_in_huge_pages(advised):
    like = torch.empty(0, dtype=torch.float64)
    found = memory.huge((1500, 1000), like)
    assert (found.shape, found.dtype, found.is_contiguous()) == ((1500, 1000), like.dtype, True)
    ((start, length),) = advised
    assert start % memory._HUGE == 0
    assert found.data_ptr() <= start <= start + length <= found.data_ptr() + found.nbytes
    found.zero_()


def test_small_tensors_and_other_devices_are_left_to_their_allocators(advised):
    assert memory.huge((100, 100), torch.empty(0)).shape == (100, 100)
    assert memory.huge((5000, 5000), torch.empty(0, device="meta")).is_meta
    assert advised == []


def test_a_system_without_huge_pages(monkeypatch, tmp_path):
    for setting, there in (("always madvise [never]", False), (None, False)):
        path = tmp_path / "enabled"
        if setting is None:
            path.unlink()
        else:
            path.write_text(setting)
        monkeypatch.setattr(memory, "_SETTING", str(path))
        memory._madvise.cache_clear()
        assert memory.has_huge() is there
        assert memory.huge((2000, 2000), torch.empty(0)).shape == (2000, 2000)
    memory._madvise.cache_clear()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc recycles")
def test_arrays_that_a_program_frees_are_recycled():
    code = """
import resource, sys
import numpy as np
from autokern.system import memory
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def program():
    kept = [np.ones((200, 200)) for _ in range(8)]
    del kept
np.empty(2**19, np.uint8)  # as small libraries do at their import
if sys.argv[1] == "recycled": memory.recycle()
program()
before = faults()
for _ in range(20): program()
print(faults() - before)
"""
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    told = {how: int(said(code, how, env=surroundings)[-1]) for how in ("plain", "recycled")}
    if told["plain"] < 20 * 78:  # a fault for each page of at least one array
        pytest.skip("the C library recycles them by itself, as what was imported lies in its heap")
    assert told["recycled"] < 100, told
