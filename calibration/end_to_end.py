"""Real models with autokern off and on, interleaved in one run; writes `end_to_end.json`, `co2.png`, `elevation.png`.

Here are `diabetes` (exact training), `co2` (online learning, one fantasy update per week) and `cg` (conjugate
gradients on a dense kernel matrix), and the command line of all workloads: `training` and `jump` live in
`training.py`, `acquisition` and `memory` in `fits.py`, `processes` in `processes.py`, predictions and
online learning in `posteriors.py`, what has no matrix in `matrixfree.py` and `elevation.py`.
Each workload steps independent copies in turn, under stock and under autokern, and compares them pair by pair
(`measuring.py`). The models live in `workloads.py`; tables, plots and the block of docs/figures.md in `figures.py`.

A run of some workloads keeps the figures of the others only if versions and scale are the same; each workload says
when and where it was run.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import figures
import gpytorch
import linear_operator
import psutil
import torch
from elevation import run_elevation
from fits import run_acquisition, run_memory
from linear_operator.utils.warnings import NumericalWarning
from matrixfree import run_matrixfree, run_refusal
from measuring import DTYPES, FULL, QUICK, SIDES, Report, Scale, Toggles, compare, geomean, interleave, largest, word
from posteriors import run_fantasies, run_points, run_posterior, run_stream
from processes import run_processes
from rows import sentence
from torch import Tensor
from training import run_jump, run_training
from workloads import (
    Solve,
    State,
    Stream,
    co2_data,
    co2_hyperparameters,
    conditioned,
    dense_kernel,
    diabetes_trainer,
    exact_prediction,
    positives,
    predict,
)

START, FORECAST, CHECK_EVERY = 100, 52, 200
COLUMNS, ITERATIONS = 11, 20


def run_diabetes(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Train two copies of each model step by step; compare times, final losses and hyperparameters."""
    cases = []
    for kernel in ("rbf", "matern52"):
        for dtype in DTYPES:
            trainers = {side: diabetes_trainer(kernel, dtype) for side in SIDES}
            figure = compare(interleave(toggles, trainers, scale.steps, scale.warmup))
            off, on = (trainers[side] for side in SIDES)
            figure |= {"kernel": kernel, "dtype": word(dtype), "loss": off.loss}
            figure["loss_difference"] = abs(on.loss - off.loss)
            gaps = positives(on.model) - positives(off.model)
            figure["hyperparameter_difference"] = largest(gaps)
            figure["relative_hyperparameter_difference"] = largest(gaps / positives(off.model))
            cases.append(figure)
            report(f"diabetes, {kernel}, {word(dtype)}: {sentence(figure)}")
    n, d = off.model.train_inputs[0].shape
    return {"n": n, "d": d, "steps": scale.warmup + scale.steps, "cases": cases}


def started(x: Tensor, y: Tensor, state: State, toggles: Toggles) -> dict[str, Stream]:
    """Return a stream for each side, started under its own toggle."""
    streams = {}
    for side in SIDES:
        with toggles[side]():
            streams[side] = Stream(x, y, state, START)
    return streams


def refit_errors(streams: Mapping[str, Stream], state: State, toggles: Toggles) -> dict[str, Any]:
    """Compare the forecasts of both streams, and of a refit under default settings, with those of an exact refit.

    A default refit above `max_cholesky_size` rows is conjugate gradients to a loose tolerance and a Lanczos root of
    rank 100: it is reported beside the streams, and cannot be their yardstick.
    """
    stream = streams["off"]
    x, y, ahead = stream.x[: stream.n], stream.y[: stream.n], stream.x[stream.n : stream.n + FORECAST]
    truth = exact_prediction(x, y, state, ahead)
    forecasts = {}
    for side in SIDES:
        with toggles[side]():
            forecasts[side] = predict(streams[side].model, ahead)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        forecasts["default_refit"] = predict(conditioned(x, y, state), ahead)
    errors: dict[str, Any] = {"n": stream.n}
    for name, forecast in forecasts.items():
        pairs = zip(("mean", "variance"), forecast, truth, strict=True)
        errors[name] = {what: largest(ours - exact) for what, ours, exact in pairs}
    return errors


