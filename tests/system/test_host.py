"""host.py and load.py: equal hosts have equal fingerprints, every field counts, and no limit is overlooked."""

import copy
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from support.programs import BARE, python

from autokern.system import host, load

GIB = 2**30


def forget():
    """Let everything be read anew."""
    host._described.cache_clear()
    for kept in (host.accelerator, host._cpu, host._accelerators):
        getattr(kept, "cache_clear", lambda: None)()  # a test may have put a plain function there


def anew():
    forget()
    return host.current()


@pytest.fixture(autouse=True)
def _fresh():
    forget()
    yield
    forget()


def leaves(fields):
    """Every value in nested fields, as what holds it and its key."""
    for key, value in fields.items() if isinstance(fields, dict) else enumerate(fields):
        nested = isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict))
        yield from leaves(value) if nested else [(fields, key)]


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def gpu(name="NVIDIA H200", memory=140 * GIB, processors=132):
    return SimpleNamespace(name=name, total_memory=memory, multi_processor_count=processors, major=9, minor=0)


class Gpus:
    """Stands in for ``torch.cuda``; what is no GPU does not answer."""

    mem_get_info = staticmethod(lambda device: (3 * GIB, 80 * GIB))
    memory_reserved, memory_allocated = (staticmethod(lambda device, n=n: n * GIB) for n in (5, 4))

    def __init__(self, *gpus):
        self.gpus, self.device_count = gpus, lambda: len(gpus)

    def get_device_properties(self, i):
        if self.gpus[i] is None:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return self.gpus[i]

    def synchronize(self):
        raise InterruptedError("synchronised")


def with_gpus(monkeypatch, *gpus) -> host.Host:
    monkeypatch.setattr(torch, "get_device_module", lambda kind: Gpus(*gpus))
    monkeypatch.setattr(host, "accelerator", lambda: torch.device("cuda"))
    return anew()


def test_current_describes_this_host():
    here = host.current()
    assert here is host.current()
    assert here == anew()
    assert json.loads(json.dumps(here.fields)) == here.fields
    assert re.fullmatch(r"[0-9a-f]{32}", here.fingerprint)
    assert here.devices[0] == "cpu"
    assert here.fields["cpu"]["threads"] == min(host.thread_ceiling(), torch.get_num_threads())
    assert here.fields["versions"]["torch"] == torch.__version__


def test_every_field_but_the_remarks_flips_the_fingerprint(monkeypatch):
    here = with_gpus(monkeypatch, gpu())
    fields = copy.deepcopy(here.fields)
    values = list(leaves(fields))
    assert len(values) > 22
    assert (fields["accelerators"][0], "capability") in values
    for part, key in values:
        before = part[key]
        for other in ("another", None, f"{before}x"):
            part[key] = other
            assert (host.fingerprint_of(fields) == here.fingerprint) == (part is fields["remarks"]), key
        part[key] = before
    assert set(here.fields["remarks"]) == {"autokern", "pykeops", "jax", "memory_gib"}


