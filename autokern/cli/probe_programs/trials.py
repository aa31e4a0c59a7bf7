"""The trials that `probe` runs in child processes: the last line printed is the answer.

Only the trial of the hooks imports autokern.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import time
from typing import Any, NoReturn

import torch


def compiler() -> None:
    """Compile a function with torch, and compare its result."""
    shift = random.random()  # prevents a hit in the compiler's cache

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * shift).sin().sum()

    x = torch.linspace(0, 1, 100, dtype=torch.float64)
    found = torch.compile(function, fullgraph=True)(x)
    assert abs(float(found) - float(function(x))) < 1e-9, "a compiled function gives wrong numbers"


def gpu() -> None:
    """Multiply matrices on the accelerator, and compare with the CPU."""
    device = torch.accelerator.current_accelerator()
    assert device is not None, "there is no device"
    dtype = torch.float32 if device.type == "mps" else torch.float64
    a = torch.rand(300, 300, dtype=dtype)
    assert torch.allclose((a.to(device) @ a.to(device)).cpu(), a @ a), "the device gives wrong products"


def keops() -> None:
    """Import pykeops, run a reduction on the CPU and on a GPU, and print the outcome or the missing part."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            import pykeops
            import pykeops.torch
    except ImportError as error:
        _fail(f"pykeops cannot be imported: {error}")
    except Exception as error:
        written = "cannot be made or written" if isinstance(error, OSError) else "is damaged"
        _fail(f"its build folder {written}: {error!r}")
    where = _reduced(pykeops, output, "cpu", "CPU")
    if torch.cuda.is_available():
        on_gpu = pykeops.config.gpu_available and _reduced(pykeops, output, "cuda", "GPU")
        where += f" and the {on_gpu}" if on_gpu else "; not on the GPU: it finds no CUDA toolkit"
    print(f"pykeops {pykeops.__version__} compiles and works on the {where}")


def _reduced(pykeops: Any, output: io.StringIO, device: str, backend: str) -> str:
    """Compile and run a reduction; return the backend and the seconds as text."""
    x, y = torch.rand(20, 3), torch.rand(30, 3)
    truth = (-((x[:, None] - y[None]) ** 2).sum(-1)).exp().sum(1, keepdim=True)
    began = time.perf_counter()
    try:
        with contextlib.redirect_stdout(output):
            lazy = pykeops.torch.LazyTensor
            a, b = lazy(x.to(device)[:, None]), lazy(y.to(device)[None])
            found = (-((a - b) ** 2).sum(-1)).exp().sum(1, backend=backend)
    except Exception as error:
        compiler = pykeops.config.pykeops_base.get_cxx_compiler()
        built = [name for name in os.listdir(pykeops.get_build_folder()) if name.startswith("pykeops_")]
        if compiler is None:
            _fail("no C++ compiler: install g++, or name one in CXX")
        if isinstance(error, ImportError) and not any(name.endswith((".so", ".dylib")) for name in built):
            lines = [line for line in output.getvalue().splitlines() if line.strip() not in ("", "OK")]
            _fail(f"the C++ compiler {os.path.basename(compiler)} fails: {lines[-1] if lines else error}")
        _fail(f"a formula fails on the {backend}: {type(error).__name__}: {error}")
    if not torch.allclose(found.cpu(), truth, atol=1e-4):
        _fail(f"a reduction on the {backend} gives wrong numbers")
    return f"{backend} ({time.perf_counter() - began:.1f} s to compile)"


def _fail(found: str) -> NoReturn:
    print(" ".join(found.split()))
    sys.exit(1)


def hooks() -> None:
    """Install and remove the hooks; check that a small model agrees with stock and a huge matrix is refused."""
    import gpytorch

    import autokern
    from autokern.core import known
    from autokern.hooks import install

    patches = install.patches()
    before = [install.stock_of(p.owner, p.name) for p in patches]
    x = torch.linspace(0, 1, 40, dtype=torch.float64).unsqueeze(-1)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5)).double()

    def value() -> float:
        k = kernel(x).add_jitter(0.1)
        found: float = k.inv_quad_logdet(x, logdet=True)[1].item() + k.to_dense().sum().item()
        return found

    stock = value()
    with autokern.enabled():
        for patch in patches:
            put = install.stock_of(patch.owner, patch.name) is patch.replacement
            assert put or known.full_name(patch.owner, patch.name) in known.unknown(), f"{patch.name} is not hooked"
        assert abs(value() - stock) < 1e-6 * abs(stock), "a small model differs from stock"
        if not known.unknown():
            assert autokern.stats(), "no call was served"
            try:
                kernel(torch.zeros(10**6, 1, dtype=torch.float64).add_(1)).to_dense()
                raise SystemExit("a matrix of 7 TiB was not refused")
            except autokern.MemoryBudgetError:
                pass
    after = [install.stock_of(p.owner, p.name) for p in patches]
    assert all(a is b for a, b in zip(after, before, strict=True)), "a hook was not taken out"


TRIALS = {"torch.compile": compiler, "GPU": gpu, "KeOps": keops, "hooks": hooks}

if __name__ == "__main__":
    TRIALS[sys.argv[1]]()
