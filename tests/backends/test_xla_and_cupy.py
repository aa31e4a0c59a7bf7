"""Candidates by other backends: XLA in earnest where JAX is installed, CuPy played by NumPy or in earnest on a GPU."""

import importlib.util
import os
import sys

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from support import fakes, tiling
from support.outcomes import outcome
from support.programs import python
from support.tiling import KERNELS, NONE, XLA, each_dtype, each_kernel, either_side, prepared, product, random

from autokern import covariance
from autokern.backends import cupy_, xla
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.runtime import dispatch
from autokern.system import host, threads
from autokern.tuning.measuring import trial

needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")
SOME = KERNELS["sum of products"]
PROBLEM = Problem(op="kernel_matmul", m=3000, n=3000, d=10, rhs=11, variant="rbf/same")


def arguments(make, n=43, m=37, t=3, same=True, dtype=torch.float64, d=3):
    x1 = random(n, d, dtype=dtype).requires_grad_()
    x2 = x1 if same else random(m, d, seed=2, dtype=dtype).requires_grad_()
    return prepared(make, NONE, dtype), x1, x2, random(x2.shape[0], t, seed=3, dtype=dtype).requires_grad_()


@pytest.mark.thin
@needs_jax
@each_kernel
@either_side
@each_dtype
def test_values_and_gradients_are_those_of_the_formula(make, same, dtype):
    tiling.assert_right(*arguments(make, same=same, dtype=dtype), XLA)


@needs_jax
@either_side
def test_the_diagonal_is_exact(same):
    """Far from the origin rounding would show at once in the kink of a Matérn 1/2."""
    x = random(50, 3, dtype=torch.float32) + 100
    kernel = MaternKernel(0.5, lengthscale_prior=None)
    found = product(kernel, x, x if same else x.clone(), torch.eye(50), XLA)
    if same:
        assert found.diagonal().eq(1).all()
        torch.testing.assert_close(found, found.mT, rtol=1e-5, atol=1e-6)
    assert found.diagonal().gt(0.99).all()


@needs_jax
@pytest.mark.parametrize("n", [1, 8, 31, 33, 64, 70])
def test_sizes_around_those_of_a_block(n, monkeypatch):
    """Batches, no points at all and derivatives by differences: `test_products.py`."""
    monkeypatch.setitem(xla._BLOCK, "cpu", 2048)
    tiling.assert_right(*arguments(SOME, n, 47, 1, same=False), XLA)
    tiling.assert_right(*arguments(SOME, n, t=1), XLA)


@needs_jax
@either_side
def test_no_layout_matters_and_arguments_are_left_alone(same):
    kernel, x1, x2, rhs = arguments(SOME, same=same)
    expected = product(kernel, x1, x2, rhs, XLA).detach()
    first = x1.detach().mT.contiguous().mT
    second = first if same else x2.detach().repeat_interleave(2, 0)[::2]
    wide = rhs.detach().repeat(1, 2)[:, :3]
    before = [t.clone() for t in (first, second, wide)]
    out = product(kernel.requires_grad_(False), first, second, wide, XLA)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    out.add_(1)
    assert all(t.equal(b) for t, b in zip((first, second, wide), before, strict=True))
    assert out.is_contiguous()
    torch.testing.assert_close(product(kernel, first, second, wide, XLA), expected, rtol=1e-12, atol=1e-12)
    with torch.inference_mode():
        assert product(kernel, first, second, wide, XLA).equal(product(kernel, first, second, wide, XLA))


@needs_jax
def test_models_and_covariances_take_it_where_it_is_ordered(monkeypatch):
    monkeypatch.setenv("AUTOKERN_FORCE", "kernel_matmul=xla")
    dispatch.reset()
    x, rhs = random(40, 3), random(40, 2, seed=4)
    kernel = ScaleKernel(RBFKernel()).double()
    found = covariance.matmul(kernel, x, None, rhs)
    assert dispatch.stats()["kernel_matmul"] == {"xla": 1}
    torch.testing.assert_close(found, kernel(x).to_dense() @ rhs)
    assert found.requires_grad


