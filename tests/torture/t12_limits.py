"""T12: the limits of control groups hold: threads by the CPU quota, refusals in place of being killed by memory.

Groups are made for real where this user may make some (version 1 or 2), and a tree of files in version 2's form is put
in their place as well. Where a limit is real the kernel judges: who takes more than is left does not come back.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness import Findings, Mutation, main

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MIB = 2**20
FILES = {"cpu": "cpu.max", "memory": "memory.max"}
"""What limits are written to in version 2."""


class Size(NamedTuple):
    """How much is done: CPU quotas, and MiB of memory that a process may have."""

    quotas: tuple[float, ...]
    memory: tuple[int, ...]


SIZES = {
    "ci": Size((0.5, 1.5), (900,)),
    "full": Size((0.1, 0.5, 0.99, 1.0, 1.01, 1.5, 2.0, 7.5), (800, 900, 1000, 1200, 1500)),
}


class Group(NamedTuple):
    """Where a process must go to be limited, or what it must take for its groups."""

    enters: str | None = None
    root: str | None = None


Make = Callable[[str, Mapping[str, str], str], "contextlib.AbstractContextManager[Group | None]"]


@contextlib.contextmanager
def _real(controller: str, first: Mapping[str, str], second: str) -> Iterator[Group | None]:
    """A group below this process's own, with limits as version 1 and as version 2 have them; None where none can be."""
    folder = None
    for line in OWN.read_text(encoding="utf-8").splitlines() if OWN.exists() else ():
        _, controllers, path = line.split(":", 2)
        mount = ROOT / controller if controller in controllers.split(",") else None
        mount = ROOT if mount is None and not controllers and (ROOT / "cgroup.controllers").exists() else mount
        if mount is not None:
            folder = mount.joinpath(path.lstrip("/"), f"autokern-torture-{os.getpid()}")
    try:
        if folder is None:
            raise FileNotFoundError
        limits = first if folder.is_relative_to(ROOT / controller) else {FILES[controller]: second}
        folder.mkdir()
        for name, value in limits.items():
            (folder / name).write_text(value, encoding="utf-8")
    except OSError:
        made = None
    else:
        made = Group(enters=str(folder / "cgroup.procs"))
    try:
        yield made
    finally:
        for _ in range(100):  # the kernel takes a moment to forget a process
            with contextlib.suppress(OSError):
                if folder is not None and folder.exists():
                    folder.rmdir()
                break
            time.sleep(0.02)


@contextlib.contextmanager
def _mocked(controller: str, first: Mapping[str, str], second: str) -> Iterator[Group | None]:
    """Files as version 2 has them: a group in a group, of which the outer one has the limit."""
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder, "outer", "inner")
        inner.mkdir(parents=True)
        (inner.parent / FILES[controller]).write_text(f"{second}\n", encoding="utf-8")
        (inner / FILES[controller]).write_text("max\n", encoding="utf-8")
        for used in (inner, inner.parent):
            (used / "memory.current").write_text(f"{300 * MIB}\n", encoding="utf-8")
            (used / "memory.stat").write_text(f"anon 5\ninactive_file {20 * MIB}\n", encoding="utf-8")
        Path(folder, "own").write_text("0::/outer/inner\n", encoding="utf-8")
        yield Group(root=folder)


KINDS: dict[str, Make] = {"real": _real, "mocked": _mocked}


def _cpu(count: float) -> tuple[dict[str, str], str]:
    quota, period = str(int(count * 100_000)), "100000"
    return {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota}, f"{quota} {period}"


