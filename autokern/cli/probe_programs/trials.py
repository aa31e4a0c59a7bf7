"""The trials that `probe` runs in child processes: the last line printed is the answer.

Only the trials of KeOps and of the hooks import autokern.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import time

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
    """Run a reduction by KeOps on the CPU and on a GPU, and print where it works or why it does not."""
    output, told = io.StringIO(), []
    try:
        with contextlib.redirect_stdout(output):
            import pykeops.torch
    except Exception as error:
        sys.exit(f"pykeops cannot be imported, or its build folder cannot be made: {error!r}")
    from autokern.system.keops import compiler, keops_problem  # now: gpytorch imports pykeops

    for device, kind in [("cpu", "CPU"), ("cuda", "GPU")][: 1 + torch.cuda.is_available()]:
        if (problem := keops_problem(device)) is not None:
            told.append(f"not on the {kind}: {problem}")
            continue
        x, y, began = torch.rand(20, 3), torch.rand(30, 3), time.perf_counter()
        truth = (-((x[:, None] - y[None]) ** 2).sum(-1)).exp().sum(1, keepdim=True)
        try:
            with contextlib.redirect_stdout(output):
                a, b = pykeops.torch.LazyTensor(x.to(device)[:, None]), pykeops.torch.LazyTensor(y.to(device)[None])
                found = (-((a - b) ** 2).sum(-1)).exp().sum(1, backend=kind).cpu()
        except Exception as error:
            lines = [line for line in output.getvalue().splitlines() if line.strip() not in ("", "OK")]
            by = f"the C++ compiler {compiler()} fails" if isinstance(error, ImportError) else f"it fails on the {kind}"
            sys.exit(f"{by}: {lines[-1] if lines else error}")
        assert torch.allclose(found, truth, atol=1e-4), f"a reduction on the {kind} gives wrong numbers"
        told.append(f"compiles and works on the {kind} ({time.perf_counter() - began:.1f} s to compile)")
    print(f"pykeops {pykeops.__version__} {'; '.join(told)}")
    sys.exit(int(told[0].startswith("not")))


def hooks() -> None:
    """Install and remove the hooks; check that a small model agrees with stock and a huge matrix is refused."""
    import gpytorch

    import autokern
    from autokern.core.releases import known
    from autokern.hooks import install

    autokern.disable()  # `autokern everywhere` may have enabled it
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
