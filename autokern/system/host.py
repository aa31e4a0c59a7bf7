"""Host: readable fields that describe this machine, and a fingerprint that decides which profile applies.

No field names the machine, its user or a path. Importing this module initialises no device and no threads.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from autokern.core.errors import uninterrupted
from autokern.core.releases import installed
from autokern.system.load import cpu_quota, memory_left, text_of

_CPU_INFO, _MEMORY = Path("/proc/cpuinfo"), Path("/proc/meminfo")
_CPUS = Path("/sys/devices/system/cpu")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

_SIMD = re.compile(r"sse4_2|avx\w*|f16c|fma|amx_\w+|asimd\w*|sve\w*|bf16|vsx")
_LIBRARIES = {  # patterns of the CPU libraries in torch.__config__.show()
    "blas": r"BLAS_INFO=(\w+)",
    "lapack": r"LAPACK_INFO=(\w+)",
    "mkl": r"Math Kernel Library Version (\S+)",
    "openblas": r"OpenBLAS\s+v?(\d\S*)",
    "onednn": r"MKL-DNN v(\S+)",
    "openmp": r"OpenMP (\d+)",
}
_RANKS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class Host(msgspec.Struct, frozen=True):
    """Description of a machine."""

    fields: dict[str, Any]  # nested, JSON-able; all but ``"remarks"`` affect timings and are part of the fingerprint
    fingerprint: str  # 32 hexadecimal digits; equal for equal hosts, in every process
    devices: tuple[str, ...]  # kinds, the CPU first


def current() -> Host:
    """Return the host of this process at its present number of threads, cached; the first call initialises a GPU."""
    device = accelerator()
    return _described(torch.get_num_threads(), device.type if device else "cpu")


def fingerprint_of(fields: dict[str, Any]) -> str:
    """Return the fingerprint of `Host.fields`: a hash of all but ``"remarks"``."""
    telling = {key: value for key, value in fields.items() if key != "remarks"}
    text = json.dumps(telling, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def accelerator() -> torch.device | None:
    """Return the accelerator that torch can use here, as a device without an index, or None."""
    device = torch.accelerator.current_accelerator()
    # devices are counted by NVML where possible, which leaves CUDA uninitialised, so that forks still work
    return device if device is not None and torch.get_device_module(device).device_count() > 0 else None


def affinity() -> int:
    """Return the number of logical CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_ceiling() -> int:
    """Return how many threads can run at once by CPU quota and affinity, at least 1."""
    quota = cpu_quota()
    return max(1, affinity() if quota is None else min(math.ceil(quota), affinity()))


def cpu_model() -> str:
    """Return the model name of the CPU."""
    return str(_cpu()["model"])


def compiler() -> str | None:
    """Return the C++ compiler that torch and KeOps run: the one named in ``CXX``, else the system's, or None."""
    usual = ("clang++", "g++") if sys.platform == "darwin" else ("g++",)
    return next((name for name in (os.environ.get("CXX"), *usual) if name and shutil.which(name)), None)


def ram() -> tuple[int, int]:
    """Return the total and the available bytes of RAM, from `/proc` if it has both."""
    found = re.findall(r"^(?:MemTotal|MemAvailable): *(\d+) kB$", text_of(_MEMORY), re.MULTILINE)
    if len(found) == 2 and int(found[1]) <= int(found[0]):  # in a container one of them may be the machine's
        return int(found[0]) * 1024, int(found[1]) * 1024
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def available_memory(device: str) -> int:
    """Return the bytes that can be allocated on a device now without swapping or exceeding a limit."""
    kind = torch.device(device)
    module: Any = None if kind.type == "cpu" else torch.get_device_module(kind)
    if hasattr(module, "mem_get_info"):
        slack = int(module.memory_reserved(kind)) - int(module.memory_allocated(kind))  # torch's allocator reuses it
        return int(module.mem_get_info(kind)[0]) + max(0, slack)
    left = memory_left()
    free = ram()[1] if left is None else min(ram()[1], left)
    if hasattr(module, "recommended_max_memory"):  # Apple: one memory for both
        return max(0, min(free, int(module.recommended_max_memory()) - int(module.current_allocated_memory())))
    return free


def memory_limited_by(device: str) -> str:
    """Return in words the limit that bounds the `available_memory` of a device at present."""
    if torch.device(device).type != "cpu":
        return "free memory of the GPU"
    left = memory_left()
    return "free RAM" if left is None or ram()[1] < left else "the memory limit of the control group"


def settle() -> None:
    """Wait for all work queued on the accelerator, if there is one."""
    if (device := accelerator()) is not None:
        torch.get_device_module(device).synchronize()


