"""Whole programs in fresh processes, autokern off and on in turn; writes `programs.json` and its tables.

The programs are the scripts in `whole/`, as a user writes them; each prints its final values. Every round runs each
script in changing order: as it is; after ``import autokern.auto`` with the profile of this machine; and, in the first
rounds, the same in an empty home, where nothing is measured yet. All of a process counts, from the start of the
interpreter to its end. How much stock's own final values depend on rounding is seen by a run on one thread, and by one
with the instructions of an older processor.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import documents
import numpy as np
from end_to_end import describe, differences
from figures import console, origin, save
from measuring import geomean, turns
from rows import factor, small

from autokern.core.output import duration

FOLDER = Path(__file__).parent
JSON_NAME, GAINS, PARTS = "programs.json", "gains.json", "end_to_end.json"
BLOCK, SHORT = "programs", "programs-in-short"
SIDES = ("off", "on", "new")
OTHERS = (
    {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OPENBLAS_CORETYPE": "Haswell"},
)
"""Surroundings in which stock rounds otherwise."""
FIRST_RUNS = 2
"""Rounds in which a program also runs in an empty home."""
START = "import runpy, sys\nrunpy.run_path(sys.argv[1], run_name='__main__')"
COLUMNS = (("on", "ratio"), ("on", "cpu_ratio"), ("new", "ratio"))
LIBRARIES = {"bo": "BoTorch", "gp": "GPyTorch"}

Run = dict[str, Any]


def programs() -> dict[str, Path]:
    """Return the scripts by name."""
    return {path.stem: path for path in sorted((FOLDER / "whole").glob("*.py"))}


def run(script: Path, side: str, home: Path, environment: Mapping[str, str] | None = None) -> Run:
    """Run a script to its end; return seconds, CPU seconds, peak of resident memory, and the values it printed last.

    Raises
    ------
    RuntimeError
        If it fails, or prints no final values.
    """
    code = START if side == "off" else f"import autokern.auto\n{START}"
    surroundings = {**os.environ, "PYTHONWARNINGS": "ignore", "AUTOKERN_HOME": str(home), **(environment or {})}
    surroundings.pop("PYTHONDONTWRITEBYTECODE", None)  # what pip installs is compiled
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        began = time.perf_counter()
        child = subprocess.Popen([sys.executable, "-c", code, str(script)], stdout=out, stderr=err, env=surroundings)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        words = (out.read().strip().splitlines() or [""])[-1].split()
        if child.returncode or words[:1] != ["final"]:
            raise RuntimeError(f"{script.stem} ({side}) ended with {child.returncode}: {err.read()[-2000:]}")
    values = [float(word) for word in words[1:]]
    cpu = usage.ru_utime + usage.ru_stime
    return {"seconds": seconds, "cpu": cpu, "peak": 1024 * usage.ru_maxrss, "final": values}


def gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference of final values, relative to their size."""
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(one, other, strict=True))


def measured(script: Path, pairs: int, profile: Path) -> dict[str, Any]:
    """Run a script `pairs` times on each side; return the comparison."""
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kept"  # what this program learns stays in its own copy
        shutil.copytree(profile, kept)
        run(script, "on", kept)  # compiled files, caches of the system
        for round_, order in enumerate(turns(SIDES, pairs)):
            for side in order:
                if side != "new" or round_ < FIRST_RUNS:
                    runs[side].append(run(script, side, kept if side != "new" else Path(folder) / f"empty{round_}"))
    of = {side: {what: [one[what] for one in runs[side]] for what in runs[side][0]} for side in SIDES}
    figures: dict[str, Any] = {"what": described(script), "pairs": pairs}
    for side in ("on", "new"):
        stock = {what: of["off"][what][: len(runs[side])] for what in ("seconds", "cpu")}
        ratios = np.divide(stock["seconds"], of[side]["seconds"])
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
        figures[side] = {"ratio": middle, "quartiles": [low, high]}
        figures[side]["cpu_ratio"] = float(np.median(np.divide(stock["cpu"], of[side]["cpu"])))
        figures[side]["difference"] = max(gap(final, of["off"]["final"][0]) for final in of[side]["final"])
    middle_of = statistics.median
    figures["seconds"] = {side: middle_of(of[side]["seconds"]) for side in SIDES}
    figures["peak"] = {side: middle_of(of[side]["peak"]) for side in SIDES}
    finals = of["off"]["final"]
    figures["stock_difference"] = max(spread(script, finals[0]), *(gap(final, finals[0]) for final in finals))
    return figures


