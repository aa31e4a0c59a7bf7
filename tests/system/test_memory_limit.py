"""The memory limit, the error beyond it, footprints, and huge pages where the system has them."""

import mmap
import os
import platform

import gpytorch
import pytest
import torch
from gpytorch import kernels
from linear_operator.operators import AddedDiagLinearOperator, ConstantDiagLinearOperator, DenseLinearOperator
from support.models import ExactModel, points, step
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
    return memory.current(device, memory.ordered_here()).bytes


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

    fewer = "fewer points at once, or more memory"
    assert told("torch.float64", of_kernel=False) == f"float32, which takes half of it; {fewer}"
    assert "float32" not in told("float64", of_kernel=False, need=9)
    assert "float32" not in told("float32", of_kernel=True)
    assert "float32" in told("float64", of_kernel=True)
    assert all(words in told("float32", of_kernel=True) for words in ("kernel_matmul", "inducing points"))
    assert told("float32", of_kernel=False) == fewer


@pytest.mark.parametrize(
    ("count", "words"),
    [(7, "7 bytes"), (2**10, "1 KiB"), (3 * 2**19, "1.5 MiB"), (2 * GIB, "2 GiB"), (2000 * GIB, "2,000 GiB")],
)
def test_sizes_in_words(count, words):
    assert sized(count) == words


def test_a_kernel_matrix_takes_the_way_that_fits():
    x, kernel = points(3000), gpytorch.kernels.MaternKernel(2.5).double().requires_grad_(False)
    stock = kernel.forward(x, x)
    with autokern.enabled(), autokern.using(memory="90MiB"):  # of 69 MiB each, stock holds three, one GEMM three
        found = kernel(x).to_dense()
        assert autokern.stats()["kernel_matrix"].keys() == {"tiled"}
    torch.testing.assert_close(found, stock, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_training_goes_on_where_only_the_frugal_way_fits():
    x = points(2400)
    model = ExactModel(x, x.sum(-1).sin(), mean=gpytorch.means.ZeroMean()).double()
    factorised = gpytorch.settings.fast_computations(log_prob=False)  # to iterate takes no matrix
    with autokern.enabled(), factorised, autokern.using(memory="80MiB"):  # of 44 MiB each
        loss, gradients = step(model)
        (served,) = autokern.stats()["exact_log_prob"]
        assert served.startswith("fused")
    assert all(gradient.isfinite().all() for gradient in gradients)
    with autokern.enabled(), factorised:
        with autokern.using(memory="20MiB"), pytest.raises(MemoryBudgetError, match=r"m=2400.*inducing"):
            step(model)
        with autokern.using(force={"exact_log_prob": "fused"}):
            again, _ = step(model)
    torch.testing.assert_close(again, loss)


@pytest.mark.parametrize(
    ("make", "most", "with_gradients"),
    [
        (kernels.LinearKernel, 0, 0),  # what is not known counts nothing
        (lambda: kernels.ScaleKernel(kernels.LinearKernel()), 0, 0),
        (lambda: kernels.LinearKernel() + kernels.LinearKernel(), 0, 0),
        (lambda: kernels.LinearKernel() + kernels.RBFKernel(), 1, 1),
        (type("Mine", (kernels.RBFKernel,), {}), 0, 0),  # may have another formula
        (lambda: kernels.RBFKernel() + kernels.RBFKernel(), 3, 3),  # parts of sums and products live at once
        (lambda: kernels.AdditiveKernel(kernels.MaternKernel(), kernels.MaternKernel()), 3, 5),
        (lambda: kernels.ProductKernel(kernels.MaternKernel(), kernels.MaternKernel()), 3, 5),
    ],
)
def test_most_matrices_at_once(make, most, with_gradients):
    found = [matrices_of(make().requires_grad_(grad)(torch.rand(5, 3))).peak for grad in (False, True)]
    assert found == [most, with_gradients]


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


def test_a_large_tensor_of_the_cpu_is_an_ordinary_one_in_huge_pages(advised):
    like = torch.empty(0, dtype=torch.float64)
    found = memory.huge((1500, 1000), like)
    assert (found.shape, found.dtype, found.is_contiguous()) == ((1500, 1000), like.dtype, True)
    ((start, length),) = advised
    assert start % memory._HUGE == 0
    assert found.data_ptr() <= start <= start + length <= found.data_ptr() + found.nbytes
    found.zero_()
    assert memory.huge((100, 100), like).shape == (100, 100)  # left to the allocator
    assert memory.huge((5000, 5000), like.to("meta")).is_meta
    assert len(advised) == 1


def test_a_system_without_huge_pages(monkeypatch, tmp_path):
    path = tmp_path / "enabled"
    monkeypatch.setattr(memory, "_SETTING", str(path))
    for setting in ("", "always madvise [never]"):  # without a file first
        if setting:
            path.write_text(setting)
        memory._madvise.cache_clear()
        assert not memory.has_huge()
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
