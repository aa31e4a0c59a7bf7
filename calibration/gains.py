"""What a calibration gains: no profile, one of `calibrate --quick`, and one of `--full`, in turn; writes `gains.json`.

`programs` runs the scripts in `whole/` in fresh processes and counts what comes after the imports, `torch._dynamo`
among them on all sides. `steps` times training steps in persistent processes, one for each side, which are asked in
turn. `overhead` times dispatched calls of random problems against the best candidate run directly. Every run begins
with the calibrations themselves, unless `--homes` names a folder that has them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import documents
import torch
from measuring import geomean

HERE = Path(__file__).parent
JSON, DOCUMENT, BLOCK = HERE / "gains.json", HERE.parent / "docs" / "evidence.md", "gains"
SIDES = ("off", "none", "quick", "full")
BUDGETS = {"quick": 20.0, "full": 300.0}
SIZES = (20, 50, 100, 300, 500, 800, 1000, 1500)
IMPORTS = """
import ast, json, os, runpy, sys, time
import torch, torch._dynamo
with open(sys.argv[1]) as script: found = ast.parse(script.read()).body
found = [one for one in found if isinstance(one, (ast.Import, ast.ImportFrom))]
exec(compile(ast.Module(found, []), sys.argv[1], "exec"), {})
"""
"""What a script in `whole/` imports, before its time is taken; BoTorch imports some modules on first use."""
PRELUDE = (
    IMPORTS
    + """
