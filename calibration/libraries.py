"""cuSOLVER against MAGMA behind torch's own functions, in turns in one run: is a choice between them worth a candidate?

PyTorch has retired MAGMA for these (pytorch #173515, #173788, #174619, #174681): where a version does what its setting
says no more, all ratios are 1. Needs a GPU; writes `libraries.json`. May import no other file of this folder.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from autokern import host, timer

HERE = Path(__file__).parent
LIBRARIES = ("default", "cusolver", *(["magma"] if torch.cuda.has_magma else []))
SHAPES = ((1, 128), (1, 512), (1, 2048), (8, 400), (64, 128), (1024, 16))
FUNCTIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "cholesky": torch.linalg.cholesky_ex,
    "eigh": torch.linalg.eigh,
    "qr": torch.linalg.qr,
}


def by(library: str, function: Callable[[torch.Tensor], object], a: torch.Tensor) -> object:
    """Call a function while torch prefers a library."""
    torch.backends.cuda.preferred_linalg_library(library)
    return function(a)


def measured(device: str, seconds: float) -> list[dict[str, Any]]:
    """Return seconds by library, and ratios to torch's own choice, of each function and shape."""
    rows = []
    for name, function in FUNCTIONS.items():
        for batch, n in SHAPES:
            a = torch.rand(batch, n, n, dtype=torch.float64, device=device)
            a = a @ a.mT + n * torch.eye(n, dtype=a.dtype, device=device)
            calls = {library: functools.partial(by, library, function, a) for library in LIBRARIES}
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of what is retired
                    found = timer.compare(calls, synchronize=lambda: host.synchronize(device), seconds=seconds)
            finally:
                torch.backends.cuda.preferred_linalg_library("default")
            taken = {library: timing.seconds for library, timing in found.items()}
            ratios = {library: timing.ratio for library, timing in found.items()}
            rows.append({"function": name, "batch": batch, "n": n, "seconds": taken, "ratios": ratios})
            print(f"{name:17} {batch:5} × {n:4}", *(f"{k} {v:.2f}" for k, v in ratios.items()), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each function and shape")
    parser.add_argument("--output", type=Path, default=HERE / "libraries.json")
    options = parser.parse_args(arguments)
    device = host.accelerator()
    if device is None or device.type != "cuda":
        print("libraries.py compares what runs on a CUDA device, and torch finds none on this machine")
        return 1
    report = {"machine": host.current().fields, "rows": measured(device.type, options.seconds)}
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