def around(seconds: Mapping[str, Sequence[float]], n: int, width: int = 12) -> dict[str, Any]:
    """Return the comparison of the updates of `n` points, over `width` weeks before and after."""
    weeks = slice(max(n - START - width, 0), n - START + width + 1)
    return {"n": n, **compare({side: seconds[side][weeks] for side in SIDES})}


def run_co2(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Stream the series into two models week by week; compare times and, every 200 weeks, forecasts."""
    x, y = co2_data()
    state = co2_hyperparameters(x[:START], y[:START])
    interleave(toggles, started(x, y, state, toggles), scale.warmup)
    streams = started(x, y, state, toggles)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    checks: list[dict[str, Any]] = []
    resident: list[int] = []
    process = psutil.Process()
    while (n := streams["off"].n) < scale.last:
        weeks = min(CHECK_EVERY - n % CHECK_EVERY, scale.last - n)
        block = interleave(toggles, streams, weeks, after=lambda: resident.append(process.memory_info().rss))
        for side in SIDES:
            seconds[side] += block[side]
        checks.append(refit_errors(streams, state, toggles))
        report(f"co2, {n + weeks} weeks: {sentence(around(seconds, n + weeks))}")
    marks = [n for n in (200, 400, 800, 1200, 1600, 2048) if START < n < scale.last]
    return {
        "start": START,
        "last": scale.last,
        "seconds": seconds,
        "total": {side: sum(seconds[side]) for side in SIDES},
        "at": [around(seconds, n) for n in (*marks, scale.last)],
        "checks": checks,
        "resident_bytes": {"first": resident[0], "last": resident[-1], "peak": max(resident)},
    }


def run_cg(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Run a fixed number of CG iterations on one matrix for both sides; compare times, iterates and residuals."""
    cases = []
    for n in scale.sizes:
        for dtype in DTYPES:
            covariance = dense_kernel(n, dtype)
            solves = {side: Solve(covariance, COLUMNS, ITERATIONS) for side in SIDES}
            figure = compare(interleave(toggles, solves, scale.solves, warmup=1))
            off, on = (solves[side].iterate for side in SIDES)
            gap = largest((on - off) / off.abs().amax(0))  # per column, relative to its largest element
            figure |= {"n": n, "dtype": word(dtype), "difference": gap}
            figure["residual"] = {side: solves[side].residual() for side in SIDES}
            cases.append(figure)
            report(f"cg, n={n}, {word(dtype)}: {sentence(figure)}")
    ratio = geomean(case["ratio"] for case in cases)
    return {"columns": COLUMNS, "iterations": ITERATIONS, "cases": cases, "geomean": ratio}


WORKLOADS: dict[str, Callable[[Scale, Toggles, Report], dict[str, Any]]] = {
    "training": run_training,
    "jump": run_jump,
    "diabetes": run_diabetes,
    "processes": run_processes,
    "memory": run_memory,
    "posterior": run_posterior,
    "points": run_points,
    "fantasies": run_fantasies,
    "stream": run_stream,
    "co2": run_co2,
    "cg": run_cg,
    "matrixfree": run_matrixfree,
    "refusal": run_refusal,
    "elevation": run_elevation,
    "acquisition": run_acquisition,
}
"""In the order in which they run: importing BoTorch changes defaults of GPyTorch for good, so it comes last."""


def describe(host: Mapping[str, Any], quick: bool) -> dict[str, Any]:
    """Return when, on what and with which versions a run was made."""
    modules = {"torch": torch, "gpytorch": gpytorch, "linear_operator": linear_operator}
    versions = {"python": platform.python_version(), **{name: str(m.__version__) for name, m in modules.items()}}
    fallback = {"cpu": {"model": platform.machine(), "torch_threads": torch.get_num_threads()}}
    date = datetime.now(timezone.utc).date().isoformat()
    return {"schema": 1, "date": date, "quick": quick, "host": dict(host) or fallback, "versions": versions}


def since(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return the calls by op and candidate that came between two answers of `autokern.stats`."""
    gained: dict[str, dict[str, int]] = {}
    for op, counts in now.items():
        for candidate, count in counts.items():
            if (more := count - before.get(op, {}).get(candidate, 0)) > 0:
                gained.setdefault(op, {})[candidate] = more
    return gained


def differences(earlier: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    """Return the differences of two runs by which their figures cannot be compared."""
    before, now = figures.plain(earlier), figures.plain(results)
    for run in (before, now):
        run["host"] = {key: value for key, value in run["host"].items() if key != "remarks"}
    return [key for key in ("schema", "host", "versions", "quick") if before.get(key) != now[key]]


def kept(
    earlier: Mapping[str, Any], results: Mapping[str, Any], names: Sequence[str], report: Report
) -> dict[str, Any]:
    """Return the workloads of an earlier run other than `names`; none, and report it, if the runs differ too much.

    Another host is no hindrance: each workload says where it was run.
    """
    others = {name: earlier[name] for name in WORKLOADS if name in earlier and name not in names}
    if others and (unlike := [what for what in differences(earlier, results) if what != "host"]):
        report(f"{figures.JSON_NAME} loses {', '.join(others)}: other {', '.join(unlike)} than in this run")
        return {}
    return {name: {"run": stamp(earlier), **figure} for name, figure in others.items()}


def stamp(results: Mapping[str, Any]) -> dict[str, str]:
    return {"date": results["date"], "host": figures.machine(results["host"])}


def measure(names: Sequence[str], quick: bool, earlier: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Calibrate if nothing is known of this machine, run the workloads, and return all figures."""
    import autokern

    if not autokern.profile().trials:
        autokern.calibrate(level="quick", budget=20.0)
    toggles: Toggles = {"off": contextlib.nullcontext, "on": autokern.enabled}
    results = describe(autokern.profile().host, quick)
    found = kept(earlier, results, names, report)
    for name in names:
        before = autokern.stats()
        if figure := WORKLOADS[name](QUICK if quick else FULL, toggles, report):
            found[name] = {"run": {**stamp(results), "calls": since(before, autokern.stats())}, **figure}
    return {**results, **{name: found[name] for name in WORKLOADS if name in found}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; 0 is fine, 1 a document that does not hold the figures of the JSON, 2 bad usage."""
    parser = argparse.ArgumentParser(description="Compare real models with autokern off and on.")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"any of {', '.join(WORKLOADS)}; default all")
    parser.add_argument("--quick", action="store_true", help="small sizes, two minutes in all")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent, help="where JSON and plots are")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--readme", type=Path, metavar="FILE", help="run nothing, rewrite the block of figures in FILE")
    task.add_argument("--check", type=Path, metavar="FILE", help="run nothing, exit 1 if that block is out of date")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.workloads) - set(WORKLOADS)):
        parser.error(f"unknown workload {', '.join(unknown)}; known are {', '.join(WORKLOADS)}")
    if document := options.readme or options.check:
        try:
            return figures.refresh(document, options.output_dir, check=options.check is not None)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    names = [name for name in WORKLOADS if name in (options.workloads or WORKLOADS)]
    try:
        earlier = figures.read(options.output_dir)
    except FileNotFoundError:
        earlier = {}
    except ValueError as error:
        parser.error(f"{figures.JSON_NAME} in {options.output_dir} cannot be read, remove it: {error}")
    results = measure(names, options.quick, earlier, figures.console.print)
    figures.write(results, options.output_dir)
    figures.show(results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
