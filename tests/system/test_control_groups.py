"""Real control groups, version 1 or 2, where this user may make some: threads by quota, memory by limit.

The kernel judges: a process that takes more memory than is left does not come back.
"""

import contextlib
import json
import math
import os
import time
from pathlib import Path

import pytest
from support.programs import QUIET, python

pytestmark = pytest.mark.slow
ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MIB = 2**20
ENTER = "import os, sys, json; sys.argv[1] and open(sys.argv[1], 'w').write(str(os.getpid()))\n"
THREADS = """
from autokern.system import host, threads
print(json.dumps({"threads": threads.ceiling(), "fingerprint": host.current().fingerprint}))
"""
MEMORY = """
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
import autokern
from autokern.system import host
torch.manual_seed(0)
x, rhs = torch.rand(24_000, 3), torch.randn(24_000, 2)
kernel = ScaleKernel(MaternKernel(nu=2.5)).requires_grad_(False)
found = {"left": host.available_memory("cpu"), "limit": host.memory_limited_by("cpu"), "refused": "nothing"}
with autokern.enabled():
    try:
        kernel(x).to_dense()
    except MemoryError as error:
        found["refused"] = type(error).__name__
    product = kernel(x) @ rhs
rows = slice(0, None, 1000)
exact = kernel(x[rows], x).to_dense() @ rhs
print(json.dumps({**found, "error": ((product[rows] - exact).abs().max() / exact.abs().max()).item()}))
"""


@contextlib.contextmanager
def group(controller, first, second):
    """A group below this process's own, with limits as version 1 and as version 2 have them; yields how to enter it."""
    folder = None
    for line in OWN.read_text(encoding="utf-8").splitlines() if OWN.exists() else ():
        _, controllers, path = line.split(":", 2)
        mount = ROOT / controller if controller in controllers.split(",") else None
        mount = ROOT if mount is None and not controllers and (ROOT / "cgroup.controllers").exists() else mount
        if mount is not None:
            folder = mount.joinpath(path.lstrip("/"), f"autokern-test-{os.getpid()}")
    if folder is None:
        pytest.skip("there are no control groups")
    limits = first if folder.is_relative_to(ROOT / controller) else second
    try:
        try:
            folder.mkdir()
            for name, value in limits.items():
                (folder / name).write_text(value, encoding="utf-8")
        except OSError as error:
            pytest.skip(f"no control group may be made: {error}")
        yield str(folder / "cgroup.procs")
    finally:
        for _ in range(100):  # the kernel takes a moment to forget a process
            with contextlib.suppress(OSError):
                if folder.exists():
                    folder.rmdir()
                break
            time.sleep(0.02)


def told(program, enters=""):
    """What a program that enters a group before it imports anything prints."""
    done = python(*QUIET, "-c", ENTER + program, enters, AUTOKERN_CALIBRATE="never")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("count", [0.5, 1.0, 1.5, 7.5])
def test_threads_are_the_quota_rounded_up_at_most(count):
    quota, period = str(int(count * 100_000)), "100000"
    first = {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota}
    with group("cpu", first, {"cpu.max": f"{quota} {period}"}) as enters:
        free, found = told(THREADS), told(THREADS, enters)
    assert found["threads"] == min(math.ceil(count), free["threads"])
    assert (found["fingerprint"] == free["fingerprint"]) == (found["threads"] == free["threads"])


@pytest.mark.parametrize("most", [900, 1500])
def test_what_does_not_fit_is_refused_and_what_fits_by_tiles_is_computed(most):
    with group("memory", {"memory.limit_in_bytes": str(most * MIB)}, {"memory.max": str(most * MIB)}) as enters:
        found = told(MEMORY, enters)
    assert found["refused"] == "MemoryBudgetError"
    assert found["limit"] == "the memory limit of the control group"
    assert found["left"] <= most * MIB
    assert found["error"] < 1e-4
