"""Kernel matrices against stock: forward, and forward with gradients of the hyperparameters, interleaved in one run.

`stock` is the kernel's own forward with autokern disabled, `autokern` the dispatched `autokern.covariance.matrix`, the
decision and its overhead included.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from rich.console import Console
from rich.table import Table

import autokern
from autokern.timer import compare

HERE = Path(__file__).parent
SIZES = (100, 200, 400, 800, 1500, 2500, 4000)
DIMENSIONS = 8


class Cell(msgspec.Struct, frozen=True):
    """One comparison: seconds of stock and of autokern, and the median of the paired ratios."""

    kernel: str
    dtype: str
    n: int
    gradients: bool
    stock: float
    autokern: float
    speedup: float
    noise: float


def make(name: str, dtype: torch.dtype) -> Kernel:
    """Return a scaled kernel with ARD."""
    nu = {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5}.get(name)
    base = RBFKernel(ard_num_dims=DIMENSIONS) if nu is None else MaternKernel(nu, ard_num_dims=DIMENSIONS)
    base.lengthscale = torch.linspace(2.0, 4.0, DIMENSIONS)
    return ScaleKernel(base).to(dtype)


def calls(kernel: Kernel, x: torch.Tensor, gradients: bool) -> dict[str, Callable[[], object]]:
    """Return stock and autokern as functions without arguments."""
    parameters = list(kernel.parameters())
    cotangent = torch.rand(len(x), len(x), dtype=x.dtype) - 0.5 if gradients else None

    def run(evaluate: Callable[[], torch.Tensor]) -> object:
        if cotangent is None:
            with torch.no_grad():
                return evaluate()
        return torch.autograd.grad(evaluate(), parameters, cotangent)

    return {
        "stock": lambda: run(lambda: kernel.forward(x, x)),
        "autokern": lambda: run(lambda: autokern.covariance.matrix(kernel, x)),
    }


def geomean(cells: list[Cell]) -> float:
    return math.exp(sum(math.log(c.speedup) for c in cells) / len(cells))


def measure(sizes: tuple[int, ...]) -> list[Cell]:
    """Compare every family, dtype and size."""
    found = []
    for name in ("rbf", "matern12", "matern32", "matern52"):
        for dtype in (torch.float32, torch.float64):
            kernel = make(name, dtype)
            for n in sizes:
                x = torch.randn(n, DIMENSIONS, dtype=dtype, generator=torch.Generator().manual_seed(n))
                for gradients in (False, True):
                    timings = compare(calls(kernel, x, gradients), rounds=(9, 25), min_time=2e-3, seconds=2.0)
                    ours = timings["autokern"]
                    pair = (timings["stock"].seconds, ours.seconds)
                    label = str(dtype).removeprefix("torch.")
                    found.append(Cell(name, label, n, gradients, *pair, 1 / ours.ratio, ours.noise))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE / "kernels.json")
    arguments = parser.parse_args()
    if not autokern.profile().trials:
        autokern.calibrate(budget=20.0)
    cells = measure(SIZES)
    console = Console()
    table = Table(title="times as fast as stock: forward / forward and gradients (ARD, d = 8)")
    for head in ("kernel", "dtype", *map(str, SIZES)):
        table.add_column(head, justify="right")
    for key in dict.fromkeys((c.kernel, c.dtype) for c in cells):
        row = {(c.n, c.gradients): c.speedup for c in cells if (c.kernel, c.dtype) == key}
        table.add_row(*key, *(f"{row[n, False]:.2f} / {row[n, True]:.2f}" for n in SIZES))
    console.print(table)
    for gradients, label in ((False, "forward"), (True, "forward and gradients")):
        chosen = [c for c in cells if c.gradients == gradients]
        console.print(f"{label}: geomean {geomean(chosen):.2f}, least {min(c.speedup for c in chosen):.2f}")
    document = {"host": autokern.profile().host, "cells": cells}
    arguments.output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