def _in_child(what: str, group: Group, **more: Any) -> dict[str, Any]:
    command = [sys.executable, __file__, "child", what, json.dumps({**group._asdict(), **more})]
    environment = {**os.environ, "AUTOKERN_CALIBRATE": "never", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return {"failed": f"ended with {done.returncode}: {last}"[:300]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def quota(found: Findings, size: Size) -> None:
    """Limit CPU time: threads are the quota rounded up, at most; a profile serves where as many threads can run."""
    free, runs = _in_child("threads", Group()), dict.fromkeys(KINDS, 0)
    for kind, make in KINDS.items():
        for count in size.quotas:
            with make("cpu", *_cpu(count)) as group:
                if group is None:
                    continue
                runs[kind] += 1
                told = _in_child("threads", group, profile=free["fingerprint"])
            where = f"{kind} quota of {count:g}"
            if "failed" in told:
                found.broken.append(f"{where}: {told['failed']}")
                continue
            expected = min(math.ceil(count), free["threads"])
            found.expect(told["threads"] == expected, f"{where}: {told['threads']} threads")
            same = told["fingerprint"] == free["fingerprint"]
            found.expect(same == (expected == free["threads"]), f"{where}: same fingerprint {same}")
    groups = f"{runs['real']} real and {runs['mocked']} mocked groups"
    found.figures["quota"] = f"{groups}, {free['threads']} threads without"


def memory(found: Findings, size: Size) -> None:
    """Limit memory: what does not fit is refused, what fits by tiles is computed, and nobody is killed."""
    runs, slowest, least = dict.fromkeys(KINDS, 0), 0.0, math.inf
    for kind, make in KINDS.items():
        for most in size.memory:
            limit = str(most * MIB)
            with make("memory", {"memory.limit_in_bytes": limit}, limit) as group:
                if group is None:
                    continue
                runs[kind] += 1
                told = _in_child("memory", group, points=24_000)
            where = f"{kind} limit of {most} MiB"
            if "failed" in told:
                found.broken.append(f"{where}: {told['failed']}")
                continue
            found.expect(told["refused"] == "MemoryBudgetError", f"{where}: to_dense told {told['refused']}")
            found.expect(told["limit"] == "the memory limit of the control group", f"{where}: by {told['limit']}")
            found.expect(told["error"] < 1e-4, f"{where}: the product is off by {told['error']}")
            slowest, least = max(slowest, told["seconds"]), min(least, told["left"])
    found.figures["memory"] = (
        f"{runs['real']} real and {runs['mocked']} mocked groups, refused within {slowest:.3f} s, "
        f"{least / MIB:.0f} MiB left at least"
    )


def _threads(order: Mapping[str, Any]) -> dict[str, Any]:
    from autokern.system import host, threads

    return {"threads": threads.ceiling(), "fingerprint": host.current().fingerprint}


def _memory(order: Mapping[str, Any]) -> dict[str, Any]:
    """Ask for a covariance that cannot be, and for a product with it, which can; compare some rows of that."""
    import torch
    from gpytorch.kernels import MaternKernel, ScaleKernel

    import autokern
    from autokern.core.errors import MemoryBudgetError
    from autokern.system import host

    torch.manual_seed(0)
    x, rhs = torch.rand(order["points"], 3), torch.randn(order["points"], 2)
    kernel = ScaleKernel(MaternKernel(nu=2.5)).requires_grad_(False)
    left, limit = host.available_memory("cpu"), host.memory_limited_by("cpu")
    with autokern.enabled():
        began, refused = time.perf_counter(), "nothing"
        try:
            kernel(x).to_dense()
        except MemoryBudgetError as error:
            refused = type(error).__name__
        seconds = time.perf_counter() - began
        found = kernel(x) @ rhs
    rows = slice(0, None, 1000)
    exact = kernel(x[rows], x).to_dense() @ rhs
    error = ((found[rows] - exact).abs().max() / exact.abs().max()).item()
    return {"refused": refused, "seconds": seconds, "error": error, "left": left, "limit": limit}


def _child(what: str, order: Mapping[str, Any]) -> None:
    """Go to a group before anything is imported, or take files for the groups; tell what was found there."""
    if order["enters"]:
        Path(order["enters"]).write_text(str(os.getpid()), encoding="utf-8")
    if order["root"]:
        from autokern.system import cgroups

        mocked = (Path(order["root"]), Path(order["root"], "own"))
        for function in (cgroups.cpu_quota, cgroups.memory_left):
            function.__defaults__ = mocked
    print(json.dumps({"threads": _threads, "memory": _memory}[what](order)))


MUTATIONS = [
    Mutation(
        "quotas are not looked at",
        "system/cgroups.py",
        "return min(quotas, default=None)",
        "return None",
        "quota",
    ),
    Mutation(
        "memory limits are ignored",
        "system/cgroups.py",
        "return min(left, default=None)",
        "return None",
        "memory",
    ),
    Mutation(
        "only the innermost group counts",
        "system/cgroups.py",
        "for depth in range(len(parts), -1, -1):",
        "for depth in (len(parts),):",
        "memory",
    ),
]

if __name__ == "__main__":
    if sys.argv[1] == "child":
        _child(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main({"quota": quota, "memory": memory}, SIZES)