@needs_jax
def test_jax_keeps_the_configuration_of_its_user():
    import jax

    for wide in (False, True):
        with jax.enable_x64(wide):
            for dtype in (torch.float32, torch.float64):
                assert product(*arguments(SOME, dtype=dtype), XLA).dtype is dtype
            assert jax.config.jax_enable_x64 is wide
            assert jax.numpy.ones(1).dtype == ("float64" if wide else "float32")


@needs_jax
def test_sizes_that_are_near_share_what_is_compiled():
    product(*arguments(SOME, n=2001, m=1999, same=False), XLA)
    compiled = xla._compiled()
    before = compiled._cache_size()
    for n in (1985, 2010, 2048):
        product(*arguments(SOME, n=n, m=n, same=False), XLA)
    assert compiled._cache_size() == before
    assert all(0 <= xla._padded(n) - n <= n / 16 for n in range(1, 5000))


CHILD = """
import os, warnings, torch
warnings.simplefilter("error")
warnings.filterwarnings("ignore", message=".*torch.jit.script.*")
import autokern, sys
from gpytorch.kernels import RBFKernel
kernel, x, rhs = RBFKernel().double().requires_grad_(False), torch.rand(60, 2).double(), torch.rand(60, 3).double()
usual = autokern.covariance.matmul(kernel, x, None, rhs)
pid = os.fork()  # JAX is installed and not used: no warning
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
assert "jax" not in sys.modules
with autokern.using(force={"kernel_matmul": "xla"}):
    first = autokern.covariance.matmul(kernel, x, None, rhs)
    assert autokern.stats()["kernel_matmul"]["xla"] == 1
    warnings.simplefilter("ignore")
    pid = os.fork()
    if pid == 0:
        known = autokern.covariance.matmul(kernel, x, None, rhs)  # by a memo
        new = autokern.covariance.matmul(kernel, x[:50], None, rhs[:50])
        fine = torch.allclose(known, first) and autokern.stats()["kernel_matmul"]["xla"] == 2
        fine = fine and "forked" in autokern.explain("kernel_matmul", n=50).excluded["xla"]
        os._exit(0 if fine else 3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert torch.allclose(first, usual)
"""


@pytest.mark.slow
@needs_jax
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forks_warn_only_after_jax_was_used_and_children_use_tiles(tmp_path):
    one = {"OMP_NUM_THREADS": "1"}  # torch itself does not survive a fork once it has used threads
    told = python("-c", CHILD, AUTOKERN_HOME=str(tmp_path), **one)
    assert told.stdout.strip() == "0", told.stderr


def _reason(**changes):
    return get("kernel_matmul")["xla"].why_not(PROBLEM.replace(**changes))


@pytest.fixture
def usable(monkeypatch):
    """JAX for the CPU, installed and not imported."""
    monkeypatch.setattr(xla, "installed", lambda package: package == "jax")
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.setattr(xla, "_failure", "")