def multi_rank() -> bool:
    """Whether this process is one rank of a distributed job, whose ranks must take the same decisions."""
    sizes = [os.environ.get(name, "").strip() for name in _RANKS]
    several = any(size.isdigit() and int(size) > 1 for size in sizes)
    return several or (torch.distributed.is_available() and torch.distributed.is_initialized())


def random_states_kept() -> contextlib.AbstractContextManager[None]:
    """Return a context that restores torch's random states, the accelerator's included: trials of stock draw probes."""
    device = accelerator()
    return torch.random.fork_rng([]) if device is None else torch.random.fork_rng([device], device_type=device.type)


def random_states() -> tuple[Any, ...]:
    """Return the states of the default generators of torch (CPU), Python and, if it has been used, NumPy."""
    numpys = sys.modules.get("numpy.random")
    return torch.get_rng_state(), random.getstate(), numpys and numpys.get_state(legacy=False)


def take_random_states(found: tuple[Any, ...], others: Mapping[torch.Generator, torch.Tensor] | None = None) -> None:
    """Restore states that `random_states` has returned, and states of other generators of torch."""
    torch.set_rng_state(found[0])
    random.setstate(found[1])
    if found[2] is not None:
        np.random.set_state(found[2])
    for generator, state in (others or {}).items():
        generator.set_state(state)


@functools.cache
def _described(threads: int, kind: str) -> Host:
    config, cudnn = torch.__config__.show(), torch.backends.cudnn.version() if kind == "cuda" else None  # type: ignore[no-untyped-call]
    libraries = {name: match[1] for name, pattern in _LIBRARIES.items() if (match := re.search(pattern, config))}
    versions = {"python": ".".join(map(str, sys.version_info[:2])), "torch": str(torch.__version__)}
    versions |= {name: installed(name) for name in ("gpytorch", "linear_operator")} | libraries
    versions |= {name: version for name in ("cuda", "hip") if (version := getattr(torch.version, name, None))}
    fields = {
        "system": {"os": platform.system(), "machine": platform.machine()},
        "versions": versions | ({"cudnn": str(cudnn)} if cudnn else {}),
        "cpu": {**_cpu(), "threads": min(thread_ceiling(), threads), "torch_threads": threads},
        "accelerators": _accelerators(kind),
        "remarks": {
            **{name: installed(name) for name in ("autokern", "pykeops", "jax")},
            "memory_gib": round(ram()[0] / 2**30, 1),
        },
    }
    return Host(fields, fingerprint_of(fields), ("cpu",) if kind == "cpu" else ("cpu", kind))


@functools.cache
def _cpu() -> dict[str, Any]:
    lines = (line.partition(":") for line in text_of(_CPU_INFO).partition("\n\n")[0].splitlines())
    info = {key.strip(): value.strip() for key, _, value in lines}
    flags = info.get("flags", info.get("Features", "")).split()
    cores = len({text_of(listed) for listed in _CPUS.glob("cpu[0-9]*/topology/core_cpus_list")})
    if not cores:
        import psutil

        cores = psutil.cpu_count(logical=False) or 0
    numbers = ("cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU variant")
    model = info.get("model name")
    if not model and sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        model = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    return {
        "model": model or (sys.platform != "darwin" and platform.processor()) or platform.machine(),
        "numbers": "-".join(info[key] for key in numbers if key in info),
        "simd": sorted(filter(_SIMD.fullmatch, set(flags))),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "physical": cores,
        "logical": os.cpu_count() or 0,
    }


@functools.cache
def _accelerators(kind: str) -> list[dict[str, Any]]:
    """Describe each distinct accelerator or slice once, in an order independent of device indices."""
    if kind == "cpu":
        return []
    module = torch.get_device_module(kind)
    if not hasattr(module, "get_device_properties"):  # Apple: the GPU is part of the CPU's chip
        return [{"kind": kind, "name": _cpu()["model"]}]
    try:
        several = [module.get_device_properties(i) for i in range(module.device_count())]
    except uninterrupted(RuntimeError, AssertionError):  # CUDA does not work in a child forked after its initialisation
        return [{"kind": kind}]
    driver = re.search(r"\d+\.\d+(\.\d+)?", text_of(_NVIDIA_DRIVER)) if kind == "cuda" else None
    found = [  # a slice of a GPU (MIG) has its own name, memory and processors
        {
            "kind": kind,
            "name": str(of.name),
            "capability": f"{getattr(of, 'major', '')}.{getattr(of, 'minor', '')}".strip("."),
            "architecture": str(getattr(of, "gcnArchName", "")),
            "memory_mib": int(of.total_memory) // 2**20,
            "processors": int(getattr(of, "multi_processor_count", getattr(of, "max_compute_units", 0))),
            "driver": driver[0] if driver else str(getattr(of, "driver_version", "")),
        }
        for of in several
    ]
    return sorted({json.dumps(gpu): gpu for gpu in found}.values(), key=json.dumps)
