"""Choices against the best: problems off every grid, each timed in two halves, and several ways of choosing.

Half of the problems are drawn (sizes log-uniform), half are those that the programs in `whole/` asked, with sizes moved
by up to a fifth (`recorded_problems.json`). The best candidate is picked in one half of the rounds and timed in the
other; stock under a second name is the noise floor. The shipped choices are those of other hosts: this machine's own
recording is left out.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import regret
import ship
import torch
from measuring import Report

from autokern.cli import summary
from autokern.core.problem import Feasibility, Problem
from autokern.core.registry import get, known, registered
from autokern.core.settings import Settings
from autokern.hooks import install
from autokern.runtime import dispatch
from autokern.system import host
from autokern.tuning import chooser as choosers
from autokern.tuning.calibration import calibrate
from autokern.tuning.chooser import Chooser, Shipped
from autokern.tuning.forest import Forest, fit_own
from autokern.tuning.measuring import contenders
from autokern.tuning.policy import decide
from autokern.tuning.profile import Profile, Trial, pools
from autokern.tuning.store import read_file

HERE = Path(__file__).parent
RECORDED = HERE / "recorded_problems.json"
SEED = 2024
LEVELS = {"quick": 20.0, "full": 300.0}
"""Seconds of the documented commands; less where the study itself has less than twice as many."""
RULES = {
    "always where the data lies": 0,
    "always the CPU": math.inf,
    "CPU up to 128 columns": 128,
    "CPU up to 2048 columns": 2048,
}
"""Rules by a constant: on the CPU up to so many columns, else where the data lies."""
ROUNDS = (8, 24)
LOOSE = "where stock iterates, beside exact candidates"
FOLDS = 5
"""Parts of a host's trials, each of which is judged by trees that were fitted to the others."""

Choose = Callable[[Problem], str]


def moved(problem: Problem, chance: random.Random) -> Problem:
    """Return a problem of nearly the same sizes, square where it was."""
    factor = {name: math.exp(chance.uniform(-0.2, 0.2)) for name in ("m", "n")}
    if problem.m == problem.n:
        factor["m"] = factor["n"]
    return problem.replace(**{name: max(1, round(getattr(problem, name) * by)) for name, by in factor.items()})


def asked(count: int, chance: random.Random) -> list[Problem]:
    """Return problems that programs asked, in equal parts by op, moved off their sizes."""
    ops: dict[str, list[Problem]] = {}
    for kind in msgspec.json.decode(RECORDED.read_bytes())["asked"]:
        rest = {name: value for name, value in kind.items() if name != "sizes"}
        for *sizes, _ in kind["sizes"]:
            if known(kind["op"]):
                named = dict(zip(("m", "n", "d", "rhs", "batch"), sizes, strict=True))
                ops.setdefault(kind["op"], []).append(Problem(**rest, **named))
    found: dict[Problem, None] = {}
    for attempt in range(20 * count):
        problem = moved(chance.choice(ops[sorted(ops)[attempt % len(ops)]]), chance)
        with contextlib.suppress(ValueError):
            if len(contenders(problem)) > 1 and is_itself(problem):
                found[problem] = None
        if len(found) == count:
            break
    return list(found)


def is_itself(problem: Problem) -> bool:
    """Whether a call with samples of a problem asks that problem; moved off its size, it may have crossed a limit."""
    op = get(problem.op)
    try:
        args = op.sample(problem, torch.Generator().manual_seed(0))
    except (KeyError, ValueError, MemoryError):
        return False
    with torch.set_grad_enabled(bool(problem.grad)):
        return op.problem_of(*args) == problem


