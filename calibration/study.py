"""Candidates against each other: named studies, each timed in turns, in one file of figures, `study.json`.

`regret` times every candidate on random problems off the grid and compares the one that autokern's policy chose with
the best, beside what constants would have chosen (always where the data lies, always the CPU, the CPU up to 128 or up
to 2048 columns); `product_regret` does so for products of kernel matrices over a grid. `replay` decides each trial of
a recorded host from the other trials. `precision` compares lower precision with the fastest candidate that keeps the
bound. `products`, `scaling` and `peaks` live in `products.py`. A run of some studies leaves the figures of the others
as they are: each says when and where it was run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import documents
import msgspec
import products
import torch
from figures import console, table
from measuring import Report, geomean

import autokern
from autokern.cli import bench
from autokern.core.feasibility import Feasibility
from autokern.core.op import inside
from autokern.core.problem import Problem
from autokern.core.registry import get, known
from autokern.core.settings import Settings
from autokern.runtime.dispatch import explain
from autokern.system import host
from autokern.tuning import accuracy, timer
from autokern.tuning.cost_model import CostModel
from autokern.tuning.policy import decide
from autokern.tuning.profile import Profile, Trial
from autokern.tuning.store import read_file
from autokern.tuning.trial import trial

HERE = Path(__file__).parent
JSON = HERE / "study.json"
DOCUMENT = HERE.parent / "docs" / "how-it-decides.md"
OPS = ("qr", "cholesky", "matmul", "kernel_matrix", "pinverse_root", "eigh")
PROBLEMS, SEED = 320, 1
MOST_TRUTH = 2**25
"""Elements up to which float64 truth is formed; larger problems are compared with the best that keeps the bound."""
HIDDEN = ("ratios", "noise", "failed")
"""What tables leave out."""

RULES = {
    "always where the data lies": 0,
    "always the CPU": math.inf,
    "CPU up to 128 columns": 128,
    "CPU up to 2048 columns": 2048,
}
"""Rules by a constant: on the CPU up to so many columns, else where the data lies."""

# --- the choice against the best --------------------------------------------------------------------------------------


def outcome(by: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Summarise pairs of (time over best, time over stock) of one way of choosing."""
    regrets, stock = sorted(r for r, _ in pairs), [s for _, s in pairs]
    return {
        "by": by, "problems": len(pairs), "regret_geomean": geomean(regrets),
        "regret_p95": regrets[math.ceil(0.95 * len(pairs)) - 1],
        "slower_than_stock": sum(s > 1.05 for s in stock) / len(pairs), "speedup": 1 / geomean(stock),
    }  # fmt: skip


