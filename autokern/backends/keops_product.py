"""The candidate `keops` of `kernel_matmul`: a kernel matrix times columns by KeOps, which never holds the matrix.

Formulae are compiled, for seconds, once per form, dimensions, dtype and number of columns, so columns are padded to few
widths, and the scale of the whole tree is applied outside. Torch computes gradients, tile by tile.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autokern.core.errors import AutokernError, caught, suppressed
from autokern.core.state import Lock
from autokern.kernels import embedded as forms
from autokern.kernels.matmul import matmul
from autokern.kernels.tiles import Plan, usual
from autokern.kernels.tree import Node, Tree, by_formula, by_leaf, families_of, peeled
from autokern.ops._candidates import needs_few
from autokern.ops._problems import families
from autokern.ops.kernel_matmul import KERNEL_MATMUL, in_tiles, of_outputs
from autokern.system.host import compiler

_ADVICE = "see https://www.kernel-operations.io; AUTOKERN_EXCLUDE=keops leaves it out"

_TRIAL = """
import torch
from pykeops.torch import LazyTensor
x = torch.ones(2, 1, device="cuda")
assert ((LazyTensor(x[:, None]) - LazyTensor(x[None])).exp() @ x).eq(2).all()
"""
_PATIENCE = 120.0  # seconds that the trial's process may take
_lock = Lock()
_failure = ""


_spec = functools.cache(importlib.util.find_spec)


def keops_problem(device: str = "cpu") -> str | None:
    """Return why KeOps cannot work here, or None, without compiling."""
    if _failure:
        return _failure
    if _spec("pykeops") is None:
        return "pykeops is not installed: `pip install 'autokern[keops]'`"
    pykeops = sys.modules.get("pykeops")
    if pykeops is None and "gpytorch.kernels.keops.keops_kernel" in sys.modules:  # gpytorch has tried to import it
        return "pykeops is installed, but importing it fails"
    if compiler() is None:
        return "KeOps needs a C++ compiler, and none was found: install g++, or name one in CXX"
    return None if pykeops is None else _obstacle(pykeops, device)


def _obstacle(pykeops: Any, device: str) -> str | None:
    if device != "cpu":
        if device != "cuda":
            return f"KeOps does not run on devices of kind {device}"
        if not pykeops.config.gpu_available:  # it would read the GPU's addresses from the CPU, and crash
            return "KeOps finds no CUDA toolkit (libcuda and libnvrtc), so it cannot use the GPU"
        if not os.path.exists(pykeops.config.pykeops_nvrtc_name(type="target")):
            return "KeOps could not build its interface to the CUDA compiler"
    folder = Path(pykeops.get_build_folder())
    if not os.access(folder, os.W_OK | os.X_OK):
        named = f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else folder
        return f"the build folder of KeOps cannot be written ({named}): set KEOPS_CACHE_FOLDER to one that can"
    return None


@contextlib.contextmanager
def at_work(device: str = "cpu") -> Iterator[None]:
    """Run KeOps inside the block, silently; AutokernError if it cannot work, or fails but for a lack of memory."""
    global _failure
    problem = keops_problem(device) or (_trial() if device == "cuda" else None)
    if problem is not None:
        raise AutokernError(f"a product by KeOps was asked for; found: {problem}. {_ADVICE}")
    try:
        import keopscore
        import pykeops

        with _lock.here():  # its messages are a setting of the process; it holds the GIL, so one thread works at a time
            before = pykeops.verbose, keopscore.verbose
            pykeops.verbose = keopscore.verbose = False
            try:
                yield
            finally:
                pykeops.verbose, keopscore.verbose = before
    except (MemoryError, torch.OutOfMemoryError, AutokernError):
        raise
    except caught(Exception) as error:
        found = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, (ImportError, OSError)):  # a formula that failed to compile fails to import
            found = _failure = f"KeOps could not build or load a formula in this process ({found})"
        raise AutokernError(f"a product by KeOps was asked for; found: {found}. {_ADVICE}") from error


@functools.cache
def _trial() -> str | None:
    """Return why KeOps is not tried on a GPU: a formula ended a process of its own, now or in an earlier program."""
    import pykeops  # release 2.3 ends it if the compiler links a second, static libstdc++

    if (why := _obstacle(pykeops, "cuda")) is not None:
        return why
    mark, status = Path(pykeops.get_build_folder()) / f"autokern-{torch.__version__}", None
    with suppressed(OSError, ValueError):
        status = int(mark.read_text(encoding="utf-8"))
    if status is None:
        environment, command, none = {**os.environ, "AUTOKERN": "0"}, [sys.executable, "-c", _TRIAL], subprocess.DEVNULL
        try:
            streams: Any = {"stdin": none, "stdout": none, "stderr": none}
            ended = subprocess.run(command, **streams, env=environment, timeout=_PATIENCE, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"a process that tries it on the GPU could not be started, or took too long ({type(error).__name__})"
        if (status := ended.returncode) <= 0:  # temporary failures are not stored
            with suppressed(OSError):
                mark.write_text(str(status), encoding="utf-8")
    if status == -signal.SIGSEGV:
        remedy = "if g++ links libstdc++ statically, LD_PRELOAD=libstdc++.so.6 and a new KEOPS_CACHE_FOLDER mend that"
        return f"a small product on the GPU ended a process of its own with a segmentation fault; {remedy}"
    return f"a process of its own ended with status {status} at a small product on the GPU" if status else None


_WIDTHS = (1, 4, 16, 64)  # numbers of columns that are compiled; others are padded, or split into groups of 64
_MOST_DIMENSIONS = {"cpu": 200, "cuda": 100}
"""Of 200, a CPU takes 6 times as long as for a dense product; at 110 a GPU's registers overflow (gpytorch #2334)."""


