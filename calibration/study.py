"""The regret study: how far decisions are from the best candidate, measured here and replayed over recorded hosts.

Measured: random problems off the grid; every candidate is timed, and the time of the one that autokern's policy chose
is compared with the best one's, beside what constants would have chosen (always where the data lies, always the CPU,
the CPU up to 128 or up to 2048 columns). Replayed: each trial of a recorded profile is decided from the other trials.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

import autokern
from autokern.bench.problems import random_problems
from autokern.bench.regret import Row, regret
from autokern.costs import CostModel
from autokern.dispatch import explain
from autokern.op import get, known
from autokern.policy import decide
from autokern.problem import Problem
from autokern.profile import Profile, Trial
from autokern.progress import display
from autokern.settings import Settings
from autokern.store import read_file

HERE = Path(__file__).parent
OPS = ("qr", "cholesky", "matmul", "kernel_matrix", "pinverse_root", "eigh")


def threshold(columns: float) -> Callable[[Problem], str]:
    """Return the rule of a constant: on the CPU up to so many columns, else where the data lies."""

    def rule(problem: Problem) -> str:
        return "cpu" if problem.n <= columns else "native"

    return rule


RULES: dict[str, Callable[[Problem], str]] = {
    "always where the data lies": threshold(0),
    "always the CPU": threshold(math.inf),
    "CPU up to 128 columns": threshold(128),
    "CPU up to 2048 columns": threshold(2048),
}


class Outcome(msgspec.Struct, frozen=True):
    """What one way of choosing came to: ratios are times over the best candidate's, or over stock's."""

    problems: int
    regret_geomean: float
    regret_p95: float
    slower_than_stock: float
    speedup: float


def outcome(pairs: Sequence[tuple[float, float]]) -> Outcome:
    """Summarise pairs of (time over best, time over stock)."""
    regrets = sorted(r for r, _ in pairs)
    count = len(pairs)
    return Outcome(
        problems=count,
        regret_geomean=math.exp(sum(map(math.log, regrets)) / count),
        regret_p95=regrets[min(count - 1, math.ceil(0.95 * count) - 1)],
        slower_than_stock=sum(s > 1.05 for _, s in pairs) / count,
        speedup=math.exp(-sum(math.log(s) for _, s in pairs) / count),
    )


def of_rule(rule: Callable[[Problem], str], rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Return what a rule would have cost; where it names no candidate of its own, stock does just what it says."""
    pairs = []
    for row in rows:
        ratio = row.ratios.get(rule(row.problem), row.ratios["stock"])
        pairs.append((ratio / row.ratios[row.best], ratio))
    return pairs


def measured(rows: Sequence[Row]) -> dict[str, Outcome]:
    """Return the outcome of autokern, over all and by op, and of each constant rule."""
    found = {"autokern": outcome([(r.regret, r.over_stock) for r in rows])}
    for name in sorted({r.problem.op for r in rows}):
        found[f"autokern, {name}"] = outcome([(r.regret, r.over_stock) for r in rows if r.problem.op == name])
    return found | {name: outcome(of_rule(rule, rows)) for name, rule in RULES.items()}


def replayed(profile: Profile, folds: int = 10) -> dict[str, Outcome]:
    """Decide each trial of a profile from the trials of the other folds, and return the outcomes by op."""
    trials = [t for t in profile.trials if known(t.problem.op) and "stock" in t.timings]
    pairs: dict[str, list[tuple[float, float]]] = {}
    for fold in range(folds):
        others = [t for i, t in enumerate(trials) if i % folds != fold]
        model = CostModel(msgspec.structs.replace(profile, trials=others))
        for trial in (t for i, t in enumerate(trials) if i % folds == fold):
            pairs.setdefault(trial.problem.op, []).append(_replay(trial, model))
    every = [pair for found in pairs.values() for pair in found]
    return {"autokern": outcome(every)} | {f"autokern, {op}": outcome(found) for op, found in sorted(pairs.items())}


def _replay(trial: Trial, model: CostModel) -> tuple[float, float]:
    """Return (over best, over stock) of the decision on a trial; a device that is not here counts as there."""
    op = get(trial.problem.op)
    excluded = frozenset(f"{op.name}={name}" for name in op.names() if name not in trial.usual)
    chosen = decide(trial.problem, op, model, Settings(exclude=excluded)).candidate
    ratios = {name: timing.ratio for name, timing in trial.usual.items()}
    return ratios.get(chosen, 1.0) / min(ratios.values()), ratios.get(chosen, 1.0)


def table(title: str, outcomes: dict[str, Outcome]) -> Table:
    """Return outcomes as a table for people."""
    shown = Table(title=title)
    shown.add_column("chosen by")
    for head in ("problems", "regret (geomean)", "regret (95 %)", "> 5 % slower than stock", "times stock's speed"):
        shown.add_column(head, justify="right")
    for name, o in outcomes.items():
        figures = (f"{o.regret_geomean:.3f}", f"{o.regret_p95:.3f}", f"{o.slower_than_stock:.1%}", f"{o.speedup:.2f}")
        shown.add_row(name, str(o.problems), *figures)
    return shown


def worst(rows: Sequence[Row], count: int = 12) -> Table:
    """Return the problems with the largest regret, so that a reader sees what went wrong."""
    shown = Table(title="largest regrets")
    for head in ("problem", "chosen", "best", "regret", "over stock"):
        shown.add_column(head)
    for row in sorted(rows, key=lambda r: -r.regret)[:count]:
        shown.add_row(str(row.problem), row.chosen, row.best, f"{row.regret:.2f}", f"{row.over_stock:.2f}")
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=320)
    parser.add_argument("--seconds", type=float, default=600.0, help="budget for measuring")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--devices", default="cpu", help="device kinds, or all")
    parser.add_argument("--replay-only", action="store_true", help="measure nothing, replay the recorded hosts")
    parser.add_argument("--output", type=Path, default=HERE / "study.json")
    arguments = parser.parse_args()
    console = Console()
    results: dict[str, dict[str, Outcome]] = {}
    rows: list[Row] = []
    for path in sorted((HERE / "hosts").glob("*.json")):
        results[f"replayed: {path.stem}"] = replayed(read_file(path))
    if not arguments.replay_only:
        names = arguments.ops.split(",")
        kinds = ("cpu", "cuda") if arguments.devices == "all" else tuple(arguments.devices.split(","))
        problems = [
            p
            for kind in kinds
            for p in random_problems(arguments.problems // len(kinds), arguments.seed, ops=names, device=kind)
        ]
        random.Random(arguments.seed).shuffle(problems)
        with display("measuring regret") as shown:
            deadline = time.perf_counter() + arguments.seconds
            rows = regret(problems, deadline, lambda p: explain(p).candidate, seconds=0.8, progress=shown)
        results["measured here"] = measured(rows)
    for name, outcomes in results.items():
        console.print(table(name, outcomes))
    if rows:
        console.print(worst(rows))
        document = {
            "host": autokern.profile().host,
            "outcomes": results,
            "rows": rows,
        }
        arguments.output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
