"""A CUDA device that the CPU plays, so that what is for a GPU runs on machines without one, for tests.

Tensors on it are plain tensors of device ``cuda:0``, whose memory and kernels are the CPU's. These rules are a GPU's:
operands lie on one device, reading back waits for the device and is counted, nothing is read back while a graph is
recorded, and the backward pass runs in a thread of its own. Times mean nothing.

    PYTHONPATH=tests python -m pytest -p support.gpu_on_cpu -m gpu -n 0 tests
    python tests/support/gpu_on_cpu.py SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import runpy
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_SOURCE = Path(__file__).with_suffix(".cpp")
_FOLDER = Path(
    os.environ.get("AUTOKERN_GPU_ON_CPU") or Path(tempfile.gettempdir()) / f"autokern-gpu-on-cpu-{os.getuid()}"
)
_MEMORY = 2**32
_MODES = {"default": 0, "warn": 1, "error": 2, 0: 0, 1: 1, 2: 2}


class Stream:
    """A stream; everything is done when a call returns."""

    def __init__(self, device: object = None, priority: int = 0, cuda_stream: int = 1) -> None:
        self.cuda_stream, self.device = cuda_stream, "cuda:0"

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self, *_: object) -> None:
        """There is nothing to wait for."""

    wait_stream = wait_event = synchronize


class Event:
    """An event; it happens when it is recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)

    def query(self) -> bool:
        return True

    def synchronize(self, *_: object) -> None:
        """There is nothing to wait for."""

    wait = synchronize


class Graph:
    """Recorded launches, which the library keeps."""

    number, launches = -1, 0

    def __init__(self, library: Any) -> None:
        self._library = library

    def replay(self) -> None:
        self._library.gpu_replay(self.number)

    def __del__(self) -> None:
        if self.number >= 0:
            self._library.gpu_free(self.number)


def built() -> Path:
    """Compile the device against the libraries of torch, which is not imported; return the library."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    torch = Path(str(spec.origin)).parent
    version = (torch / "version.py").stat()
    target = _FOLDER / f"{_SOURCE.stat().st_mtime_ns}-{version.st_mtime_ns}-{version.st_ino}.so"
    if not target.exists():
        _FOLDER.mkdir(parents=True, exist_ok=True, mode=0o700)
        include = [f"-isystem{torch / 'include'}", f"-isystem{torch / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
            made = Path(folder, "made.so")
            options = ["-std=c++20", "-O1", "-shared", "-fPIC", *include]
            command = ["c++", *options, str(_SOURCE), "-o", str(made), *libraries]
            subprocess.run(command, check=True)
            made.replace(target)
    return target


def install() -> Any:
    """Give this process the device; return its library.

    Raises
    ------
    RuntimeError
        If torch has been imported: it looks for devices at that time.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch has looked for devices already: play the GPU before torch is imported")
    library = ctypes.CDLL(str(built()), mode=ctypes.RTLD_GLOBAL)
    library.gpu_launches.restype = ctypes.c_char_p
    import torch

    for name, value in _fields(library, torch).items():
        setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, value)
    torch._C._cuda_clearCublasWorkspaces = lambda: None
    torch.accelerator.synchronize = lambda device=None: None
    plain = torch.UntypedStorage.clone
    torch.UntypedStorage.clone = lambda self: _clone(self) if self.device.type == "cuda" else plain(self)
    return library


def launches(library: Any) -> dict[str, int]:
    """Return how often each kernel was launched since `library.gpu_forget`."""
    lines = library.gpu_launches().decode().splitlines()
    return {name: int(times) for name, times in (line.rsplit(" ", 1) for line in lines)}


def _clone(storage: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).clone().untyped_storage()


def _fields(library: Any, torch: Any) -> dict[str, Any]:
    """What torch.cuda says and does; its random numbers are drawn from the generator of the CPU."""
    stream = Stream(cuda_stream=0)
    properties = SimpleNamespace(
        name="A GPU played by the CPU", total_memory=_MEMORY, major=9, minor=0, multi_processor_count=132,
        L2_cache_size=2**25, gcnArchName="",
    )  # fmt: skip

    @contextlib.contextmanager
    def graph(recording: Graph, pool: object = None, stream: object = None, capture_error_mode: str = "global") -> Any:
        recording.number = library.gpu_begin()
        try:
            yield
        finally:
            recording.launches = library.gpu_end()
        if not recording.launches:
            warnings.warn("The CUDA Graph is empty.", stacklevel=3)

    def always(value: Any) -> Any:
        return lambda *_, **__: value  # a function of its own for each name, as torch.compile expects

    def aside() -> Any:
        return lambda *_, **__: contextlib.nullcontext()

    return {
        "CUDAGraph": functools.partial(Graph, library), "Event": Event, "Stream": Stream, "graph": graph,
        "default_generators": (SimpleNamespace(clone_state=always(None), graphsafe_set_state=always(None)),),
        "set_sync_debug_mode": lambda mode: library.gpu_sync_mode(_MODES[mode]),
        "is_available": always(True), "is_initialized": always(True), "device_count": always(1),
        "current_device": always(0), "is_bf16_supported": always(True), "_is_in_bad_fork": always(False),
        "is_current_stream_capturing": lambda: bool(library.gpu_capturing()),
        "current_stream": always(stream), "default_stream": always(stream),
        "mem_get_info": always((_MEMORY, _MEMORY)), "memory_reserved": always(0), "memory_allocated": always(0),
        "max_memory_allocated": always(0), "get_device_properties": always(properties),
        "get_device_name": always(properties.name), "get_device_capability": always((9, 0)),
        "device": aside(), "device_of": aside(), "stream": aside(),
        "_lazy_init": always(None), "set_device": always(None), "synchronize": always(None),
        "get_rng_state": lambda device="cuda": torch.empty(16, dtype=torch.uint8), "set_rng_state": always(None),
        "get_rng_state_all": always([]), "set_rng_state_all": always(None),
        "manual_seed": always(None), "manual_seed_all": always(None), "empty_cache": always(None),
        "ipc_collect": always(None), "reset_peak_memory_stats": always(None),
    }  # fmt: skip


def main() -> None:
    """Run a script as python does."""
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    from support import gpu_on_cpu  # noqa: PLW0406  # what runs here is `__main__`

    gpu_on_cpu.main()
else:
    LIBRARY = install()
