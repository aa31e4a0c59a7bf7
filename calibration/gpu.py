"""Everything on one accelerator, stock against autokern: one row after another into `gpu.json`.

`peaks` measures bandwidth and GEMM; `steps` whole training steps; `fantasies` updates by one point, batched; `inverses`
the inverse for a Cholesky factor; `crossovers` times all candidates of five ops, for data that starts on either side;
`regret` compares choices with the best on problems off every grid; `products` many points in few and many dimensions,
KeOps among the candidates; `programs` runs the scripts of `whole/` with everything on the accelerator, without
recordings and with them, in processes forked after the imports, which do not count; `waits` counts what a warm training
step waits for. `steps` are also measured in a process without recordings (AUTOKERN_GRAPHS=off), as rows of their own. A
row that is there already is kept, by the name of the accelerator, so that an interrupted run goes on; the exit status
is 3 as long as rows are missing for want of time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import documents
import forked
import gpu_tables
import gpytorch
import msgspec
import products
import programs
import regret
import torch
from end_to_end import describe
from figures import console, save
from gpu_tables import UNRECORDED
from measuring import compare, interleave, largest, nothing
from posteriors import fitted
from training import DIMENSIONS, disagreement, forced_exact, rewinder
from workloads import smooth_trainer, uniform

import autokern
from autokern.core.problem import Problem
from autokern.core.state import permitted
from autokern.density.factors import inverted_by_products
from autokern.runtime.dispatch import explain
from autokern.system import host
from autokern.tuning import timer

DTYPES = {"float32": torch.float32, "float64": torch.float64}
OPTIONS: dict[str, Any] = {"seconds": 0.3, "rounds": (3, 8)}
"""How each problem of a table is timed."""
SECONDS = {"steps": 0.8, "fantasies": 0.6, "inverses": 0.3, "products": 1.0}
"""How long a row of a section is timed."""
INVERTED = (200, 500, 1000, 2000, 3000, 5000, 10_000)
STEPS = (20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)
RECORDED, WARM = 2000, 40
"""Points up to which a step may be recorded, and steps after which that has happened if it pays."""
FANTASIES = ((50, 127, 129, 400, 800, 2049), (1, 8, 128))
CROSSED: dict[str, tuple[int, ...]] = {
    "exact_log_prob": (100, 200, 500, 1000, 2000, 5000),
    "qr": (8, 32, 128, 512, 2048),
    "cholesky": (8, 32, 128, 512, 2048),
    "kernel_matrix": (30, 100, 300, 1000, 3000),
    "kernel_matmul": (1000, 3000, 10_000),
}
"""Sizes of square problems, by op."""
FIELDS: dict[str, dict[str, Any]] = {
    "kernel_matrix": {"d": 8, "variant": "rbf/same/ard"},
    "kernel_matmul": {"d": 8, "rhs": 11, "variant": "rbf/same"},
    "exact_log_prob": {"d": 8, "grad": "theta", "variant": "matern52/cholesky"},
}
SINGLE = ("kernel_matmul", "exact_log_prob")
"""Ops that are timed on single matrices."""
BATCHES = (8192, 1024, 128, 8, 1)
ELEMENTS = 2**27
"""Most elements of a batch of matrices: 1 GiB."""
DRAWN, SEED = 200, 77
PRODUCTS = (100_000, (3, 110, 10, 300, 50, 112))
PEAK = {"copy": 2**28, "gemm": 8192}
"""Elements that are copied; rows of square matrices that are multiplied."""
GAINS = Path(__file__).with_name("gains.json")
"""How long stock takes for each program on a CPU: short ones come first, so that there are many."""

JSON_PATH, BLOCK = Path(__file__).with_name("gpu.json"), "gpu"
Row = dict[str, Any]


class Task(NamedTuple):
    """A row to measure: its name, and what measures it."""

    name: str
    measure: Callable[[], Row]


def steps(device: str) -> Iterator[Task]:
    """Steps of Adam: stock with default settings, stock forced to stay exact, and autokern."""
    told, sizes = "", STEPS
    if "graphs" not in permitted:
        told, sizes = UNRECORDED, tuple(n for n in STEPS if n <= RECORDED)
    for n in sizes:
        for name, dtype in DTYPES.items():
            yield Task(f"n={n}, {name}{told}", lambda n=n, dtype=dtype: step(n, dtype, device))


def step(n: int, dtype: torch.dtype, device: str) -> Row:
    trainers = {side: smooth_trainer("matern52", n, dtype, DIMENSIONS, device) for side in ("default", "exact", "on")}
    toggles = {"default": contextlib.nullcontext, "exact": forced_exact, "on": autokern.enabled}
    rewind = rewinder(trainers)
    calls, most = settled(trainers), SECONDS["steps"]
    warmup = WARM if n <= RECORDED else 3 if n <= 5000 else 1
    seconds = interleave(toggles, calls, 30, warmup, rewind, most, 3, settle=rewind)
    found = {f"against_{side}": compare(seconds, off=side) for side in ("default", "exact")}
    return {**found, "agreement": {side: disagreement(trainers[side], trainers["exact"]) for side in ("on", "default")}}


def settled(calls: Mapping[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    """Return functions that end when the device has done their work."""
    return {side: lambda call=call: (call(), host.settle()) for side, call in calls.items()}


def fantasies(device: str) -> Iterator[Task]:
    """Updates by one point each of a batch of fantasies, under `fast_pred_var`."""
    for n in FANTASIES[0]:
        for batch in FANTASIES[1]:
            yield Task(f"n={n}, batch={batch}", lambda n=n, batch=batch: fantasy(n, batch, device))


def fantasy(n: int, batch: int, device: str) -> Row:
    sides = {"off": contextlib.nullcontext, "on": autokern.enabled}
    models = {side: fitted(n).to(device) for side in sides}  # one side would go on with what the other has prepared
    points = models["off"].train_inputs[0]
    x = uniform(batch, points.shape[-1], seed=11).unsqueeze(-2).to(device)
    x = x if batch > 1 else x[0]
    y, found = (3 * x.sum(-1)).sin(), {}

    @torch.no_grad()
    def update(side: str) -> None:
        with gpytorch.settings.fast_pred_var():
            if models[side].prediction_strategy is None:
                models[side](points[:1] + 0.1).variance  # noqa: B018
            found[side] = models[side].get_fantasy_model(x, y)

    calls = {side: lambda side=side: update(side) for side in sides}
    seconds = interleave(sides, settled(calls), 20, 2, seconds=SECONDS["fantasies"], least=3, settle=nothing)
    figure = compare(seconds)
    means = {}
    for side, toggle in sides.items():
        with toggle(), torch.no_grad(), gpytorch.settings.fast_pred_var():
            means[side] = found[side](points[:50] + 0.05).mean
    return {**figure, "difference": largest(means["on"] - means["off"])}


def inverses(device: str) -> Iterator[Task]:
    """The inverse for a Cholesky factor by torch and by products."""
    for n in INVERTED:
        for name, dtype in DTYPES.items():
            yield Task(f"n={n}, {name}", lambda n=n, dtype=dtype: inverse(n, dtype, device))


def inverse(n: int, dtype: torch.dtype, device: str) -> Row:
    rows = uniform(n, n, seed=n).to(device=device, dtype=dtype)
    factor = torch.linalg.cholesky(rows @ rows.mT / n + torch.eye(n, device=device, dtype=dtype))
    calls = {"off": lambda: torch.cholesky_inverse(factor), "on": lambda: inverted_by_products(factor.clone())}
    sides = dict.fromkeys(calls, contextlib.nullcontext)
    seconds = interleave(sides, settled(calls), 20, 2, seconds=SECONDS["inverses"], least=3, settle=nothing)
    return {**compare(seconds), "difference": largest(calls["on"]() - calls["off"]())}


def crossovers(device: str) -> Iterator[Task]:
    """All candidates on square problems in batches; data starts on the accelerator, or on the CPU."""
    for op, sizes in CROSSED.items():
        for batch in BATCHES:
            for n in sizes:
                if batch * n * n > ELEMENTS or (op in SINGLE and batch > 1):
                    continue
                for dtype in DTYPES:
                    for side in dict.fromkeys((device, "cpu")):
                        fields = {"m": n, "n": n, "batch": batch, "dtype": dtype, "device": side, **FIELDS.get(op, {})}
                        yield timed(Problem(op=op, **fields))


def off_the_grid(device: str) -> Iterator[Task]:
    """Problems that no calibration has seen, drawn log-uniformly."""
    yield from map(timed, regret.random_problems(DRAWN, SEED, device=device, most=(1e11, 2e10)))


def timed(problem: Problem) -> Task:
    """Return the task to time all candidates of a problem, and to compare the choice with the best."""
    return Task(str(problem), lambda: against_the_best(problem))


def against_the_best(problem: Problem) -> Row:
    found = regret.timed([problem], time.perf_counter() + 60, **OPTIONS)
    if not found:
        return {"error": "it cannot be sampled, or takes too much memory"}
    chosen = explain(problem).candidate
    usual = {name: found[0].seconds * found[0].over_stock(name) for name in found[0].ratios}
    figures = {"chosen": chosen, "best": found[0].fastest, "regret": found[0].regret(chosen), "seconds": usual}
    return {"problem": msgspec.to_builtins(problem), **figures}


def many_points(device: str) -> Iterator[Task]:
    """Products with few columns, on as many points as fit into no memory as a matrix."""
    n, dimensions = PRODUCTS
    keops = not products.without_keops()
    for same in (True, False):
        for dtype in DTYPES:
            for d in dimensions:
                what = f"rbf, n={n}, d={d}, {dtype}, {'same' if same else 'other'} points"
                yield Task(what, lambda d=d, dtype=dtype, same=same: product(n, d, dtype, same, keops, device))


def product(n: int, d: int, dtype: str, same: bool, keops: bool, device: str) -> Row:
    figures = products.compared(products.case("rbf", n, d, same, DTYPES[dtype], device), keops, SECONDS["products"])
    seconds, chosen = figures["seconds"], figures["chosen"]
    usual = [seconds[name] for name in ("KeOps", "the matrix", "stock") if name in seconds]
    if chosen not in seconds or not usual:
        return figures
    return {
        **figures,
        "ratio": min(usual) / seconds[chosen],
        "over_floor": seconds[chosen] / figures["floor"]["seconds"],
    }


def whole_programs(device: str) -> Iterator[Task]:
    """Scripts in fresh processes, everything on the accelerator; BoTorch's and GPyTorch's in turn, short ones first."""
    usual = {row["program"]: min(row["off"]) for row in json.loads(GAINS.read_text(encoding="utf-8"))["programs"]}
    known = sorted(programs.programs().items(), key=lambda item: usual.get(item[0], 0.0))
    libraries = [[item for item in known if item[0].startswith(name)] for name in programs.LIBRARIES]
    for name, script in filter(None, itertools.chain(*itertools.zip_longest(*libraries))):
        yield Task(name, lambda script=script: program(script, device))


def program(script: Path, device: str) -> Row:
    runs = {side: forked.run(script, side, device) for side in forked.SIDES}
    stock = runs["off"]
    found = {side: stock["seconds"] / runs[side]["seconds"] for side in ("on", "graphs")}
    gap = max(programs.gap(runs[side]["final"], stock["final"]) for side in found)
    return {"ratio": found["on"], "recorded": found["graphs"], "difference": gap, "runs": runs}


def peaks(device: str) -> Iterator[Task]:
    """Bytes and floating-point operations per second, for the floors."""
    yield Task("copy", lambda: {"bytes_per_second": copied(device)})
    for name, dtype in DTYPES.items():
        yield Task(f"gemm, {name}", lambda dtype=dtype: {"flops_per_second": multiplied(dtype, device)})


def copied(device: str) -> float:
    source = torch.ones(PEAK["copy"], device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / least(lambda: target.copy_(source))


def multiplied(dtype: torch.dtype, device: str) -> float:
    a = torch.ones(PEAK["gemm"], PEAK["gemm"], dtype=dtype, device=device)
    out = torch.empty_like(a)
    return float(2 * len(a) ** 3 / least(lambda: torch.mm(a, a, out=out)))


def least(call: Callable[[], object]) -> float:
    call()
    return min(timer.once(call, host.settle) for _ in range(5))


def waits(device: str) -> Iterator[Task]:
    """What one warm training step waits for, on either side."""
    for n in (100, 500, 2000):
        for side in ("off", "on"):
            yield Task(f"n={n}, {side}", lambda n=n, side=side: waiting(n, side, device))


def waiting(n: int, side: str, device: str) -> Row:
    trainer = smooth_trainer("matern52", n, torch.float64, DIMENSIONS, device)
    with {"off": contextlib.nullcontext, "on": autokern.enabled}[side]():
        for _ in range(3):
            trainer()
        host.settle()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                trainer()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts = traced(trainer)
    told = [w for w in caught if "synchronizing" in str(w.message)]
    return {"waits": len(told), **counts}


def traced(call: Callable[[], object]) -> dict[str, int]:
    """Return how many kernels a call launches, and how often it waits, as the profiler sees it."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        host.settle()
    counts = {event.key: event.count for event in profile.key_averages()}
    found = {"launches": "LaunchKernel", "synchronizations": "Synchronize"}
    return {name: sum(count for key, count in counts.items() if word in key) for name, word in found.items()}