def problems(count: int, device: str) -> list[Problem]:
    """Return the problems of a study, half of them drawn and, on a CPU, half asked by programs."""
    chance = random.Random(SEED)
    of_programs = asked(count // 2, chance) if device == "cpu" else []
    names = [op.name for op in registered()]
    drawn = regret.random_problems(count - len(of_programs), SEED, ops=names, device=device, most=(1e10, 1e9))
    found = [*filter(is_itself, drawn), *of_programs]
    chance.shuffle(found)
    return found


def choose_by(chooser: Chooser) -> Choose:
    """Return the choice of the policy by what is known."""
    return lambda problem: decide(Feasibility(get(problem.op), problem), chooser, Settings()).candidate


def by_rule(columns: float) -> Choose:
    """Return the choice by a constant; where there is no such candidate, stock."""

    def choose(problem: Problem) -> str:
        name = "cpu" if problem.n <= columns else "native"
        return name if name in get(problem.op).names() else "stock"

    return choose


@contextlib.contextmanager
def shipping(without: str, fields: Mapping[str, Any] | None = None) -> Iterator[dict[str, Forest]]:
    """Let the package ship what it would without one of the recorded hosts; return the trees for a machine."""
    data = ship.packed(without)
    found, before = msgspec.msgpack.decode(data, type=Shipped), choosers.recorded
    choosers.recorded = lambda: found  # type: ignore[assignment]
    try:
        yield found.told(fields or host.current().fields).forests
    finally:
        choosers.recorded = before


def this_machine() -> str:
    """Return the name of the recorded host that is this machine; empty for none."""
    here = host.current().fields["cpu"]
    for path in (HERE / "hosts").glob("*.json"):
        there = read_file(path).host["cpu"]
        if all(here.get(name) == there.get(name) for name in ("numbers", "capability", "threads")):
            return path.stem
    return ""


def measured(level: str, seconds: float, device: str) -> Profile:
    """Calibrate from nothing, as `autokern calibrate` does."""
    with install.enabled():
        return calibrate(registered(), level, seconds, [device], Profile(), publish=dispatch.session().adopt)


def outcome(by: str, rows: Sequence[regret.Row], choose: Choose) -> dict[str, Any]:
    """Return the verdict on a way of choosing as a row of a table."""
    return {"by": by, **msgspec.to_builtins(regret.verdict(rows, choose))}


def run(device: str, seconds: float, count: int, report: Report) -> dict[str, Any]:
    """Measure quick and full calibrations, then every problem, and judge each way of choosing on the same timings."""
    with shipping(this_machine()) as forests:
        known = {"no measurement, no other host": Chooser(Profile(), {}), "no measurement": Chooser(Profile(), forests)}
        for level, limit in LEVELS.items():
            profile = measured(level, min(limit, max(seconds / 2, 1.0)), device)
            known[f"calibrate --{level}"] = Chooser(profile, forests)
            report(f"calibrate --{level}: {len(profile.trials)} problems")
        chosen = problems(count, device)
        rows = regret.timed(chosen, time.perf_counter() + seconds, seconds=1.0, rounds=ROUNDS)
    report(f"{len(rows)} of {len(chosen)} problems timed")
    ways: dict[str, Choose] = {"stock": lambda problem: "stock"}
    ways |= {name: by_rule(columns) for name, columns in RULES.items()}
    ways |= {name: choose_by(chooser) for name, chooser in known.items()}
    tight, loose = regret.apart(rows)
    found = [outcome(name, tight, choose) for name, choose in ways.items()]
    found.append({"by": "noise: stock under another name", **msgspec.to_builtins(regret.noise_floor(tight))})
    full = f"calibrate --{list(LEVELS)[-1]}"
    if any(row.seconds >= regret.LEAST for row in loose):
        found.append(outcome(f"{full}, {LOOSE}", loose, ways[full]))
    ops = sorted({row.problem.op for row in tight if row.seconds >= regret.LEAST})
    found += [outcome(f"the same, {op}", [row for row in tight if row.problem.op == op], ways[full]) for op in ops]
    return {"summary": found + replayed(), "rows": [shown(row, ways) for row in rows if row.seconds >= regret.LEAST]}


def shown(row: regret.Row, ways: Mapping[str, Choose]) -> dict[str, Any]:
    """Return a problem, its best candidate, and the choices that lose more than a twentieth to it."""
    lost = {name: choose(row.problem) for name, choose in ways.items() if name not in RULES and name != "stock"}
    worse = {name: [c, round(cost, 3)] for name, c in lost.items() if (cost := regret.lost(row, c)) > 1.05}
    regrets = max((cost for _, cost in worse.values()), default=1.0)
    return {"problem": str(row.problem), "seconds": row.seconds, "best": row.fastest, "lost": worse, "regret": regrets}


def replayed() -> list[dict[str, Any]]:
    """Return how well the others predict each recorded host, alone and with its own trials, a fifth never seen."""
    found = []
    for path in sorted((HERE / "hosts").glob("*.json")):
        profile = read_file(path)
        trials = [
            t
            for t in summary.present(profile).trials
            if "stock" in t.timings and len(t.usual) > 1 and t.problem.op not in ship.NESTED
        ]
        with shipping(path.stem, profile.host) as forests:
            alone = Chooser(Profile(host=profile.host), forests)
            found.append(_judged(f"{path.stem} left out, on its own recording", trials, lambda _, a=alone: a))
            parts = [_by_others(trials, fold, forests, profile.host) for fold in range(FOLDS)]
            fold_of = {trial.problem: fold for fold in range(FOLDS) for trial in trials[fold::FOLDS]}
            name = f"{path.stem}, by the others and four fifths of its own trials"
            found.append(_judged(name, trials, lambda problem, p=parts, f=fold_of: p[f[problem]]))
    return found


def _by_others(trials: Sequence[Trial], fold: int, forests: Mapping[str, Forest], fields: dict[str, Any]) -> Chooser:
    """Return what chooses by all parts of a host's trials but one."""
    groups = pools(trial for index, trial in enumerate(trials) if index % FOLDS != fold)
    own = {key: fit_own(get(key.partition("@")[0]), of, forests.get(key)) for key, of in groups.items()}
    fitted = {key: forest for key, forest in own.items() if forest is not None}
    return Chooser(Profile(host=fields, forests=fitted), forests)


def _judged(name: str, trials: Sequence[Trial], chooser: Callable[[Problem], Chooser]) -> dict[str, Any]:
    """Return the verdict on recorded trials, among the candidates that each of them has."""
    rows = [
        regret.Row(
            problem=t.problem,
            seconds=t.timings["stock"].seconds,
            ratios={name: (timing.ratio, timing.ratio) for name, timing in t.usual.items()},
        )
        for t in trials
    ]
    there = {row.problem: row.ratios for row in rows}

    def choose(problem: Problem) -> str:
        op = get(problem.op)
        excluded = frozenset(f"{op.name}={name}" for name in op.names() if name not in there[problem])
        return decide(Feasibility(op, problem), chooser(problem), Settings(exclude=excluded)).candidate

    tight, _ = regret.apart(rows)
    return outcome(name, tight, choose)


def document(figures: Mapping[str, Any]) -> str:
    """Return the table of the ways of choosing for the docs."""
    run = figures["run"]
    lines = [f"{run['host']['cpu']['model']}, {run['host']['cpu']['torch_threads']} threads, {run['date']}:\n"]
    lines += ["| choice | problems | regret, geomean | 95th percentile | slower than stock by > 5 % | × stock |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in figures["summary"]:
        if not row["by"].startswith("the same, "):
            cells = f"{row['regret_geomean']:.3f}", f"{row['regret_p95']:.2f}", f"{100 * row['slower_share']:.1f} %"
            lines.append(f"| {row['by']} | {row['problems']} | {' | '.join(cells)} | {row['speedup']:.2f} |")
    return "\n".join([*lines, ""])