def test_the_fingerprint_follows_the_thread_count_and_the_quota(monkeypatch):
    before, threads = host.current(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert host.current().fingerprint != before.fingerprint
    finally:
        torch.set_num_threads(threads)
    assert host.current() is before
    monkeypatch.setattr(host, "thread_ceiling", lambda: torch.get_num_threads() - 1)
    assert anew().fingerprint != before.fingerprint


def test_equal_gpus_count_once_and_in_any_order(monkeypatch):
    one = with_gpus(monkeypatch, gpu())
    assert one.devices == ("cpu", "cuda")
    assert with_gpus(monkeypatch, gpu(), gpu(), gpu()).fingerprint == one.fingerprint
    mixed = with_gpus(monkeypatch, gpu(), gpu("NVIDIA L4", 23 * GIB, 58))
    assert mixed.fingerprint != one.fingerprint
    assert with_gpus(monkeypatch, gpu("NVIDIA L4", 23 * GIB, 58), gpu()).fingerprint == mixed.fingerprint


def test_the_driver_is_read_and_a_gpu_that_does_not_answer_in_a_forked_child_raises_nothing(monkeypatch, tmp_path):
    version = tree(tmp_path, {"v": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build"})
    monkeypatch.setattr(host, "_NVIDIA_DRIVER", version / "v")
    assert with_gpus(monkeypatch, gpu()).fields["accelerators"][0]["driver"] == "580.82.07"
    assert with_gpus(monkeypatch, None).fields["accelerators"] == [{"kind": "cuda"}]


def test_work_on_an_accelerator_is_waited_for(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda kind: Gpus())
    monkeypatch.setattr(host, "accelerator", lambda: None)
    host.settle()
    monkeypatch.setattr(host, "accelerator", lambda: torch.device("cuda"))
    with pytest.raises(InterruptedError):
        host.settle()


V2 = {"a/b/c/cpu.max": "max 100000", "a/b/cpu.max": "150000 100000", "a/cpu.max": "400000 100000"}
V1 = {
    "cpu,cpuacct/job/step/cpu.cfs_quota_us": "-1",
    "cpu,cpuacct/job/step/cpu.cfs_period_us": "100000",
    "cpu,cpuacct/job/cpu.cfs_quota_us": "50000",
    "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
}
OWN = {"cpu.max": "200000 100000", "cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}
QUOTAS = [
    (V2, "0::/a/b/c", 1.5),  # the least on the way up
    (V2, "0::/a", 4.0),
    (V2, "0::/", None),
    (V2, "0::/elsewhere/below", None),
    (V1, "12:memory:/x\n4:cpu,cpuacct:/job/step\n0::/x", 0.5),
    (V1, "4:cpuset:/job/step", None),
    *((OWN, line, 2.0) for line in ("4:cpu:/docker/0123", "0::/../../sibling", "0::/docker/0123")),  # a container
    ({**OWN, "a/cpu.max": "100000 100000"}, "0::/a/../a", 2.0),
    ({"unified/a/cpu.max": "300000 100000"}, "1:name=systemd:/a\n0::/a", 3.0),
    *(({"cpu.max": text}, "0::/\ngarbage\n::", None) for text in ("", "max", "max 100000", "-1 100000", "0 0", "5 0")),
    *(({"cpu.max": text}, "0::/\ngarbage\n::", None) for text in ("nonsense 7", "\0\0")),
]


@pytest.mark.parametrize(("limits", "lines", "quota"), QUOTAS)
def test_quota(tmp_path, limits, lines, quota):
    there = tree(tmp_path, {**limits, "own": lines})
    assert load.cpu_quota(there, tmp_path / "own") == quota
    assert load.cpu_quota(there, tmp_path / "missing") is load.memory_left(there, tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("quota", "cpus", "ceiling"),
    [(None, 12, 12), (4.0, 12, 4), (3.5, 12, 4), (0.2, 12, 1), (64.0, 12, 12), (None, 0, 1)],
)
def test_thread_ceiling(monkeypatch, quota, cpus, ceiling):
    monkeypatch.setattr(host, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)), raising=False)
    assert host.thread_ceiling() == ceiling
    monkeypatch.delattr(os, "sched_getaffinity")
    assert host.affinity() == os.cpu_count()


LEFT = {
    "a/b/memory.max": "max",
    "a/b/memory.current": GIB,
    "a/memory.max": 4 * GIB,
    "a/memory.current": 3 * GIB,
    "a/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file 7",
    "memory/job/memory.limit_in_bytes": 4 * GIB,
    "memory/job/memory.usage_in_bytes": 3 * GIB,
    "memory/job/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB // 2}",
    "memory/memory.limit_in_bytes": "9223372036854771712",
    "memory/memory.usage_in_bytes": 20 * GIB,
    "over/memory.max": "10",
    "over/memory.current": "20",
}


@pytest.mark.parametrize(("line", "left"), [("0::/a/b", 2 * GIB), ("4:memory:/job", 3 * GIB // 2), ("0::/over", 0)])
def test_memory_left(tmp_path, line, left):
    assert load.memory_left(tree(tmp_path, {**LEFT, "own": line}), tmp_path / "own") == left


APPLE = SimpleNamespace(recommended_max_memory=lambda: 5 * GIB, current_allocated_memory=lambda: GIB)


@pytest.mark.parametrize(
    ("device", "module", "left", "gib"),
    [
        *(("cpu", None, left, gib) for left, gib in ((None, 7), (2 * GIB, 2), (99 * GIB, 7), (0, 0))),
        ("cuda", Gpus(), None, 4),  # what the allocator holds included
        ("cuda:1", Gpus(), None, 4),
        ("mps", APPLE, None, 4),  # one memory for both
        ("mps", APPLE, 2 * GIB, 2),
    ],
)
def test_available_memory(monkeypatch, device, module, left, gib):
    monkeypatch.setattr(host, "ram", lambda: (8 * GIB, 7 * GIB))
    monkeypatch.setattr(host, "memory_left", lambda: left)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    assert host.available_memory(device) == gib * GIB


RANKS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@pytest.mark.parametrize("name", RANKS)
def test_several_ranks_are_seen_by_the_environment_and_by_a_process_group(monkeypatch, name):
    for other in RANKS:
        monkeypatch.delenv(other, raising=False)
    assert not host.multi_rank()
    for text, several in (("", False), ("1", False), ("x", False), (" 2 ", True), ("64", True)):
        monkeypatch.setenv(name, text)
        assert host.multi_rank() is several
    monkeypatch.delenv(name)
    for question in ("is_initialized", "is_available"):
        monkeypatch.setattr(torch.distributed, question, lambda: True, raising=False)
    assert host.multi_rank()


def test_importing_does_no_device_or_thread_work_and_a_fork_is_noticed():
    """In a fresh process: forking the test runner with its threads would prove nothing more."""
    code = f"""{BARE}
import os, threading, torch
before = set(sys.modules), threading.active_count()
def fail(*a, **k): raise AssertionError
torch.get_num_threads = torch.cuda.device_count = torch._C._accelerator_getAccelerator = fail
import autokern.system.host
print(threading.active_count() - before[1], 'psutil' in set(sys.modules) - before[0])
print(torch.cuda.is_initialized(), 'gpytorch' in sys.modules)
"""
    expected = ["0", "False", "False", "False"]
    if hasattr(os, "fork"):
        code += "sys.stdout.flush(); from autokern.core.state import forked; before = forked(); pid = os.fork()\n"
        code += "if pid == 0: os._exit(int(forked()))\n"
        code += "print(before, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), forked())"
        expected += ["False", "1", "False"]
    assert python("-c", code, check=True).stdout.split() == expected


def test_libraries(monkeypatch):
    def found(config):
        monkeypatch.setattr(torch.__config__, "show", lambda: config)
        return {
            name: version
            for name, version in host._described.__wrapped__(1, "cpu").fields["versions"].items()
            if name in host._LIBRARIES
        }

    intel = "  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build\n  - Build settings: BLAS_INFO=mkl, "
    assert found(intel) == {"mkl": "2024.2-Product", "blas": "mkl"}
    arm = "  - OpenMP 201511 (a.k.a. OpenMP 4.5)\n - LAPACK_INFO=open, BLAS_INFO=open; OpenBLAS 0.3.30"
    assert found(arm) == {"blas": "open", "lapack": "open", "openblas": "0.3.30", "openmp": "201511"}


def test_cores_and_memory_are_those_that_linux_lists_or_psutils(monkeypatch, tmp_path):
    for there in (True, False):
        if not there:
            monkeypatch.setattr(host, "_CPUS", tmp_path)
            monkeypatch.setattr(host, "_MEMORY", tmp_path / "meminfo")
        assert host._cpu.__wrapped__()["physical"] == (psutil.cpu_count(logical=False) or 0)
        assert host.ram()[0] == psutil.virtual_memory().total
        assert 0 < host.ram()[1] <= host.ram()[0]
    two = {f"cpu{cpu}/topology/core_cpus_list": f"{cpu % 2},{cpu % 2 + 2}" for cpu in range(4)}  # of two threads each
    tree(tmp_path, two)
    assert host._cpu.__wrapped__()["physical"] == 2


def test_a_cpu_that_names_no_model(monkeypatch, tmp_path):
    text = "processor\t: 0\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n\nprocessor\t: 1\n"
    monkeypatch.setattr(host, "_CPU_INFO", tree(tmp_path, {"cpuinfo": text}) / "cpuinfo")
    cpu = host._cpu()
    assert (cpu["simd"], cpu["numbers"]) == (["asimd", "sve"], "0x41-0xd4f")
    assert cpu["model"]