def spread(script: Path, final: Sequence[float]) -> float:
    """Return the largest difference from stock's final values where stock itself rounds otherwise."""
    return max(gap(run(script, "off", FOLDER, surroundings)["final"], final) for surroundings in OTHERS)


def line(name: str, figures: Mapping[str, Any]) -> str:
    """Return a program's row of the table."""
    seconds, on, new = figures["seconds"], figures["on"], figures["new"]
    memory = f"{(figures['peak']['on'] - figures['peak']['off']) / 2**20:+.0f} MiB"
    agreement = f"{small(on['difference'])} ({small(figures['stock_difference'])})"
    cells = (
        f"{LIBRARIES[name[:2]]}: {figures['what']}", duration(seconds["off"]), duration(seconds["on"]), factor(on),
        f"{on['cpu_ratio']:.2f}×", f"{new['ratio']:.2f}×", memory, agreement,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def summary(results: Mapping[str, Any]) -> list[str]:
    """Return one row per library: geometric means, and the least."""
    rows = []
    for start, library in LIBRARIES.items():
        found = [figures for name, figures in results["programs"].items() if name.startswith(start)]
        if found:
            on, cpu, new = (
                [f[s][w] for f in found] for s, w in (("on", "ratio"), ("on", "cpu_ratio"), ("new", "ratio"))
            )
            ratios = [f"{geomean(r):.2f}× (least {min(r):.2f})" for r in (on, cpu, new)]
            rows.append(f"| **{library}, {len(found)} programs, geometric mean** | | | {' | '.join(ratios)} | | |")
    return rows


def loops() -> dict[str, tuple[float, float]]:
    """Return, by program, stock's and autokern's CPU seconds after the imports, without a profile, by `gains.py`."""
    rows = json.loads((FOLDER / GAINS).read_text(encoding="utf-8"))["programs"]
    return {row["program"]: (row["off"][1], row["none"][1]) for row in rows}


def in_short(results: Mapping[str, Any]) -> str:
    """Return the table of the README: means of each library, the best, median and worst programs, and two at once.

    Start-up is told apart: imports that autokern spares are a large part of a short program.
    """
    found, whole = loops(), results["programs"]
    ratios = {name: stock / ours for name, (stock, ours) in found.items()}
    heads = ("program", "whole process, with its imports", "after the imports", "stock", "autokern")
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for start, library in LIBRARIES.items():
        ends = [figures["on"]["ratio"] for name, figures in whole.items() if name.startswith(start)]
        of = [ratio for name, ratio in ratios.items() if name.startswith(start)]
        cells = [f"{geomean(these):.2f}× ({len(these)} programs, least {min(these):.2f})" for these in (ends, of)]
        lines.append(f"| **{library}, geometric mean** | {' | '.join(cells)} | | |")
    ranked = sorted(ratios, key=lambda name: -ratios[name])
    for name in (ranked[0], ranked[len(ranked) // 2], ranked[-1]):
        end = f"{whole[name]['on']['ratio']:.2f}×" if name in whole else ""
        seconds = " | ".join(map(duration, found[name]))
        lines.append(
            f"| {LIBRARIES[name[:2]]}: {described(programs()[name])} | {end} | {ratios[name]:.2f}× | {seconds} |"
        )
    beside = json.loads((FOLDER / PARTS).read_text(encoding="utf-8"))["processes"]
    two = next(case for case in beside["cases"] if (case["processes"], case["n"]) == (2, 100))
    steps = " | ".join(f"{two['rate'][side]:,.0f} steps/s" for side in ("off", "on"))
    lines.append(f"| GPyTorch: two processes that train on 100 points at once | | {two['ratio']:.2f}× | {steps} |")
    run = json.loads((FOLDER / GAINS).read_text(encoding="utf-8"))["run"]
    cpu = run["cpu"].rpartition(" ")[0]  # without the numbers of its family and model
    cpu += f", {run['jobs']} programs at a time" if run.get("jobs", 1) > 1 else ""
    note = (
        f"{origin(results)}: whole processes by wall time, after a calibration. After the imports by CPU time on "
        f"{cpu}, before any calibration, {run['threads']} threads, {run['date']}: the best, the median and the worst "
        f"of {len(ratios)} programs. At once: {beside['run']['host']}, {beside['run']['date']}. Empty: not measured."
    ).replace("1 threads", "1 thread")
    return "\n".join([*lines, "", note, ""])


def described(script: Path) -> str:
    """Return what a program does, by its own first line."""
    doc = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return doc.partition(": ")[2].rstrip(".")


def _head(results: Mapping[str, Any]) -> list[str]:
    heads = ("program", "stock", "autokern", "faster", "CPU time", "no profile yet", "memory", "final values (stock)")
    return [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}", *summary(results)]


def block(results: Mapping[str, Any]) -> str:
    """Return the table of all programs as Markdown."""
    lines = [*_head(results), *(line(name, figures) for name, figures in sorted(results["programs"].items()))]
    note = (
        f"{origin(results)}. Whole processes, in turn, "
        f"{results['pairs']} of each, {FIRST_RUNS} without a profile: times are medians, factors medians of paired "
        "ratios (quartiles). Final values: largest relative difference from stock's, and of stock's own runs, one of "
        "them on one thread and one without the newest instructions. "
        "Loops that choose where to look next amplify rounding."
    )
    return "\n".join([*lines, "", note, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; 0 is fine, 1 a document that does not hold the figures of the JSON, 2 bad usage."""
    known = programs()
    parser = argparse.ArgumentParser(description="Compare whole programs with autokern off and on.")
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"any of {', '.join(known)}; default all")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each side (default 5)")
    parser.add_argument("--home", type=Path, help="folder with the profile; default: measure one, `calibrate --full`")
    parser.add_argument("--output", type=Path, default=FOLDER / JSON_NAME, help="the JSON to write or to read")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--readme", type=Path, metavar="FILE", help="run nothing, rewrite the table in FILE")
    task.add_argument("--check", type=Path, metavar="FILE", help="run nothing, exit 1 if that table is out of date")
    task.add_argument("--spread", action="store_true", help="measure only how far stock's own runs differ")
    options = parser.parse_args(arguments)
    if (served := documents.served(parser, options, {BLOCK: block, SHORT: in_short})) is not None:
        return served
    if unknown := sorted(set(options.programs) - set(known)):
        parser.error(f"unknown program {', '.join(unknown)}; known are {', '.join(known)}")
    if options.spread:
        results = json.loads(options.output.read_text(encoding="utf-8"))
        for name in options.programs or results["programs"]:
            figures, final = results["programs"][name], run(known[name], "off", FOLDER)["final"]
            figures["stock_difference"] = max(figures["stock_difference"], spread(known[name], final))
            console.print(line(name, figures))
        save(results, options.output)
        return 0
    if options.pairs < 1:
        parser.error(f"--pairs must be at least 1, found {options.pairs}")
    with tempfile.TemporaryDirectory() as folder:
        home = options.home or Path(folder)
        surroundings = {**os.environ, "AUTOKERN_HOME": str(home)}
        if options.home is None:
            subprocess.run([sys.executable, "-m", "autokern", "calibrate", "--full"], env=surroundings, check=True)
        asked = [sys.executable, "-c", "import autokern, json; print(json.dumps(dict(autokern.profile().host)))"]
        host = json.loads(subprocess.run(asked, env=surroundings, check=True, capture_output=True, text=True).stdout)
        results = {**describe(host, quick=False), "pairs": options.pairs, "programs": {}}
        if options.programs and options.output.exists():
            earlier = json.loads(options.output.read_text(encoding="utf-8"))
            if differences(earlier, {**results, "quick": earlier.get("quick")}):
                parser.error(f"{options.output.name} is of another machine or other versions: run all programs")
            results["programs"] = earlier["programs"]
        for name in options.programs or known:
            figures = results["programs"][name] = measured(known[name], options.pairs, home)
            console.print(line(name, figures))
            save(results, options.output)
    for row in summary(results):
        console.print(row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