if sys.argv[2] != "off": import autokern.auto
wall, cpu = time.perf_counter(), time.process_time()
runpy.run_path(sys.argv[1], run_name="__main__")
print("loop", time.perf_counter() - wall, time.process_time() - cpu)
"""
)


def environment(side: str, homes: Path, threads: int, empty: Path) -> dict[str, str]:
    """Return the variables of a process of one side."""
    home = homes / side if side in BUDGETS else empty
    counts = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    surroundings = {**os.environ, **counts, "PYTHONWARNINGS": "ignore", "AUTOKERN_HOME": str(home)}
    surroundings.pop("PYTHONDONTWRITEBYTECODE", None)  # what pip installs is compiled
    return surroundings


def calibrated(homes: Path, threads: int) -> None:
    """Calibrate once for each level, in a home of its own."""
    for level, seconds in BUDGETS.items():
        if not (homes / level).exists():
            options = [f"--{level}", "--budget", str(seconds)]
            command = [sys.executable, "-m", "autokern", "calibrate", *options]
            subprocess.run(command, env=environment(level, homes, threads, homes), check=False)


# --- whole programs ---------------------------------------------------------------------------------------------------


def program(script: Path, side: str, homes: Path, threads: int) -> tuple[float, float]:
    """Run a script; return its seconds and CPU seconds after the imports."""
    with tempfile.TemporaryDirectory() as folder:
        surroundings = environment(side, homes, threads, Path(folder))
        command = [sys.executable, "-c", PRELUDE, str(script), side]
        out = subprocess.run(command, env=surroundings, check=True, capture_output=True, text=True).stdout
    _, wall, cpu = next(line for line in reversed(out.splitlines()) if line.startswith("loop ")).split()
    return float(wall), float(cpu)


def programs(homes: Path, threads: int, rounds: int, names: Sequence[str], jobs: int) -> list[dict[str, Any]]:
    """Return, by program and side, the least seconds and CPU seconds of some rounds; `jobs` programs run at a time."""

    def measured(script: Path) -> dict[str, Any]:
        found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for round_ in range(rounds):
            for side in SIDES[:: 1 - 2 * (round_ % 2)]:
                found[side].append(program(script, side, homes, threads))
        row = {"program": script.stem, **{side: [min(v) for v in zip(*found[side], strict=True)] for side in SIDES}}
        print(row, flush=True)
        return row

    scripts = [path for path in sorted((HERE / "whole").glob("*.py")) if not names or path.stem in names]
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(measured, scripts))


# --- training steps ---------------------------------------------------------------------------------------------------


def worker(side: str) -> None:
    """Answer lines of "n dtype" with the median seconds of a training step."""
    if side != "off":
        import autokern.auto  # noqa: F401
    from workloads import smooth_trainer

    trainers: dict[str, Any] = {}
    for line in sys.stdin:
        n, dtype = line.split()
        if line not in trainers:
            trainers[line] = smooth_trainer("rbf", int(n), getattr(torch, dtype))
            for _ in range(8):
                trainers[line]()
        times = []
        for _ in range(max(3, min(40, 4000 // int(n)))):
            began = time.perf_counter()
            trainers[line]()
            times.append(time.perf_counter() - began)
        print("step", statistics.median(times), flush=True)


def steps(homes: Path, threads: int, rounds: int) -> list[dict[str, Any]]:
    """Return, by size, dtype and side, the median seconds of a training step."""
    with tempfile.TemporaryDirectory() as folder:
        started = {
            side: subprocess.Popen(
                [sys.executable, __file__, "--worker", side], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env=environment(side, homes, threads, Path(folder) / side) | {"AUTOKERN_CALIBRATE": "never"},
            )
            for side in SIDES
        }  # fmt: skip

        def asked(side: str, line: str) -> float:
            process = started[side]
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(line)
            process.stdin.flush()
            answers = (line for line in process.stdout if line.startswith("step "))  # KeOps prints too
            return float(next(answers).split()[1])

        rows = []
        for dtype in ("float64", "float32"):
            for n in SIZES:
                turns = [{side: asked(side, f"{n} {dtype}\n") for side in SIDES} for _ in range(rounds)]
                row = {side: statistics.median(turn[side] for turn in turns[1:]) for side in SIDES}
                rows.append({"n": n, "dtype": dtype, **row})
                print(rows[-1], flush=True)
        for process in started.values():
            process.communicate()
    return rows


# --- dispatched calls -------------------------------------------------------------------------------------------------


def overhead(homes: Path, seconds: float, count: int) -> list[dict[str, Any]]:
    """Return what dispatched calls of random problems take over the best candidate run directly, by side."""
    from regret import random_problems

    from autokern.core.registry import get
    from autokern.core.settings import Settings
    from autokern.core.state import inside
    from autokern.hooks import install
    from autokern.runtime import dispatch
    from autokern.runtime.session import Session
    from autokern.tuning import timer
    from autokern.tuning.measuring import contenders, trial

    sessions = {side: Session(Settings(calibrate="never", home=homes / side)) for side in SIDES[1:]}
    rows, deadline = [], time.perf_counter() + seconds
    for problem in random_problems(count, 77, most=(1e10, 1e9)):
        if time.perf_counter() > deadline:
            break
        op = get(problem.op)
        args = op.sample(problem, torch.Generator().manual_seed(1))
        calls, route = {}, dispatch.route(op)

        def by(session: Session, call: Any) -> Any:
            before = _swapped(session)
            try:
                return call()
            finally:
                _swapped(before)

        with install.enabled():
            for candidate in contenders(problem):
                call = trial(op, candidate.run, problem, args)

                def direct(call: Any = call) -> Any:
                    inside.active = True
                    try:
                        return call()
                    finally:
                        inside.active = False

                calls[candidate.name] = direct
            for side, session in sessions.items():
                dispatched = trial(op, route, problem, args)
                calls[f"dispatched {side}"] = lambda s=session, d=dispatched: by(s, d)
            try:
                halves = [timer.compare(calls, rounds=(4, 9), seconds=1.0) for _ in range(2)]
            except Exception as error:
                print(problem, repr(error))
                continue
        if min(half["stock"].seconds for half in halves) >= 3e-5:
            rows.append(_row(str(problem), halves))
    return rows


def _swapped(session: Any) -> Any:
    """Put a session in the place of the present one, which is returned."""
    from autokern.runtime import dispatch

    before = dispatch.session()
    dispatch.replace(session)
    return before


def _row(problem: str, halves: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ratios of dispatched calls to the candidate that is best in the other half of the rounds."""
    found: dict[str, Any] = {"problem": problem, "seconds": halves[0]["stock"].seconds}
    for side in SIDES[1:]:
        logs = []
        for one, other in (halves, halves[::-1]):
            best = min((name for name in other if not name.startswith("dispatched")), key=lambda n: other[n].ratio)
            logs.append(math.log(one[f"dispatched {side}"].ratio / one[best].ratio))
        found[side] = math.exp(sum(logs) / 2)
    return found


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the tables."""
    run = figures["run"]
    where = f"{run['cpu']}, {run['capability']}, {run['threads']} thread{'s' * (run['threads'] > 1)}, {run['date']}"
    beside = f", {run['jobs']} programs at a time" if run.get("jobs", 1) > 1 else ""
    yield f"{where}{beside}; the shipped choices are those of {run['shipped']}.\n"
    yield "| what | sides | no profile | `--quick` | `--full` |"
    yield "|---|---|---|---|---|"
    rows = figures.get("programs", [])
    for index, what in enumerate(("seconds", "CPU seconds")):
        if rows:
            gains = {s: [row["off"][index] / row[s][index] for row in rows] for s in SIDES[1:]}
            cells = " | ".join(f"{geomean(gains[s]):.2f} (least {min(gains[s]):.2f})" for s in SIDES[1:])
            yield f"| {len(rows)} programs after the imports | stock over autokern, {what} | {cells} |"
            gains = {s: [row["none"][index] / row[s][index] for row in rows] for s in SIDES[2:]}
            cells = " | ".join(f"{geomean(gains[s]):.2f} (least {min(gains[s]):.2f})" for s in SIDES[2:])
            yield f"| the same | no profile over profile, {what} | | {cells} |"
    rows = figures.get("steps", [])
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        of = [row for row in rows if row["dtype"] == dtype]
        gains = {s: [row["off"] / row[s] for row in of] for s in SIDES[1:]}
        cells = " | ".join(f"{geomean(gains[s]):.2f} (least {min(gains[s]):.2f})" for s in SIDES[1:])
        yield f"| training steps, {dtype}, n = {SIZES[0]} to {SIZES[-1]} | stock over autokern | {cells} |"
    rows = figures.get("overhead", [])
    if rows:
        kept = {s: sorted(row[s] for row in rows) for s in SIDES[1:]}
        cells = " | ".join(f"{geomean(v):.3f}, p95 {v[int(0.95 * len(v))]:.2f}" for v in kept.values())
        yield f"| {len(rows)} random problems of 30 µs and more | dispatched call over the best candidate | {cells} |"
    yield ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are named, or all; with ``--check`` tell by the exit status whether the docs are in step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=["programs", "steps", "overhead", []], default=[])
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--homes", type=Path, help="a folder with the homes `quick` and `full`, made there if missing")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="programs to run at a time; their CPU seconds count then")
    parser.add_argument("--seconds", type=float, default=300.0, help="for `overhead`")
    parser.add_argument("--only", default="", metavar="NAME,...", help="programs to run (default: all)")
    parser.add_argument("--output", type=Path, default=JSON)
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options.worker)
        return 0
    figures = json.loads(options.output.read_text()) if options.output.exists() else {}
    if not options.check and not options.docs:
        homes = options.homes or Path(tempfile.mkdtemp())
        calibrated(homes, options.threads)
        figures["run"] = {**origin(options.threads), "jobs": options.jobs}
        parts = options.parts or ["programs", "steps", "overhead"]
        names = [name for name in options.only.split(",") if name]
        if "programs" in parts:
            figures["programs"] = programs(homes, options.threads, options.rounds, names, options.jobs)
        if "steps" in parts:
            figures["steps"] = steps(homes, options.threads, options.rounds + 2)
        if "overhead" in parts:
            figures["overhead"] = overhead(homes, options.seconds, 800)
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
        print("\n".join(tables(figures)))
        if not options.homes:
            shutil.rmtree(homes)
        return 0
    same = documents.refresh(DOCUMENT, BLOCK, "\n".join(tables(figures)), options.check)
    return int(options.check and not same)


def origin(threads: int) -> dict[str, Any]:
    """Return when and where the figures were taken."""
    from autokern.system import host
    from autokern.tuning.chooser import recorded

    cpu = host.current().fields["cpu"]
    others = sorted({f"{h['cpu']['model']} ({h['cpu']['capability']})" for h in recorded().hosts})
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    told = {
        "cpu": f"{cpu['model']} {cpu['numbers']}",
        "capability": cpu["capability"],
        "threads": threads,
        "date": date,
    }
    return {**told, "shipped": ", ".join(others)}


if __name__ == "__main__":
    sys.exit(main())
