"""Whether KeOps compiles a formula that gives right numbers, or else the missing part."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from typing import Any, NoReturn

import torch

_NO_TOOLKIT = "; not on the GPU: it finds no CUDA toolkit"


def main() -> None:
    """Import pykeops, reduce on the CPU and on a GPU, and print the result."""
    output = io.StringIO()
    pykeops = _imported(output)
    where = _reduced(pykeops, output, "cpu", "CPU")
    if torch.cuda.is_available():
        toolkit = pykeops.config.gpu_available
        where += " and the " + _reduced(pykeops, output, "cuda", "GPU") if toolkit else _NO_TOOLKIT
    print(f"pykeops {pykeops.__version__} compiles and works on the {where}")


def _imported(output: io.StringIO) -> Any:
    try:
        with contextlib.redirect_stdout(output):
            import pykeops
            import pykeops.torch
    except OSError as error:
        _fail("its build folder cannot be made or written", error)
    except ImportError as error:
        _fail("pykeops cannot be imported", error)
    except Exception as error:
        _fail("its build folder is damaged", repr(error))
    return pykeops


def _reduced(pykeops: Any, output: io.StringIO, device: str, backend: str) -> str:
    """Compile and run a reduction; return where it ran and how long that took."""
    x, y = torch.rand(20, 3), torch.rand(30, 3)
    truth = (-((x[:, None] - y[None]) ** 2).sum(-1)).exp().sum(1, keepdim=True)
    began = time.perf_counter()
    try:
        with contextlib.redirect_stdout(output):
            lazy = pykeops.torch.LazyTensor
            a, b = lazy(x.to(device)[:, None]), lazy(y.to(device)[None])
            found = (-((a - b) ** 2).sum(-1)).exp().sum(1, backend=backend)
        if not torch.allclose(found.cpu(), truth, atol=1e-4):
            _fail(f"a reduction on the {backend} gives wrong numbers")
    except Exception as error:
        compiler = pykeops.config.pykeops_base.get_cxx_compiler()
        built = [name for name in os.listdir(pykeops.get_build_folder()) if name.startswith("pykeops_")]
        lines = [line for line in output.getvalue().splitlines() if line.strip() not in ("", "OK")]
        if compiler is None:
            _fail("no C++ compiler: install g++, or name one in CXX")
        if isinstance(error, ImportError) and not any(name.endswith((".so", ".dylib")) for name in built):
            _fail(f"the C++ compiler {os.path.basename(compiler)} fails", lines[-1] if lines else error)
        _fail(f"a formula fails on the {backend}", f"{type(error).__name__}: {error}")
    return f"{backend} ({time.perf_counter() - began:.1f} s to compile)"


def _fail(what: str, error: object = "") -> NoReturn:
    print(" ".join(f"{what}: {error}".split()) if error else what)
    sys.exit(1)


if __name__ == "__main__":
    main()
