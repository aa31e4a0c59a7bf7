"""Probes: what may hang, crash or print is tried in a process of its own, with a limit to its patience.

Floor 1: may import what lies below.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from autokern import keops
from autokern.profile import Tool

__all__ = ["PROGRAMS", "Answer", "Probe", "try_keops"]

PROGRAMS = {
    "torch.compile": """
import random, torch
shift = random.random()  # else a result that was compiled on another day would answer
f = torch.compile(lambda x: (x * shift).sin().sum(), fullgraph=True)
x = torch.linspace(0, 1, 100, dtype=torch.float64)
assert abs(float(f(x)) - float((x * shift).sin().sum())) < 1e-9, "a compiled function gives wrong numbers"
""",
    "KeOps": """
import contextlib, io, os, sys, time
import torch
said = io.StringIO()
def failed(what, error=""):
    print(" ".join(f"{what}: {error}".split()) if error else what)
    sys.exit(1)
try:
    with contextlib.redirect_stdout(said):
        import pykeops
        from pykeops.torch import LazyTensor
except OSError as error:
    failed("its build folder cannot be made or written", error)
except ImportError as error:
    failed("pykeops cannot be imported", error)
except Exception as error:
    failed("its build folder is damaged", repr(error))
x, y = torch.rand(20, 3), torch.rand(30, 3)
truth = (-((x[:, None] - y[None]) ** 2).sum(-1)).exp().sum(1, keepdim=True)
def reduce(device, backend):
    began = time.perf_counter()
    try:
        with contextlib.redirect_stdout(said):
            a, b = LazyTensor(x.to(device)[:, None]), LazyTensor(y.to(device)[None])
            found = (-((a - b) ** 2).sum(-1)).exp().sum(1, backend=backend)
        if not torch.allclose(found.cpu(), truth, atol=1e-4):
            failed(f"a reduction on the {backend} gives wrong numbers")
    except Exception as error:
        compiler = pykeops.config.pykeops_base.get_cxx_compiler()
        built = [name for name in os.listdir(pykeops.get_build_folder()) if name.startswith("pykeops_")]
        lines = [line for line in said.getvalue().splitlines() if line.strip() not in ("", "OK")]
        if compiler is None:
            failed("no C++ compiler: install g++, or name one in CXX")
        if isinstance(error, ImportError) and not any(name.endswith((".so", ".dylib")) for name in built):
            failed(f"the C++ compiler {os.path.basename(compiler)} fails", lines[-1] if lines else error)
        failed(f"a formula fails on the {backend}", f"{type(error).__name__}: {error}")
    return f"{backend} ({time.perf_counter() - began:.1f} s to compile)"
where = reduce("cpu", "CPU")
if torch.cuda.is_available():
    toolkit = pykeops.config.gpu_available
    where += " and the " + reduce("cuda", "GPU") if toolkit else "; not on the GPU: it finds no CUDA toolkit"
print(f"pykeops {pykeops.__version__} compiles and works on the {where}")
""",
    "GPU": """
import torch
device = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else torch.device("cuda")
dtype = torch.float32 if device.type == "mps" else torch.float64
a = torch.rand(300, 300, dtype=dtype)
assert torch.allclose((a.to(device) @ a.to(device)).cpu(), a @ a), "the device gives wrong products"
""",
    "hooks": """
import autokern, gpytorch, linear_operator, torch
from autokern import hooks
patches = hooks.patches()
before = [vars(p.owner)[p.name] for p in patches]
x = torch.linspace(0, 1, 40, dtype=torch.float64).unsqueeze(-1)
kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5)).double()
def value():
    k = kernel(x).add_jitter(0.1)
    return k.inv_quad_logdet(x, logdet=True)[1].item() + k.to_dense().sum().item()
stock = value()
with autokern.enabled():
    assert all(vars(p.owner)[p.name] is p.replacement for p in patches), "a hook was not put in"
    assert abs(value() - stock) < 1e-6 * abs(stock), "a small model differs from stock"
    assert autokern.stats(), "no call was served"
    try:
        kernel(torch.zeros(10**6, 1, dtype=torch.float64).add_(1)).to_dense()
        raise SystemExit("a matrix of 7 TiB was not refused")
    except autokern.MemoryBudgetError:
        pass
assert all(vars(p.owner)[p.name] is b for p, b in zip(patches, before)), "a hook was not taken out"
""",
    "plugins": """
import json, autokern
from autokern.backends import tried
print(json.dumps(tried()))
""",
}


class Answer(NamedTuple):
    """What came of a probe: whether it works, its last word, and how long it took in seconds."""

    works: bool
    text: str
    seconds: float
    timed_out: bool = False


class Probe:
    """A program on trial, from the beginning of a ``with`` block to its end at the latest.

    Parameters
    ----------
    name : str
        One of `PROGRAMS`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> Probe:
        self._folder = tempfile.TemporaryDirectory(prefix="autokern-", ignore_cleanup_errors=True)
        self._log = open(os.path.join(self._folder.name, "log"), "w+", encoding="utf-8", errors="replace")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("AUTOKERN")}
        environment |= {
            "AUTOKERN_HOME": self._folder.name,
            "AUTOKERN_CALIBRATE": "never",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "KEOPS_CACHE_FOLDER": self._folder.name,  # what was compiled on another day proves no compiler
            "PYTHONPATH": os.pathsep.join(_path()),
        }
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAMS[self._name]],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=self._folder.name,
            env=environment,
            start_new_session=True,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._kill()
        self._log.close()
        self._folder.cleanup()

    def poll(self, give_up: bool = False) -> Answer | None:
        """Return the answer if there is one; with `give_up`, there is."""
        code = self._process.poll()
        seconds = time.monotonic() - self._began
        if code is None:
            if not give_up:
                return None
            self._kill()
            return Answer(False, f"did not finish within {seconds:.0f} s", seconds, True)
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        if code == 0:
            return Answer(True, lines[-1] if lines else "", seconds)
        if code < 0:
            return Answer(False, f"killed by signal {-code}", seconds)
        errors = [line for line in lines if "Error" in line.partition(":")[0] or "Exception" in line.partition(":")[0]]
        return Answer(False, ((errors or lines or ["no word"])[-1])[:300], seconds)

    def _kill(self) -> None:
        """End the program and whatever it started."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        elif self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def _path() -> list[str]:
    """Return the module path for another working directory, without the build folder that pykeops has put there."""
    built = keops.build_folder()
    return [place for place in sys.path if place and (built is None or Path(place) != built)]


def try_keops(seconds: float) -> Tool:
    """Compile and run a small reduction by KeOps in a process of its own.

    Parameters
    ----------
    seconds : float
        When to give up.
    """
    deadline = time.monotonic() + seconds
    with Probe("KeOps") as probe:
        while (answer := probe.poll(give_up=time.monotonic() > deadline)) is None:
            time.sleep(0.05)
    return Tool(answer.works, answer.text, round(answer.seconds, 3), keops.setting())