def unsupported(d: int, device: str = "cpu") -> str | None:
    """Return why KeOps cannot serve `d` dimensions (the sum over leaves) on a kind of device, None if it can."""
    most = _MOST_DIMENSIONS.get(device, 0)
    return None if d <= most else f"d too large for KeOps: {d} dimensions, {most} at most on {device}"


def product(tree: Tree, others: list[torch.Tensor] | None, rhs: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return ``K rhs`` by KeOps; same arguments as `products.product`, of which `plan` is unused."""
    inner, scale = peeled(tree)
    factors = [math.sqrt(abs(of.gamma)) for of, _, _ in by_leaf(inner)]
    sets = (inner.points, others or inner.points)
    points = [(z * c).contiguous() for some in sets for z, c in zip(some, factors, strict=True)]
    form = _Form(inner.node, tuple(z.shape[-1] for z in inner.points), len(inner.shapes), len(inner.weights))
    tensors = (*points, *(p.reshape(1) for p in (*inner.shapes, *inner.weights)))
    parts = [_columns(form, part, tensors) for part in rhs.split(_WIDTHS[-1], dim=-1)]
    out = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    return out if scale is None else out * scale


class _Form(NamedTuple):
    """The key of a compiled formula, apart from columns and dtype."""

    node: Node
    dimensions: tuple[int, ...]
    shapes: int
    weights: int


def _columns(form: _Form, rhs: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    t = rhs.shape[-1]
    width = next(w for w in _WIDTHS if w >= t)
    filled = torch.nn.functional.pad(rhs, (0, width - t)).contiguous()
    with at_work(rhs.device.type):
        from pykeops.torch import Genred

        formula, constants = _formula(form, width)
        given = [rhs.new_tensor(c) for c in constants]
        backend = "CPU" if rhs.is_cpu else "GPU"  # KeOps' own choice would copy points from the CPU to the GPU
        found: torch.Tensor = Genred(formula, [], reduction_op="Sum", axis=1)(*tensors, filled, *given, backend=backend)
    return found[:, :t]


@functools.lru_cache(maxsize=256)
def _formula(form: _Form, columns: int) -> tuple[str, tuple[list[float], ...]]:
    """Return the summand in KeOps' language (points at rows, at columns, shapes, weights, `rhs`), and constants."""
    from pykeops.torch import LazyTensor

    rows, columns_of, parameter, k = 0, 1, 2, len(form.dimensions)
    z = [LazyTensor((i, d, rows)) for i, d in enumerate(form.dimensions)]
    y = [LazyTensor((k + i, d, columns_of)) for i, d in enumerate(form.dimensions)]
    p = [LazyTensor((2 * k + i, 1, parameter)) for i in range(form.shapes + form.weights)]
    v = LazyTensor((2 * k + len(p), columns, columns_of))
    pairs = zip(families_of(form.node), z, y, strict=True)
    us = (one.sqdist(other) if of.gamma > 0 else -one.sqdist(other) for of, one, other in pairs)
    result = by_formula(form.node, us, p[: form.shapes], p[form.shapes :]) * v
    result.fixvariables()
    return result.formula, result.variables


@KERNEL_MATMUL.candidate(
    "keops",
    unsupported=lambda problem: needs_few(problem) or unsupported(problem.d * len(families(problem)), problem.device),
    unavailable=keops_problem,
    memory=lambda p: in_tiles(p, usual(torch.device(p.device)).tile) if p.grad else of_outputs(p),
    compiles=True,
)
def by_keops(kernel: Any, x1: torch.Tensor, x2: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """KeOps with the family's formula, compiled once per form, dimensions and dtype."""
    return matmul(*forms.both(kernel, x1, x2), rhs, usual(x1.device), product)