SECTIONS: dict[str, Callable[[str], Iterator[Task]]] = {
    "peaks": peaks,
    "waits": waits,
    "steps": steps,
    "fantasies": fantasies,
    "inverses": inverses,
    "programs": whole_programs,
    "products": many_points,
    "regret": off_the_grid,
    "crossovers": crossovers,
}


def measure(
    sections: Sequence[str], device: str, deadline: float, results: dict[str, Any], keep: Callable[[], object]
) -> int:
    """Measure the rows that are missing until `deadline`, and keep each; return how many are missing still."""
    missing = 0
    for section in sections:
        rows: dict[str, Row] = results.setdefault("sections", {}).setdefault(section, {})
        for task in SECTIONS[section](device):
            if task.name in rows:
                continue
            if time.perf_counter() > deadline:
                missing += 1
                continue
            began = time.perf_counter()
            try:
                row = task.measure()
            except Exception as error:  # the next row is worth having
                row = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            finally:
                torch.cuda.empty_cache()
            rows[task.name] = {**row, "took": time.perf_counter() - began}
            keep()
            console.print(f"{section}, {task.name}: {gpu_tables.sentence(row)}")
    return missing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; 0 is done, 3 rows are missing, 2 bad usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(SECTIONS)}; default all")
    parser.add_argument("--device", default="cuda", help="kind of the accelerator (default cuda)")
    parser.add_argument("--seconds", type=float, default=500.0, help="after these, no row is begun (default 500)")
    parser.add_argument("--output", type=Path, default=JSON_PATH, help="the JSON to write or to go on with")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--readme", type=Path, metavar="FILE", help="run nothing, rewrite the tables in FILE")
    task.add_argument("--check", type=Path, metavar="FILE", help="run nothing, exit 1 if the tables are out of date")
    options = parser.parse_args(arguments)
    if (
        status := documents.served(parser, options, {BLOCK: gpu_tables.block, f"{BLOCK}-in-short": gpu_tables.short})
    ) is not None:
        return status
    if unknown := sorted(set(options.sections) - set(SECTIONS)):
        parser.error(f"unknown section {', '.join(unknown)}; known are {', '.join(SECTIONS)}")
    if options.device not in (kinds := host.current().devices):
        parser.error(f"device {options.device!r} was asked for; torch finds {', '.join(kinds)}")
    deadline = time.perf_counter() + options.seconds
    here = describe(host.current().fields, quick=False)
    machine = gpu_tables.named(here)
    try:
        text = options.output.read_text(encoding="utf-8") if options.output.exists() else "{}"
        kept = gpu_tables.by_machine(json.loads(text))
    except (OSError, ValueError) as error:
        parser.error(f"{options.output} cannot be gone on with, name another --output: {error}")
    if unlike := [key for key in ("host", "versions") if kept.get(machine, here)[key] != here[key]]:
        console.print(f"{machine} in {options.output.name} is of another {' and '.join(unlike)}: it begins anew")
        kept.pop(machine)
    results = kept.setdefault(machine, dict(here))
    sections = options.sections or list(SECTIONS)
    missing = measure(sections, options.device, deadline, results, lambda: save(kept, options.output))
    for line in gpu_tables.summary(results):
        console.print(line)
    console.print(f"{missing} rows are missing for want of time" if missing else "all rows are there")
    return 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