WITH_GPU, FREE = ("jax", "jax_cuda12_plugin"), {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


@pytest.mark.parametrize(
    ("told", "packages", "variables", "changes"),
    [
        (None, ("jax",), {}, {}),
        ("JAX is not installed", (), {}, {}),
        ("no devices of kind cuda", ("jax",), {}, {"device": "cuda"}),
        ("no devices of kind mps", ("jax",), {}, {"device": "mps"}),
        ("batch", ("jax",), {}, {"batch": 100}),
        # whatever it computes on, its first use takes the memory of a GPU
        ("XLA_PYTHON_CLIENT_PREALLOCATE=false", WITH_GPU, {}, {"device": "cpu"}),
        ("XLA_PYTHON_CLIENT_PREALLOCATE=false", WITH_GPU, {}, {"device": "cuda"}),
        (None, WITH_GPU, FREE, {}),
        (None, WITH_GPU, FREE, {"device": "cuda"}),
        (None, WITH_GPU, {"JAX_PLATFORMS": "cpu"}, {}),
        ("no devices of kind cuda", WITH_GPU, {"JAX_PLATFORMS": "cpu"}, {"device": "cuda"}),
    ],
)
def test_where_it_cannot_work(usable, monkeypatch, told, packages, variables, changes):
    monkeypatch.setattr(xla, "installed", packages.__contains__)
    for name in ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _reason(**changes) is None if told is None else told in _reason(**changes)
    monkeypatch.setattr(xla, "forked", lambda: True)
    assert not packages or "forked" in _reason()


@pytest.mark.parametrize(("used", "refused"), [(16, False), (8, False), (4, True)])  # the others are hyper-threads
def test_it_heeds_how_many_threads_are_wanted(usable, monkeypatch, used, refused):
    monkeypatch.setattr(host, "affinity", lambda: 16)
    monkeypatch.setattr(host, "thread_ceiling", lambda: 16)
    monkeypatch.setattr(threads, "current", lambda: used)
    assert "16 CPUs" in _reason() if refused else _reason() is None


def test_a_jax_that_cannot_be_imported_is_not_tried_again(usable, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ImportError):
        product(*arguments(SOME), XLA)
    assert "importing it fails (ModuleNotFoundError" in _reason()


def test_its_memory_is_far_from_that_of_the_matrix():
    candidate = get("kernel_matmul")["xla"]
    large = PROBLEM.replace(m=200_000, n=200_000)
    assert candidate.memory(large) < 2e-3 * large.m * large.n * large.itemsize
    assert candidate.memory(PROBLEM.replace(grad="theta")) > candidate.memory(PROBLEM)


@pytest.fixture
def cupy(monkeypatch):
    return fakes.install(monkeypatch)


def test_cupy_works_on_the_stream_of_torch_and_without_copies(cupy):
    a = random(3, 5, 5)
    q, r = cupy_.qr_by_cupy(a)
    torch.testing.assert_close(q @ r, a)
    assert (cupy.streams, cupy.calls) == ([1234], [("qr", (3, 5, 5))])
    nothing = torch.full((3, 3), float("nan"), dtype=torch.float64)  # NaNs are stock's
    assert all(t.isnan().any() for t in outcome(cupy_.qr_by_cupy, nothing)[0])


@pytest.mark.parametrize("shape", [(6, 4), (4, 4), (2, 5, 3)], ids=str)
def test_first_and_second_derivatives_of_qr(cupy, shape):
    a = random(*shape).requires_grad_()
    assert torch.autograd.gradcheck(cupy_.qr_by_cupy, (a,))
    assert torch.autograd.gradgradcheck(cupy_.qr_by_cupy, (a,))
    assert {name for name, _ in cupy.calls} == {"qr"}


def test_where_cupy_cannot_work(monkeypatch):
    cuda = Problem(op="qr", m=9, n=4, device="cuda")
    qr = get("qr")["cupy"]
    monkeypatch.setattr(cupy_, "installed", lambda package: False)
    assert "pip install 'autokern[cupy]'" in qr.why_not(cuda)
    monkeypatch.setattr(cupy_, "installed", lambda package: True)
    assert qr.why_not(cuda) is None
    assert "CUDA device" in qr.why_not(cuda.replace(device="cpu"))
    assert "more columns" in qr.why_not(cuda.replace(m=3, grad="a"))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "ROCm" in qr.why_not(cuda)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("op", "name"), [("kernel_matmul", "xla"), ("qr", "cupy")])
def test_on_a_gpu(op, name):
    op = get(op)
    served = [problem for problem in op.grid("quick", "float64", "cuda") if op[name].why_not(problem) is None]
    for problem in served:
        args = op.sample(problem, torch.Generator().manual_seed(1))
        with torch.cuda.stream(torch.cuda.Stream()):
            assert op.check(problem, trial(op, op[name].run, problem, args)().out, args) <= 1
    if not served:
        pytest.skip(f"{name} serves nothing here")
