"""GPyTorch's example of KeOps with pykeops absent, broken and at work, for `end_to_end.py`.

The model is that of `examples/02_Scalable_Exact_GPs/KeOps_GP_Regression.ipynb`. Its data, 434,874 points of a road
network with their altitudes, would have to be downloaded: the points here are a simulation of that shape, roads that
wind over a smooth landscape. May import `children`, `matrixfree`, `measuring`, `rows` and `workloads`.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import gpytorch
import torch
from children import Peak, in_child
from matrixfree import products, rmse
from measuring import Report, Scale, Toggles
from rows import duration
from torch import Tensor
from workloads import Regression, Trainer, standardise

STEPS, NEW_POINTS, ROADS = 2, 1000, 200
LIMIT = 900.0
STATES = ("hidden", "broken", "working")


def landscape(n: int) -> tuple[Tensor, Tensor]:
    """Return points along winding roads, ``(n, 2)``, and altitudes with noise, standardised, in random order."""
    generator = torch.Generator().manual_seed(n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    each = -(-n // ROADS)
    heading = 2 * math.pi * torch.rand(ROADS, 1, generator=generator, dtype=torch.float64)
    heading = heading + 0.1 * normal(ROADS, each).cumsum(-1)
    steps = torch.stack((heading.cos(), heading.sin()), -1) / each
    x = (normal(ROADS, 1, 2) + steps.cumsum(1)).reshape(-1, 2)
    waves, phases = 2 * normal(2, 12), 2 * math.pi * torch.rand(12, generator=generator, dtype=torch.float64)
    y = (x @ waves + phases).sin().sum(-1) + 0.1 * normal(len(x))
    order = torch.randperm(len(x), generator=generator)[:n]
    return standardise(x[order]).float(), standardise(y[order]).float()


def example(n: int, on: bool) -> dict[str, Any]:
    """Train the example's model for a few steps and predict; what KeOps or autokern say comes as words."""
    if on:
        import autokern

        autokern.enable()
    x, y = landscape(n + NEW_POINTS)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.keops.MaternKernel(nu=2.5))
    meter, start = Peak(), time.perf_counter()
    torch.manual_seed(0)  # the probes of conjugate gradients
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            trainer = Trainer(Regression(x[:n], y[:n], kernel), learning_rate=0.1)
            for _ in range(STEPS):
                trainer()
            found["loss"] = trainer.loss
            with torch.no_grad():
                found["rmse"] = rmse(trainer.model.eval()(x[n:]).mean, y[n:])
        except Exception as error:
            found["refused"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:600]
    found |= {"seconds": time.perf_counter() - start, "bytes": meter.bytes()}
    if on:
        found["candidates"] = products(autokern.stats())
        found["warnings"] = sorted({str(w.message).splitlines()[0][:200] for w in said if "autokern" in str(w.message)})
    return found


def in_state(state: str, n: int, on: bool) -> dict[str, Any]:
    """Run the example in a fresh process in which pykeops is not there, cannot compile, or works."""
    with tempfile.TemporaryDirectory(prefix="keops-") as folder:
        environment = {}
        if state == "broken":
            tools = Path(folder) / "bin"
            tools.mkdir()
            os.symlink(sys.executable, tools / "python")
            environment = {"PATH": str(tools), "CXX": "", "KEOPS_CACHE_FOLDER": str(Path(folder) / "built")}
        hidden = ("pykeops", "keopscore") if state == "hidden" else ()
        return in_child("roads", "example", n, on, environment=environment, hidden=hidden, limit=LIMIT)


def run_keops(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Run the example in every state of pykeops with autokern, and where it fits in stock without pykeops."""
    cases = []
    plans = [(state, scale.roads, True) for state in STATES if state == "hidden" or shutil.which("g++")]
    for state, n, on in [*plans, ("hidden", scale.roads_stock, False), ("hidden", scale.roads_stock, True)]:
        case = {"state": state, "n": n, "on": on, **in_state(state, n, on)}
        cases.append(case)
        report(f"keops, {state}, n={n}, {'autokern' if on else 'stock'}: {outcome(case)}")
    return {"d": 2, "steps": STEPS, "points": NEW_POINTS, "cases": cases}


def outcome(case: dict[str, Any]) -> str:
    """Return what became of one run in words."""
    if "failed" in case:
        return str(case["failed"])
    words = f"{duration(case['seconds'])}, {case['bytes'] / 2**20:.0f} MiB"
    if "refused" in case:
        return f"{case['refused']} ({words})"
    served = "".join(f", {name} {count}" for name, count in case.get("candidates", {}).items())
    return f"loss {case['loss']:.4f}, RMSE {case['rmse']:.3f}, {words}{served}"
