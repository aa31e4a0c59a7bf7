"""Products tile by tile at their limits: odd points, memory, interrupts."""

import contextlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from support.tiling import (
    assert_right,
    each_dtype,
    each_kernel,
    each_plan,
    either_side,
    formed,
    prepared,
    product,
    random,
    read,
)

from autokern.kernels.tiles import Plan


@each_kernel
@each_dtype
@either_side
def test_points_that_coincide_give_finite_values_and_gradients(make, dtype, same):
    kernel = prepared(make, dtype=dtype)
    x1 = random(10, 3, dtype=dtype).repeat(4, 1).requires_grad_()
    x2 = x1 if same else x1.detach().clone().requires_grad_()
    rhs = random(40, 2, seed=3, dtype=dtype).requires_grad_()
    # the rounding of a squared distance, as a distance, is its root
    assert_right(kernel, x1, x2, rhs, Plan(16), {torch.float32: 3.0, torch.float64: 1e4}[dtype])


@each_kernel
@pytest.mark.parametrize("plan", [Plan(16), Plan(16, False)], ids=["symmetric", "from the left"])
@either_side
def test_clusters_far_from_each_other_do_not_overflow(make, plan, same):
    """The rounding of their norms exceeds what an exponential can bear, if it falls on the wrong side of zero."""
    kernel = prepared(make, dtype=torch.float32)
    near = random(20, 3, dtype=torch.float32)
    x1 = torch.cat((near, near + 1e5)).requires_grad_()
    x2 = x1 if same else x1.detach().clone()
    rhs = random(40, 2, seed=3, dtype=torch.float32)
    out = product(kernel, x1, x2, rhs, plan)
    top = kernel(x1[:1].detach()).to_dense().item() * rhs.abs().sum(0)
    assert (out.abs() <= 1.01 * top).all()
    assert formed(*read(kernel, x1, x2)).isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [x1, *kernel.parameters()]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@each_kernel
@each_plan
@either_side
def test_what_is_not_finite_is_not_hidden(bad, make, plan, same):
    kernel, x, rhs = prepared(make), random(40, 3), random(40, 2, seed=3)
    spoilt = x.clone()
    spoilt[17, 1] = bad
    out = product(kernel, spoilt, spoilt if same else x, rhs, plan)
    assert out[17].isnan().all()
    worse = rhs.clone()
    worse[3, 1] = bad
    out = product(kernel, x, x if same else x.clone(), worse, plan)
    assert out[:, 0].isfinite().all()
    assert not out[:, 1].isfinite().any()


@contextlib.contextmanager
def child(code):
    """A process that runs some code, and is gone afterwards."""
    start = "import torch, gpytorch\nfrom autokern import covariance\nfrom autokern.kernels import matmul, products\n"
    start += "from autokern.kernels import tree as trees\nfrom autokern.kernels.tiles import Plan\n"
    command = [sys.executable, "-W", "ignore", "-c", start + textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_matrix():
    code = """
def high():
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

kernel = gpytorch.kernels.RBFKernel()
x, y = torch.rand(30_000, 2), torch.rand(30_000, 2)
rhs = torch.rand(30_000, 1)
covariance.matmul(kernel, x[:3000], None, rhs[:3000]).sum().backward()
before = high()
covariance.matmul(kernel, x, None, rhs).sum().backward()
covariance.matmul(kernel, x[:15_000], y, rhs).sum().backward()
print(high() - before)
"""
    with child(code) as run:
        out, error = run.communicate(timeout=200)
    assert not run.returncode, error
    assert float(out.split()[-1]) < 150, "MiB; the matrix has 3433"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["forward", "backward"])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_ends_a_long_product_at_once(threads, what):
    code = f"""
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children ignore it
        torch.set_num_threads({threads})
        x, rhs = torch.rand(200_000, 2), torch.rand(200_000, 1)
        tree = trees.read(gpytorch.kernels.MaternKernel(1.5).requires_grad_(False), x)
        print("go", flush=True)
        if "{what}" == "forward":
            matmul.matmul(tree, None, rhs, Plan(768))
        products.gradients(tree, None, rhs, rhs, Plan(768))
    """
    with child(code) as run:
        assert "go\n" in iter(run.stdout.readline, "")
        time.sleep(0.5)
        start = time.monotonic()
        run.send_signal(signal.SIGINT)
        _, error = run.communicate(timeout=60)
        assert "KeyboardInterrupt" in error
        assert run.returncode
        assert time.monotonic() - start < 20
