"""Models whose covariance matrix has no place in memory, for `end_to_end.py`.

`matrixfree` trains and predicts in a fresh process that may take little memory, and compares loss and gradient without
a matrix with those of stock's conjugate gradients, at a size where the matrix fits; `refusal` asks for a matrix that
cannot be had.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from typing import Any

import gpytorch
import torch
from children import Peak, in_child
from linear_operator.utils.warnings import NumericalWarning
from measuring import DTYPES, Report, Scale, Toggles, word
from rows import slashed
from torch import Tensor
from training import disagreement
from workloads import Regression, Trainer, noisy, scaled, uniform

from autokern.core.output import duration

DIMENSIONS = 3
WAYS: dict[str, dict[str, float]] = {
    "default settings": {},
    "no preconditioner": {"max_preconditioner_size": 0},
    "no preconditioner, tolerance 1e-4": {"max_preconditioner_size": 0, "cg_tolerance": 1e-4},
}
"""Settings under which conjugate gradients are compared.

The pivots of the preconditioner are ties on a constant diagonal: with another rounding it is another one, and draws
other probes. linear_cg stands still at residuals of about 1e-5, as it takes curvatures below 1e-10 for zero.
"""
LIMIT = 1800.0


def smooth_data(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return points of the unit cube and noisy values of a smooth function."""
    x = uniform(n, DIMENSIONS, seed=n)
    return x.to(dtype), noisy((6 * x[:, 0]).sin() + (5 * x[:, 1]).cos() * x[:, 2], seed=n + 1).to(dtype)


MATRICES = {"rbf": 3, "matern52": 7}
"""Matrices that gpytorch holds for a scaled kernel of several lengthscales, gradients kept, as measured."""


def stock_bytes(n: int, dtype: torch.dtype = torch.float32, family: str = "rbf") -> int:
    """Return what gpytorch's own evaluation of the covariance of n points takes at its peak, gradients kept."""
    return MATRICES[family] * n**2 * dtype.itemsize


def trained(n: int, points: int, variances: int, steps: int) -> dict[str, Any]:
    """Train for a few steps and predict, with autokern on; the memory is that of all of it."""
    import autokern

    autokern.enable()
    (x, y), meter = smooth_data(n, torch.float32), Peak()
    trainer = Trainer(Regression(x, y, scaled("rbf", DIMENSIONS)))
    seconds, losses = [], []
    for _ in range(steps):
        start = time.perf_counter()
        trainer()
        seconds.append(time.perf_counter() - start)
        losses.append(trainer.loss)
    training = products(autokern.stats())
    model, new = trainer.model.eval(), uniform(points, DIMENSIONS, seed=3).to(x)
    with torch.no_grad():
        start = time.perf_counter()
        mean = model(new).mean
        after = time.perf_counter()
        variance = model(new[:variances]).variance
        end = time.perf_counter()
    truth = (6 * new[:, 0]).sin() + (5 * new[:, 1]).cos() * new[:, 2]
    return {
        "seconds": seconds, "loss": losses, "bytes": meter.bytes(), "products": sum(training.values()) / steps,
        "mean_seconds": after - start, "variance_seconds": end - after, "rmse": rmse(mean, truth),
        "variance": [variance.min().item(), variance.max().item()], "candidates": products(autokern.stats()),
    }  # fmt: skip


def products(stats: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return the calls of `kernel_matmul` by candidate."""
    return dict(stats.get("kernel_matmul", {}))


def rmse(found: Tensor, truth: Tensor) -> float:
    return (found - truth).square().mean().sqrt().item()


def agreement(n: int, dtype: torch.dtype, way: str, toggles: Toggles) -> dict[str, Any]:
    """Compare a step without a matrix with stock's conjugate gradients on the matrix, from the same probe vectors."""
    import autokern

    trainers, before = {}, products(autokern.stats())
    for side in ("off", "on"):
        trainers[side] = Trainer(Regression(*smooth_data(n, dtype), scaled("rbf", DIMENSIONS)))
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", NumericalWarning)  # float32 may not reach the tolerance
            stack.enter_context(toggles[side]())
            if side == "on":
                force = {"exact_log_prob": "matrix-free", "kernel_matmul": "tiled-symmetric"}
                stack.enter_context(autokern.using(force=force))
            for name, value in WAYS[way].items():
                stack.enter_context(getattr(gpytorch.settings, name)(value))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.manual_seed(n)
            trainers[side]()
            made = sum(products(autokern.stats()).values()) - sum(before.values())
    return {"n": n, "dtype": word(dtype), "way": way, "products": made, **disagreement(trainers["on"], trainers["off"])}


def run_matrixfree(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Train and predict without a matrix in a fresh process, and compare where the matrix fits."""
    n, points, variances = scale.free
    found = in_child(
        "matrixfree", "trained", n, points, variances, scale.free_steps,
        environment={"AUTOKERN_MEMORY": scale.free_memory}, limit=LIMIT,
    )  # fmt: skip
    if "failed" in found:
        report(f"matrixfree, n={n}: {found['failed']}")
    else:
        step, mebibytes = duration(sum(found["seconds"]) / len(found["seconds"])), found["bytes"] / 2**20
        mean, variance = duration(found["mean_seconds"]), duration(found["variance_seconds"])
        report(
            f"matrixfree, n={n}: {step} a step, {found['products']:.0f} products each, {mebibytes:.0f} MiB; "
            f"means {mean}, variances {variance}"
        )
    cases = []
    for dtype in DTYPES:
        for way in WAYS:
            case = agreement(scale.free_compared, dtype, way, toggles)
            cases.append(case)
            errors = slashed({what: case[what] for what in ("loss", "gradient")})
            report(f"matrixfree, n={case['n']}, {case['dtype']}, {way}: loss / gradient {errors}")
    return {
        "n": n, "d": DIMENSIONS, "points": points, "variances": variances, "memory": scale.free_memory,
        "stock_needs_bytes": stock_bytes(n), "child": found, "cases": cases,
    }  # fmt: skip


def refused(n: int) -> dict[str, Any]:
    """Return the seconds until the error of a matrix of n rows, and its text."""
    import autokern

    autokern.enable()
    x, kernel = uniform(n, DIMENSIONS, seed=1).float(), scaled("rbf", DIMENSIONS)
    kernel(x[:100]).to_dense()
    start = time.perf_counter()
    try:
        kernel(x).to_dense()
    except (MemoryError, RuntimeError) as error:
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "error": type(error).__name__, "message": str(error).splitlines()[0]}
    return {"failed": "the matrix was made"}


def run_refusal(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Ask for a matrix larger than memory, in a fresh process."""
    found = in_child("matrixfree", "refused", scale.refused, limit=300.0)
    result = found.get("failed") or f"{duration(found['seconds'])}, {found['error']}: {found['message']}"
    report(f"refusal, n={scale.refused}: {result}")
    return {"n": scale.refused, "stock_needs_bytes": stock_bytes(scale.refused), "child": found}
