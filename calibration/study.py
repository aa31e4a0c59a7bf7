"""Candidates against each other: named studies, each timed in turns, in one file of figures, `study.json`.

`choices` times every candidate on problems off every grid and compares the one that autokern chooses with the best:
without a measurement, after quick and full calibrations, and by constants (`choices.py`); `product_regret` does so for
products of kernel matrices over a grid. `precision` compares lower precision with the fastest candidate that keeps the
bound. `products`, `scaling` and `peaks` live in `products.py`. A run of some studies leaves the figures of the others
as they are: each says when and where it was run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import choices
import documents
import msgspec
import products
import regret
import torch
from figures import console, table
from measuring import Report

import autokern
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.core.state import inside
from autokern.runtime.dispatch import explain
from autokern.system import host
from autokern.tuning import measuring as accuracy
from autokern.tuning import timer
from autokern.tuning.measuring import trial

HERE = Path(__file__).parent
JSON = HERE / "study.json"
DOCUMENT = HERE.parent / "docs" / "evidence.md"
PROBLEMS = 800
"""Problems of `choices`."""
MOST_TRUTH = 2**25
"""Elements up to which float64 truth is formed; larger problems are compared with the best that keeps the bound."""
HIDDEN = ("ratios", "noise", "failed")
"""What tables leave out."""

# --- the choice against the best --------------------------------------------------------------------------------------


def run_choices(device: str, seconds: float, report: Report) -> dict[str, Any]:
    """Compare ways of choosing with the best candidate, on problems off every grid."""
    return choices.run(device, seconds, PROBLEMS, report)


def product_problems(device: str) -> list[Problem]:
    """Return products whose matrix stock can hold, small ones first."""
    base = Problem(op="kernel_matmul", m=1, n=1, device=device, variant="rbf/same")
    kinds = [(d, t, "float32") for d in (1, 3, 10, 50, 200) for t in (1, products.COLUMNS, 64)]
    kinds += [(d, products.COLUMNS, "float64") for d in (1, 3, 10, 50, 200)]
    sizes = itertools.product((3000, 10_000, 30_000), kinds)
    return [base.replace(m=n, n=n, d=d, rhs=columns, dtype=dtype) for n, (d, columns, dtype) in sizes]


def run_product_regret(device: str, seconds: float, report: Report) -> dict[str, Any]:
    """Compare the choice with the best for products; compiled candidates take part where KeOps works."""
    options: dict[str, Any] = {"seconds": 2.0, "rounds": (3, 6), "compiles": not products.without_keops()}
    rows = regret.timed(product_problems(device), time.perf_counter() + seconds, **options)
    chosen = {row.problem: explain(row.problem).candidate for row in rows}
    found = [{"problem": msgspec.to_builtins(row.problem), "chosen": chosen[row.problem], "best": row.fastest,
              "seconds": row.seconds, "regret": row.regret(chosen[row.problem])} for row in rows]  # fmt: skip
    return {"summary": [choices.outcome("autokern", rows, chosen.__getitem__)], "rows": found}


# --- lower precision --------------------------------------------------------------------------------------------------


def precision_problems(device: str) -> list[Problem]:
    """Return products that no memory limits."""
    found = []
    large = 12000 if device == "cpu" else 60000
    for dtype in ("float64",) if device == "cpu" else ("float64", "float32"):
        base = Problem(op="kernel_matmul", m=4000, n=4000, d=10, rhs=11, dtype=dtype, device=device, variant="rbf/same")
        found += [base, base.replace(m=large, n=large), base.replace(d=50, variant="matern52/cross")]
        found.append(base.replace(grad="theta"))
    return found


def rougher(problem: Problem, seconds: float) -> list[dict[str, Any]]:
    """Time approximate candidates and the fastest exact one in turns, on one problem."""
    op, synchronize = get(problem.op), products.synchronizer(problem.device)
    room = 0.4 * host.available_memory(problem.device)
    able = [c for c in op.feasible(problem) if not c.compiles and c.memory(problem) < room]
    args = op.sample(problem, torch.Generator().manual_seed(5))
    calls = {c.name: trial(op, c.run, problem, args) for c in able}
    once = {name: min(timer.once(call, synchronize) for _ in range(2)) for name, call in calls.items()}
    rough = [c.name for c in able if c.accuracy == "approximate"]
    exact = [c.name for c in able if c.name not in rough]
    kept = min(exact, key=once.__getitem__)
    compared = {name: calls[name] for name in (kept, *rough)}
    found = timer.compare(compared, synchronize=synchronize, seconds=seconds, rounds=(5, 200))
    small = problem.batch * problem.m * problem.n <= MOST_TRUTH
    truth = accuracy.truth(op, problem, args) if small else calls[kept]()
    return [
        {
            "problem": msgspec.to_builtins(problem), "candidate": name, "seconds": timing.seconds,
            "speedup": 1 / timing.ratio, "memory": op[name].memory(problem),
            "relative_error": accuracy.relative_error(op, calls[name](), truth),
        }
        for name, timing in found.items()
    ]  # fmt: skip


def run_precision(device: str, seconds: float, report: Report) -> dict[str, Any]:
    """Compare approximate candidates with the best exact one: time, memory and measured error."""
    rows, problems = [], precision_problems(device)
    inside.active = True
    try:
        for problem in problems:
            rows += rougher(problem, seconds / len(problems))
            report(f"precision, {problem}: done")
    finally:
        inside.active = False
    return {"rows": rows}


def precision_table(figures: Mapping[str, Any]) -> str:
    cpu, last = figures["run"]["host"]["cpu"], None
    lines = [f"{cpu['model']}, {cpu['torch_threads']} threads:\n"]
    lines += ["| problem | candidate | ms | × | MiB | error |", "|---|---|---|---|---|---|"]
    for row in figures["rows"]:
        label, last = "" if row["problem"] == last else f"`{problem_of(row)}`", row["problem"]
        cells = label, row["candidate"], f"{1e3 * row['seconds']:.3g}", f"{row['speedup']:.2f}"
        lines.append(f"| {' | '.join(cells)} | {row['memory'] / 2**20:.0f} | {row['relative_error']:.0e} |")
    return "\n".join([*lines, ""])


def problem_of(row: Mapping[str, Any]) -> Problem:
    return msgspec.convert(row["problem"], Problem)


# --- files and the command line ---------------------------------------------------------------------------------------

STUDIES: dict[str, Callable[[str, float, Report], dict[str, Any]]] = {
    "choices": run_choices,
    "product_regret": run_product_regret,
    "products": products.run_products,
    "scaling": products.run_scaling,
    "peaks": products.run_peaks,
    "precision": run_precision,
}


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def write(results: Mapping[str, Any], path: Path) -> None:
    """Write all figures, each row on a line of its own."""
    fields = []
    for name, figures in results.items():
        lines = ",\n".join(f'    "{key}": {_lines(value)}' for key, value in figures.items())
        fields.append(f'  "{name}": {{\n{lines}\n  }}')
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n", encoding="utf-8")


def _lines(value: Any) -> str:
    if not (isinstance(value, list) and value and isinstance(value[0], dict)):
        return json.dumps(value, ensure_ascii=False)
    return "[\n" + ",\n".join(f"      {json.dumps(row, ensure_ascii=False)}" for row in value) + "\n    ]"


def show(name: str, figures: Mapping[str, Any]) -> None:
    """Print the summary of a study, or else its rows; and the rows with the largest regret."""
    if "summary" not in figures:
        console.print(_table(name, figures["rows"]))
    else:
        console.print(_table(name, figures["summary"]))
        worst = sorted(figures["rows"], key=lambda row: -row["regret"])[:12]
        console.print(_table(f"{name}, largest regrets", worst))


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    heads = [key for key in dict.fromkeys(itertools.chain(*rows)) if key not in HIDDEN]
    made = table(title, heads)
    for row in rows:
        named = isinstance(row.get("problem"), dict)
        shown = {**row, "problem": str(problem_of(row))} if named else row
        made.add_row(*(_cell(shown.get(head, "")) for head in heads))
    return made


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return "\n".join(f"{key} {_cell(item)}" for key, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; 0 is fine, 1 a table in the docs that is not that of the figures, 2 bad usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"any of {', '.join(STUDIES)}; default all")
    parser.add_argument("--device", default="cpu", help="cpu (default) or the kind of an accelerator")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each study, about")
    parser.add_argument("--output", type=Path, default=JSON)
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--docs", action="store_true", help="run nothing, write the tables into the docs")
    task.add_argument("--check", action="store_true", help="run nothing, exit 1 if those tables are out of date")
    options = parser.parse_args(arguments)
    results = read(options.output)
    if options.docs or options.check:
        blocks = {"precision": precision_table(results["precision"]), "choices": choices.document(results["choices"])}
        same = [documents.refresh(DOCUMENT, name, block, options.check) for name, block in blocks.items()]
        return int(options.check and not all(same))
    if unknown := sorted(set(options.studies) - set(STUDIES)):
        parser.error(f"unknown study {', '.join(unknown)}; known are {', '.join(STUDIES)}")
    names = [name for name in STUDIES if name in (options.studies or STUDIES)]
    if set(names) - {"choices"} and not any(trial.problem.op == "kernel_matmul" for trial in autokern.profile().trials):
        autokern.calibrate(level="full", budget=300.0)
    for name in names:
        date = datetime.now(timezone.utc).date().isoformat()
        run = {"date": date, "device": options.device, "host": host.current().fields}
        results[name] = {"run": run, **STUDIES[name](options.device, options.seconds, console.print)}
        write({one: results[one] for one in STUDIES if one in results}, options.output)
        show(name, results[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
