"""KeOps: find obstacles without compiling, and run it without output on stdout.

pykeops compiles each formula on first use. If the compiler is missing or the build folder is not writable, pykeops at
best prints that on stdout. It is imported by gpytorch or on first use.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from autokern.core.errors import KeOpsError
from autokern.core.locks import Lock
from autokern.core.recovery import caught, suppressed

_ADVICE = "see https://www.kernel-operations.io; AUTOKERN_EXCLUDE=keops leaves it out"

_TRIAL = """
import torch
from pykeops.torch import LazyTensor
x = torch.ones(2, 1, device="cuda")
assert ((LazyTensor(x[:, None]) - LazyTensor(x[None])).exp() @ x).eq(2).all()
"""
_PATIENCE = 120.0
"""Seconds for the child."""
_lock = Lock()
_failure = ""


def keops_problem(device: str = "cpu") -> str | None:
    """Return why KeOps cannot work here, or None, without compiling; None takes some microseconds."""
    if _failure:
        return _failure
    if importlib.util.find_spec("pykeops") is None:
        return "pykeops is not installed: `pip install 'autokern[keops]'`"
    pykeops = sys.modules.get("pykeops")
    if pykeops is None and "gpytorch.kernels.keops.keops_kernel" in sys.modules:  # gpytorch has tried to import it
        return "pykeops is installed, but importing it fails"
    if compiler() is None:
        return "KeOps needs a C++ compiler, and none was found: install g++, or name one in CXX"
    return None if pykeops is None else _obstacle(pykeops, device)


def _obstacle(pykeops: Any, device: str) -> str | None:
    """Return why an imported pykeops cannot work, or None."""
    if device != "cpu":
        if device != "cuda":
            return f"KeOps does not run on devices of kind {device}"
        if not pykeops.config.gpu_available:  # it would read the GPU's addresses from the CPU, and crash
            return "KeOps finds no CUDA toolkit (libcuda and libnvrtc), so it cannot use the GPU"
        if not os.path.exists(pykeops.config.pykeops_nvrtc_name(type="target")):
            return "KeOps could not build its interface to the CUDA compiler"
    folder = Path(pykeops.get_build_folder())
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the build folder of KeOps cannot be written ({_plain(folder)}): set KEOPS_CACHE_FOLDER to one that can"
    return None


def _plain(folder: Path) -> str:
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def compiler() -> str | None:
    """Return the C++ compiler that KeOps will choose, or None."""
    return _first_of(os.environ.get("CXX"), os.environ.get("PATH"))


@functools.lru_cache(maxsize=8)
def _first_of(named: str | None, path: str | None) -> str | None:
    usual = ("clang++", "g++") if platform.system() == "Darwin" else ("g++",)
    return next((name for name in (named, *usual) if name and shutil.which(name, path=path)), None)


@contextlib.contextmanager
def at_work(device: str = "cpu") -> Iterator[None]:
    """Run KeOps inside the block, without messages.

    KeOpsError if it cannot work here, and in place of any error of KeOps but a lack of memory. After a formula failed
    to build, KeOps is not tried again in this process.
    """
    global _failure
    problem = keops_problem(device) or (_trial() if device == "cuda" else None)
    if problem is not None:
        raise KeOpsError(f"a product by KeOps was asked for; found: {problem}. {_ADVICE}")
    try:
        with _silence():
            yield
    except (MemoryError, torch.OutOfMemoryError, KeOpsError):
        raise
    except caught(Exception) as error:
        found = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, (ImportError, OSError)):  # a formula that failed to compile fails to import
            found = _failure = f"KeOps could not build or load a formula in this process ({found})"
        raise KeOpsError(f"a product by KeOps was asked for; found: {found}. {_ADVICE}") from error


@functools.cache
def _trial() -> str | None:
    """Return why KeOps is not tried on a GPU in this process: its first formula ended a child, now or once before.

    KeOps 2.3 beside CUDA 13 ends a process with a segmentation fault. Another failure may be the moment's, such as a
    lack of memory, and is not kept.
    """
    import pykeops

    if (why := _obstacle(pykeops, "cuda")) is not None:
        return why
    mark, status = Path(pykeops.get_build_folder()) / f"autokern-{torch.__version__}", None
    with suppressed(OSError, ValueError):
        status = int(mark.read_text(encoding="utf-8"))
    if status is None:
        environment, command, none = {**os.environ, "AUTOKERN": "0"}, [sys.executable, "-c", _TRIAL], subprocess.DEVNULL
        try:
            ended = subprocess.run(
                command, stdin=none, stdout=none, stderr=none, env=environment, timeout=_PATIENCE, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"a process that tries it on the GPU could not be started, or took too long ({type(error).__name__})"
        if (status := ended.returncode) <= 0:
            with suppressed(OSError):
                mark.write_text(str(status), encoding="utf-8")
    return f"a process of its own ended with status {status} at a small product on the GPU" if status else None


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Switch off KeOps' messages, a setting of the process; KeOps holds the GIL, so one thread works at a time."""
    import keopscore
    import pykeops

    if _lock.entered():
        yield
        return
    with _lock.here():
        before = pykeops.verbose, keopscore.verbose
        pykeops.verbose = keopscore.verbose = False
        try:
            yield
        finally:
            pykeops.verbose, keopscore.verbose = before