def by_op(pairs: Mapping[str, Sequence[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Return the outcome of autokern, over all and by op."""
    every = outcome("autokern", list(itertools.chain(*pairs.values())))
    return [every, *(outcome(f"autokern, {op}", found) for op, found in sorted(pairs.items()))]


def measured(rows: Sequence[bench.Row]) -> list[dict[str, Any]]:
    """Return the outcome of autokern, and of each constant; a rule without a candidate means stock."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        pairs.setdefault(row.problem.op, []).append((row.regret, row.over_stock))
    found = by_op(pairs)
    for name, columns in RULES.items():
        picks = ["cpu" if row.problem.n <= columns else "native" for row in rows]
        ratios = [row.ratios.get(pick, row.ratios["stock"]) for pick, row in zip(picks, rows, strict=True)]
        over_best = [ratio / row.ratios[row.best] for ratio, row in zip(ratios, rows, strict=True)]
        found.append(outcome(name, list(zip(over_best, ratios, strict=True))))
    return found


def judged(problems: Sequence[Problem], most: float, report: Report, **options: Any) -> list[bench.Row]:
    """Time all candidates of the problems for which `most` seconds last."""
    rows = bench.regret(problems, time.perf_counter() + most, lambda p: explain(p).candidate, **options)
    report(f"regret: {len(rows)} of {len(problems)} problems")
    return rows


def run_regret(device: str, seconds: float, report: Report) -> dict[str, Any]:
    """Compare the choice with the best on random problems; with an accelerator, of data there and on the CPU."""
    kinds = tuple(dict.fromkeys(("cpu", device)))
    found = [bench.random_problems(PROBLEMS // len(kinds), SEED, ops=OPS, device=kind) for kind in kinds]
    problems = list(itertools.chain(*found))
    random.Random(SEED).shuffle(problems)
    rows = judged(problems, seconds, report, seconds=0.8)
    return {"summary": measured(rows), "rows": msgspec.to_builtins(rows)}


def product_problems(device: str) -> list[Problem]:
    """Return products whose matrix stock can hold, small ones first."""
    base = Problem(op="kernel_matmul", m=1, n=1, device=device, variant="rbf/same")
    kinds = [(d, t, "float32") for d in (1, 3, 10, 50, 200) for t in (1, products.COLUMNS, 64)]
    kinds += [(d, products.COLUMNS, "float64") for d in (1, 3, 10, 50, 200)]
    sizes = itertools.product((3000, 10_000, 30_000), kinds)
    return [base.replace(m=n, n=n, d=d, rhs=columns, dtype=dtype) for n, (d, columns, dtype) in sizes]


def run_product_regret(device: str, seconds: float, report: Report) -> dict[str, Any]:
    """Compare the choice with the best for products; compiled candidates take part where KeOps works."""
    options = {"seconds": 4.0, "rounds": (3, 9), "compiles": not products.without_keops()}
    rows = judged(product_problems(device), seconds, report, **options)
    summary = by_op({"kernel_matmul": [(row.regret, row.over_stock) for row in rows]})
    return {"summary": summary, "rows": msgspec.to_builtins(rows)}


def replayed(profile: Profile, folds: int = 10) -> list[dict[str, Any]]:
    """Decide each trial of a profile from the trials of the other folds; return the outcomes by op."""
    trials = [t for t in profile.trials if known(t.problem.op) and "stock" in t.timings]
    pairs: dict[str, list[tuple[float, float]]] = {}
    for fold in range(folds):
        others = [t for i, t in enumerate(trials) if i % folds != fold]
        model = CostModel(msgspec.structs.replace(profile, trials=others))
        for held in trials[fold::folds]:
            pairs.setdefault(held.problem.op, []).append(_replay(held, model))
    return by_op(pairs)


def _replay(trial: Trial, model: CostModel) -> tuple[float, float]:
    """Return (over best, over stock) of the decision on a trial; a device that is not here counts as there."""
    op = get(trial.problem.op)
    excluded = frozenset(f"{op.name}={name}" for name in op.names() if name not in trial.usual)
    chosen = decide(Feasibility(op, trial.problem, recorded=True), model, Settings(exclude=excluded)).candidate
    ratios = {name: timing.ratio for name, timing in trial.usual.items()}
    return ratios.get(chosen, 1.0) / min(ratios.values()), ratios.get(chosen, 1.0)


def run_replay(device: str, seconds: float, report: Report) -> dict[str, Any]:
    hosts = sorted((HERE / "hosts").glob("*.json"))
    return {"rows": [{"recorded": path.stem, **row} for path in hosts for row in replayed(read_file(path))]}


# --- lower precision --------------------------------------------------------------------------------------------------


def precision_problems(device: str) -> list[Problem]:
    """Return products that no memory limits, and the ops of a training step."""
    found = []
    large = 12000 if device == "cpu" else 60000
    for dtype in ("float64",) if device == "cpu" else ("float64", "float32"):
        base = Problem(op="kernel_matmul", m=4000, n=4000, d=10, rhs=11, dtype=dtype, device=device, variant="rbf/same")
        found += [base, base.replace(m=large, n=large), base.replace(d=50, variant="matern52/cross")]
        found.append(base.replace(grad="theta"))
    for n in (300, 1000, 2500, 5000):
        variant = "cholesky" if n <= 800 else "cg"
        one = Problem(op="exact_log_prob", m=n, n=n, d=8, device=device, grad="theta", variant=f"matern52/{variant}")
        found += [one, one.replace(op="inv_quad_logdet", d=0, rhs=1, grad="a", variant=variant)]
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
    exact = [c.name for c in able if c.name not in rough and not (c.as_stock and "cg" in problem.words)]
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
    "replay": run_replay,
    "regret": run_regret,
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
        shown = {**row, "problem": str(problem_of(row))} if "problem" in row else row
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
    task.add_argument("--docs", action="store_true", help="run nothing, write the table of `precision` into the docs")
    task.add_argument("--check", action="store_true", help="run nothing, exit 1 if that table is out of date")
    options = parser.parse_args(arguments)
    results = read(options.output)
    if options.docs or options.check:
        same = documents.refresh(DOCUMENT, "precision", precision_table(results["precision"]), options.check)
        return int(options.check and not same)
    if unknown := sorted(set(options.studies) - set(STUDIES)):
        parser.error(f"unknown study {', '.join(unknown)}; known are {', '.join(STUDIES)}")
    names = [name for name in STUDIES if name in (options.studies or STUDIES)]
    if set(names) - {"replay"} and not any(trial.problem.op == "kernel_matmul" for trial in autokern.profile().trials):
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
