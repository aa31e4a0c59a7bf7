"""Choices against the best: problems off every grid, each timed in two halves, and several ways of choosing.

Half of the problems are drawn (sizes log-uniform), half are those that the programs in `whole/` asked, with sizes moved
by up to a fifth (`recorded_problems.json`). The best candidate is picked in one half of the rounds and timed in the
other; stock under a second name is the noise floor. What other hosts recorded serves as the prior with this machine,
and every machine like it, left out.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from autokern.tuning.cost_model import CostModel, Kin, KinOf, alone
from autokern.tuning.prefitted import Prefitted
from measuring import Report

from autokern.cli.bench import regret
from autokern.core.feasibility import Feasibility
from autokern.core.problem import Problem
from autokern.core.registry import get, known, registered
from autokern.core.settings import Settings
from autokern.hooks import install
from autokern.runtime import dispatch, learning
from autokern.system import host
from autokern.tuning import kin, recorded, workload
from autokern.tuning.calibration import calibrate
from autokern.tuning.drawing import contenders, random_problems
from autokern.tuning.policy import decide
from autokern.tuning.profile import Profile
from autokern.tuning.store import read_file

HERE = Path(__file__).parent
RECORDED = HERE / "recorded_problems.json"
SEED = 2024
LEVELS = {"quick": 20.0, "full": 300.0}
"""Seconds of the documented commands; less where the study itself has less than twice as many."""
SAME = 0.9
"""Likeness from which a recorded host is left out as the same machine."""
RULES = {
    "always where the data lies": 0,
    "always the CPU": math.inf,
    "CPU up to 128 columns": 128,
    "CPU up to 2048 columns": 2048,
}
"""Rules by a constant: on the CPU up to so many columns, else where the data lies."""
ROUNDS = (8, 24)
LOOSE = "where stock iterates, beside exact candidates"
MOST_CALLS = 60
"""Calls of a problem in which learning comes to its end."""

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
    for problem in workload.read(RECORDED).calls:
        if known(problem.op):
            ops.setdefault(problem.op, []).append(problem)
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
    drawn = random_problems(count - len(of_programs), SEED, ops=names, device=device, flops=1e10)
    found = [*filter(is_itself, drawn), *of_programs]
    chance.shuffle(found)
    return found


def chooser(model: CostModel) -> Choose:
    """Return the choice of the policy, given a cost model."""
    return lambda problem: decide(Feasibility(get(problem.op), problem), model, Settings()).candidate


def by_rule(columns: float) -> Choose:
    """Return the choice by a constant; where there is no such candidate, stock."""

    def choose(problem: Problem) -> str:
        name = "cpu" if problem.n <= columns else "native"
        return name if name in get(problem.op).names() else "stock"

    return choose


@functools.cache
def left_out(device: str) -> list[Kin]:
    """Return the recorded hosts but this one and those like it."""
    here, found = host.current().fields, []
    for shipped in recorded.hosts():
        alike = kin.likeness(here, shipped.fields, device)
        if kin.LEAST <= alike < SAME:
            found.append(Kin(Prefitted(shipped), alike))
    return found


def measured(level: str, seconds: float, device: str, others: KinOf) -> Profile:
    """Calibrate from nothing, as `autokern calibrate` does, with some other hosts as the prior."""
    with install.enabled():
        here = dispatch.session()
        options: dict[str, Any] = {"kin": others, "publish": here.adopt}
        return calibrate(registered(), level, seconds, [device], Profile(), **options)


def used(rows: Sequence[regret.Row], model: CostModel) -> dict[Problem, str]:
    """Return what runs after each problem was called until nothing more is learnt, as if it had been used for long."""
    shares, chosen = {name: getattr(learning, name) for name in ("_OF_CASE", "_OF_PROCESS")}, {}
    for name in shares:
        setattr(learning, name, math.inf)
    try:
        with install.enabled():
            here = dispatch.reset(Settings(calls=1))  # nothing is compiled, as in `timed`
            here._model = model
            for row in rows:
                op, problem = get(row.problem.op), row.problem
                args, call = op.sample(problem, torch.Generator().manual_seed(99)), dispatch.route(op)
                with torch.set_grad_enabled(bool(problem.grad)):
                    for _ in range(MOST_CALLS):
                        call(*args)
                        entry = next(e for e in reversed(here.memo[op.name].values()) if e.decision.problem == problem)
                        if entry.due > entry.count + MOST_CALLS:
                            break
                chosen[problem] = entry.candidate.name
    finally:
        for name, share in shares.items():
            setattr(learning, name, share)
    return chosen


def outcome(by: str, rows: Sequence[regret.Row], choose: Choose) -> dict[str, Any]:
    """Return the verdict on a way of choosing as a row of a table."""
    return {"by": by, **msgspec.to_builtins(regret.verdict(rows, choose))}


def run(device: str, seconds: float, count: int, report: Report) -> dict[str, Any]:
    """Measure quick and full calibrations, then every problem, and judge each way of choosing on the same timings."""
    others: KinOf = left_out
    models = {"no measurement, no other host": CostModel(Profile()), "no measurement": CostModel(Profile(), others)}
    for level, limit in LEVELS.items():
        profile = measured(level, min(limit, max(seconds / 2, 1.0)), device, others)
        models[f"calibrate --{level}"] = CostModel(profile, others)
        report(f"calibrate --{level}: {len(profile.trials)} problems")
    chosen = problems(count, device)
    rows = regret.timed(chosen, time.perf_counter() + seconds, seconds=1.0, rounds=ROUNDS)
    report(f"{len(rows)} of {len(chosen)} problems timed")
    ways: dict[str, Choose] = {"stock": lambda problem: "stock"}
    ways |= {name: by_rule(columns) for name, columns in RULES.items()}
    ways |= {name: chooser(model) for name, model in models.items()}
    learnt = used(rows, models[f"calibrate --{list(LEVELS)[-1]}"])
    report("used for long")
    ways["after use"] = learnt.__getitem__
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
    """Return how well the recorded hosts predict each other: each left out in turn, judged by its own recording."""
    found, shipped = [], recorded.hosts()
    for path in sorted((HERE / "hosts").glob("*.json")):
        profile = read_file(path)
        others = [h for h in shipped if kin.likeness(profile.host, h.fields) < SAME]
        pairs = [Kin(Prefitted(h), kin.likeness(profile.host, h.fields)) for h in others]
        model = CostModel(Profile(), (lambda device, pairs=pairs: pairs) if pairs else alone)
        rows = [
            regret.Row(
                problem=t.problem,
                seconds=t.timings["stock"].seconds,
                ratios={name: (timing.ratio, timing.ratio) for name, timing in t.usual.items()},
            )
            for t in profile.trials
            if "stock" in t.timings and len(t.usual) > 1 and known(t.problem.op)
        ]
        tight, _ = regret.apart(rows)
        found.append(outcome(f"{path.stem} left out, on its own recording", tight, _recorded(model, tight)))
    return found


def _recorded(model: CostModel, rows: Sequence[regret.Row]) -> Choose:
    """Return the choice among the candidates that a recording has."""
    there = {row.problem: row.ratios for row in rows}

    def choose(problem: Problem) -> str:
        op = get(problem.op)
        excluded = frozenset(f"{op.name}={name}" for name in op.names() if name not in there[problem])
        return decide(Feasibility(op, problem), model, Settings(exclude=excluded)).candidate

    return choose


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
