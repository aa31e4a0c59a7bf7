"""Products of kernel matrices with few columns, from sizes where the matrix fits to those where it has no place.

`main` times KeOps, the matrix itself and every candidate at one size in turn, and compares them with a floor; `regret`
the choice with the best candidate over sizes, dimensions and columns; `scaling` looks at the dispatched product over
n², `memory` at its peak in fresh processes. Writes `products.json`; a run of some sections keeps the others if host,
versions and scale are the same. May import `product_runs`, `figures` and `figures`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from figures import KERNELS, brief, console, duration, plain, table
from product_runs import ACCELERATOR, FULL, QUICK, SECTIONS
from rich.table import Table

import autokern

JSON_NAME = "products.json"
TARGET = {"scaling": 0.15, "mebibytes": 100}


def describe(quick: bool, device: str) -> dict[str, Any]:
    """Return when, on what and with which versions a run was made."""
    libraries = ("torch", "gpytorch", "linear_operator", "pykeops")
    installed = {found.metadata["Name"].lower().replace("-", "_") for found in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in libraries if name in installed}
    return {
        "schema": 1,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "quick": quick,
        "device": device,
        "host": autokern.profile().host,
        "versions": {"python": platform.python_version(), **versions},
    }


def main_table(figures: Mapping[str, Any]) -> Table:
    """Return every way of every case: seconds, and as ratios to KeOps, the matrix, and the floor."""
    n, notes = (
        figures["n"],
        "symmetric, the floor evaluates half of the tiles and multiplies all; ½ is half of everything",
    )
    heads = ("kernel", "d", "dtype", "points", "by", "time", "KeOps", "the matrix", "over the floor", "over ½")
    made = table(
        f"n = {n:,}, {figures['columns']} columns; times as fast as KeOps and the matrix", heads, notes, left=5
    )
    for case in figures["cases"]:
        seconds, floor = case["seconds"], case["floor"]
        names = KERNELS[case["family"]], str(case["d"]), case["dtype"], "same" if case["same"] else "others"
        for way, taken in sorted(seconds.items(), key=lambda item: -item[1]):
            against = [
                f"{seconds[other] / taken:.2f}×" if other in seconds else "–" for other in ("KeOps", "the matrix")
            ]
            over = f"{taken / floor['seconds']:.2f}", f"{taken / floor['half']:.2f}" if case["same"] else ""
            mark = " (chosen)" if way == case["chosen"] else ""
            made.add_row(*names, way + mark, duration(taken), *against, *over)
        pieces = ", ".join(f"{name} {1e9 * floor[name]:.3f}" for name in ("exp", "distance", "product"))
        made.add_row(*names, f"floor: {pieces} ns", duration(floor["seconds"]), "", "", "", "", end_section=True)
    return made


def regret_table(figures: Mapping[str, Any]) -> Table:
    """Return the choice and the best for each problem."""
    summary, skipped = figures["summary"], figures["skipped"]
    note = f"{len(skipped)} left out as too long" if skipped else ""
    title = (
        f"regret of {summary['problems']} problems: geomean {summary['geomean']:.3f}, 95 % {summary['p95']:.3f}, "
        f"worst {summary['worst']:.3f}"
    )
    made = table(title, ("n", "d", "columns", "dtype", "chosen", "best", "time", "regret"), note)
    for row in figures["rows"]:
        sizes = (f"{row['n']:,}", str(row["d"]), str(row["columns"]), row["dtype"])
        made.add_row(
            *sizes, row["chosen"], row["best"], duration(row["seconds"][row["chosen"]]), f"{row['regret']:.3f}"
        )
    return made


def scaling_table(figures: Mapping[str, Any]) -> Table:
    """Return time over n² for each size."""
    title = f"d = {figures['d']}, {figures['columns']} columns, {figures['dtype']}: time over n²"
    far = max(abs(row["ratio"] - 1) for row in figures["rows"])
    made = table(
        title, ("n", "by", "time", "over n²", "over the median"), f"farthest {far:.0%}, target {TARGET['scaling']:.0%}"
    )
    for row in figures["rows"]:
        cells = duration(row["seconds"]), f"{1e9 * row['each']:.3f} ns", f"{row['ratio']:.2f}"
        made.add_row(f"{row['n']:,}", row["chosen"], *cells)
    return made


def memory_table(figures: Mapping[str, Any]) -> Table:
    """Return the peak of each process, or why there is none."""
    title = f"d = {figures['d']}, {figures['columns']} columns: peak above what goes in and comes out"
    made = table(title, ("n", "dtype", "gradients", "time", "peak"), f"target {TARGET['mebibytes']} MiB")
    for row in figures["rows"]:
        found = (
            (row["failed"], "") if "failed" in row else (duration(row["seconds"]), f"{row['bytes'] / 2**20:.0f} MiB")
        )
        made.add_row(f"{row['n']:,}", row["dtype"], "yes" if row["gradients"] else "no", *found)
    return made


TABLES = {"main": main_table, "regret": regret_table, "scaling": scaling_table, "memory": memory_table}


def tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the table of every section that was run."""
    for name, made in TABLES.items():
        if results.get(name):
            yield made(results[name])


def kept(path: Path, results: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the other sections of an earlier run, if it was like this one."""
    if not path.exists():
        return {}
    earlier, now = json.loads(path.read_text(encoding="utf-8")), plain(results)
    unlike = [key for key in ("schema", "device", "host", "versions", "quick") if earlier.get(key) != now[key]]
    others = {name: earlier[name] for name in SECTIONS if name in earlier and name not in names}
    if others and unlike:
        console.print(f"{path.name} loses {', '.join(others)}: other {', '.join(unlike)} than in this run")
        return {}
    return others


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; 0 is fine, 2 bad usage."""
    parser = argparse.ArgumentParser(description="Compare ways to multiply kernel matrices with few columns.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that all of it works")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"any of {', '.join(SECTIONS)}; default all")
    parser.add_argument("--device", default="cpu", help="where; an accelerator gets larger sizes")
    parser.add_argument("--regret-seconds", type=float, help="after which no further problem of `regret` is begun")
    parser.add_argument("--families", help="those of `main`, by commas (default rbf,matern52)")
    parser.add_argument("--seconds", type=float, help="after which a case of `main` begins no further round")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / JSON_NAME)
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.sections.split(",")) - set(SECTIONS)):
        parser.error(f"unknown section {', '.join(unknown)}; known are {', '.join(SECTIONS)}")
    names = [name for name in SECTIONS if name in options.sections.split(",")]
    scale = QUICK if options.quick else FULL if options.device == "cpu" else ACCELERATOR
    if options.regret_seconds is not None:
        scale = dataclasses.replace(scale, deadline=options.regret_seconds)
    if options.families is not None:
        scale = dataclasses.replace(scale, families=tuple(options.families.split(",")))
    if options.seconds is not None:
        scale = dataclasses.replace(scale, seconds=options.seconds)
    if not options.quick and not any(trial.problem.op == "kernel_matmul" for trial in autokern.profile().trials):
        autokern.calibrate(["kernel_matmul"], level="full", budget=120.0)
    results = describe(options.quick, options.device)
    found = kept(options.output, results, names)
    for name in names:
        found[name] = {"date": results["date"], **SECTIONS[name](scale, options.device, console.print)}
        document = {**results, **{one: found[one] for one in SECTIONS if one in found}}
        options.output.write_text(json.dumps(brief(plain(document)), indent=1, ensure_ascii=False) + "\n", "utf-8")
    for made in tables(found):
        console.print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
