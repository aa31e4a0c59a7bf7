"""The measurements of `products.py`: one function for each section, and how much a run does.

May import `contenders`, `children` and `measuring`.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import contenders
import torch
from children import Peak, in_child
from contenders import case, floor_of, floor_pieces, interleaved
from measuring import geomean

import autokern
from autokern import budget, host
from autokern.bench.problems import contenders as candidates_for
from autokern.dispatch import explain
from autokern.op import Op, get, inside
from autokern.problem import Problem
from autokern.timer import compare

DTYPES = {"float32": torch.float32, "float64": torch.float64}
COLUMNS = 11
Report = Callable[[str], None]


@dataclass(frozen=True)
class Scale:
    """How much one run does, whether ways take part that are compiled first, and seconds that a short one is called."""

    compiled: bool = True
    least: float = 0.02
    # main: size, dimensions, kernels and dtypes, when to begin no further case, and rounds: as many as fit into so many
    # seconds for each case
    n: int = 20_000
    d: tuple[int, ...] = (10,)
    families: tuple[str, ...] = ("rbf", "matern52")
    dtypes: tuple[str, ...] = ("float32", "float64")
    enough: float = math.inf
    rounds: int = 9
    seconds: float = 40.0
    # regret: sizes, dimensions, columns; longest call, and when to stop
    sizes: tuple[int, ...] = (3000, 10_000, 30_000, 100_000)
    dimensions: tuple[int, ...] = (1, 3, 10, 50, 200)
    columns: tuple[int, ...] = (1, 11, 64)
    bound: float = 60.0
    deadline: float = 2400.0
    # scaling
    grown: tuple[int, ...] = (3000, 5000, 10_000, 20_000, 30_000, 50_000, 100_000)
    turns: int = 5
    # memory
    held: tuple[int, ...] = (20_000, 100_000)


FULL = Scale()
QUICK = Scale(
    compiled=False,
    n=600, rounds=2, seconds=1.0, sizes=(200, 400), dimensions=(1, 3), columns=(1, 11), deadline=30.0,
    grown=(300, 600, 1200), turns=2, held=(2000,),
)  # fmt: skip
ACCELERATOR = Scale(
    n=100_000, d=(3, 10, 50, 110, 112, 300), families=("rbf",), dtypes=("float32",), enough=210.0,
    rounds=5, seconds=5.0,
    sizes=(10_000, 30_000, 100_000, 300_000, 1_000_000), bound=10.0, deadline=180.0,
    grown=(10_000, 30_000, 100_000, 300_000, 1_000_000), turns=3, held=(),
)  # fmt: skip


def synchronize(device: str) -> Callable[[], None]:
    return lambda: host.synchronize(device)


def calls_of(op: Op, problem: Problem, args: tuple[Any, ...], names: Sequence[str]) -> dict[str, Callable[[], object]]:
    """Return candidates as functions without arguments."""
    return {name: op.trial(op[name].run, problem, args) for name in names}


def working(
    calls: Mapping[str, Callable[[], object]],
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Return the functions that run, compiled by that where they are, and why the others do not."""
    found, failed = {}, {}
    for name, call in calls.items():
        try:
            with torch.no_grad():
                call()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        found[name] = call
    return found, failed


def run_main(scale: Scale, device: str, report: Report) -> dict[str, Any]:
    """Time every way at one size in turn, with the pieces of the floor in the same rounds."""
    reason, cases = contenders.without_keops() if scale.compiled else "nothing is compiled in a quick run", []
    if reason:
        report(f"KeOps takes no part: {reason}")
    began = time.perf_counter()
    for d, family, name, same in itertools.product(scale.d, scale.families, scale.dtypes, (True, False)):
        what = f"main, {family}, d={d}, {name}, {'same' if same else 'other'} points"
        if time.perf_counter() - began > scale.enough:
            report(f"{what}: left out, no time")
            continue
        cases.append(main_case(scale, (family, d, name), DTYPES[name], same, device, not reason))
        report(f"{what}: done")
    return {"n": scale.n, "columns": COLUMNS, "keops": reason or "works", "cases": cases}


def main_case(
    scale: Scale, key: tuple[str, int, str], dtype: torch.dtype, same: bool, device: str, keops: bool
) -> dict[str, Any]:
    """Return seconds of every way, of the floor, and the ratios of medians."""
    family, d, name = key
    of = case(family, scale.n, d, COLUMNS, same, dtype, device)
    op, args = get("kernel_matmul"), (of.kernel, of.x1, of.x2, of.rhs)
    problem = op.problem_of(*args)
    matrix = scale.n**2 * of.rhs.itemsize
    calls: dict[str, Callable[[], object]] = {}
    if keops:
        calls["KeOps"] = contenders.by_keops(of)
    if budget.fits(2 * matrix, device):
        calls["the matrix"] = contenders.whole(of)
    names = [c.name for c in op.feasible(problem) if scale.compiled or not c.setup]
    fitting = [one for one in names if budget.fits(op[one].memory(problem), device)]
    calls |= calls_of(op, problem, args, fitting)
    pieces = floor_pieces(d, COLUMNS, dtype, device)
    inside.active = True  # what a candidate calls itself is not dispatched
    try:
        calls, failed = working(calls)
        every = {**calls, **{piece: call for piece, (call, _) in pieces.items()}}
        taken = interleaved(every, scale.rounds, scale.seconds, scale.least, synchronize(device))
    finally:
        inside.active = False
    middle = {one: statistics.median(seconds) for one, seconds in taken.items()}
    floor = floor_of(middle, pieces)
    elements = scale.n**2
    return {
        "family": family, "d": d, "dtype": name, "same": same, "rounds": min(map(len, taken.values())),
        "chosen": explain(problem).candidate, "seconds": {one: middle[one] for one in calls},
        "too large": sorted(set(names) - set(fitting)), "failed": failed,
        "floor": {**floor._asdict(), "seconds": floor.seconds(elements, same), "half": floor.half(elements)},
    }  # fmt: skip


def regret_problems(scale: Scale, device: str) -> list[Problem]:
    """Return the problems of the regret table, small ones first; of the largest size only every d or every columns."""
    found = []
    for n in scale.sizes:
        last = n == max(scale.sizes)
        kinds = [
            (d, t, "float32") for d in scale.dimensions for t in scale.columns if not last or t == COLUMNS or d == 10
        ]
        kinds += [] if last else [(d, COLUMNS, "float64") for d in scale.dimensions]
        found += [Problem(op="kernel_matmul", m=n, n=n, d=d, rhs=t, dtype=name, device=device) for d, t, name in kinds]
    return [p.replace(variant="rbf/same") for p in found]


def run_regret(scale: Scale, device: str, report: Report) -> dict[str, Any]:
    """Time the choice against the best candidate; seconds of the next smaller size tell how long a call will last."""
    began, rows, skipped = time.perf_counter(), [], []
    before: dict[tuple[int, int, str], tuple[int, dict[str, float]]] = {}
    for problem in regret_problems(scale, device):
        key = problem.d, problem.rhs, problem.dtype
        smaller, known = before.get(key, (problem.n, {}))
        predicted = {name: seconds * (problem.n / smaller) ** 2 for name, seconds in known.items()}
        chosen = explain(problem).candidate
        if predicted.get(chosen, 0.0) > scale.bound or time.perf_counter() - began > scale.deadline:
            skipped.append(str(problem))
            continue
        found = regret_row(problem, chosen, predicted, scale)
        before[key] = problem.n, found["seconds"]
        rows.append(found)
        report(f"regret, {problem}: {found['chosen']}, best {found['best']}, {found['regret']:.3f}")
    regrets = sorted(row["regret"] for row in rows)
    place = max(0, math.ceil(0.95 * len(regrets)) - 1)
    summary = {"problems": len(rows), "geomean": geomean(regrets), "p95": regrets[place], "worst": regrets[-1]}
    return {"rows": rows, "summary": summary, "skipped": skipped}


def regret_row(problem: Problem, chosen: str, predicted: dict[str, float], scale: Scale) -> dict[str, Any]:
    """Compare all candidates, then the choice with the apparent best once more: only that second time counts."""
    op = get("kernel_matmul")
    names = [chosen, *(c.name for c in candidates_for(problem, scale.compiled) if c.name != chosen)]
    hopeless = {one for one in predicted if predicted[one] > 1.6 * min(predicted.values()) and one != chosen}
    calls = calls_of(
        op,
        problem,
        op.sample(problem, torch.Generator().manual_seed(problem.n + problem.d)),
        [one for one in names if one not in hopeless],
    )
    long = predicted.get(chosen, 0.0) > 1.0
    options: dict[str, Any] = {"synchronize": synchronize(problem.device), "seconds": 4.0, "rounds": (3, 9)}
    if long:  # no warm-up, and few rounds
        options |= {"warm": dict.fromkeys(calls, math.inf), "rounds": (1, 3)}
    inside.active = True
    try:
        calls, failed = (calls, {}) if long else working(calls)
        chosen = chosen if chosen in calls else "stock"  # as dispatch would fall back
        calls = {chosen: calls.pop(chosen), **calls}
        first = compare(calls, **options)
        apparent = min(first, key=lambda one: first[one].ratio)
        last = {one: calls[one] for one in dict.fromkeys((chosen, apparent))}
        fresh = compare(last, **options) if len(last) > 1 else first
    finally:
        inside.active = False
    best = apparent if fresh[apparent].ratio < 1.0 else chosen
    return {
        "n": problem.n, "d": problem.d, "columns": problem.rhs, "dtype": problem.dtype,
        "chosen": chosen, "best": best, "failed": failed, "regret": 1.0 / fresh[best].ratio,
        "seconds": {one: timing.seconds for one, timing in {**first, **fresh}.items()},
    }  # fmt: skip


def run_scaling(scale: Scale, device: str, report: Report) -> dict[str, Any]:
    """Time the dispatched product over n², all sizes in turn."""
    calls: dict[str, Callable[[], object]] = {}
    chosen = {}
    for n in scale.grown:
        of = case("rbf", n, 3, COLUMNS, True, torch.float32, device)
        calls[str(n)] = lambda of=of: autokern.covariance.matmul(of.kernel, of.x1, None, of.rhs)
        chosen[n] = explain(get("kernel_matmul").problem_of(of.kernel, of.x1, of.x1, of.rhs)).candidate
    taken = interleaved(calls, scale.turns, math.inf, 10 * scale.least, synchronize(device))
    seconds = {n: statistics.median(taken[str(n)]) for n in scale.grown}
    each = {n: seconds[n] / n**2 for n in scale.grown}
    middle = statistics.median(each.values())
    rows = [
        {"n": n, "chosen": chosen[n], "seconds": seconds[n], "each": each[n], "ratio": each[n] / middle}
        for n in scale.grown
    ]
    report(f"scaling: {min(r['ratio'] for r in rows):.2f} to {max(r['ratio'] for r in rows):.2f} of the median")
    return {"d": 3, "columns": COLUMNS, "dtype": "float32", "rows": rows}


def peak(n: int, d: int, dtype: str, grad: bool) -> dict[str, Any]:
    """Return seconds and the peak of memory of one dispatched product, above what goes in and comes out."""
    seconds, taken, given = 0.0, 0, 0
    for size in (min(n, 2000), n):  # the first one loads what it needs
        of = case("rbf", size, d, COLUMNS, True, DTYPES[dtype], "cpu", grad)
        meter, start = Peak(), time.perf_counter()
        out = autokern.covariance.matmul(of.kernel, of.x1, None, of.rhs)
        given = out.nbytes
        if grad:
            gradients = torch.autograd.grad(out.sum(), list(of.kernel.parameters()))
            given += sum(t.nbytes for t in gradients)
        seconds, taken = time.perf_counter() - start, meter.bytes()
    candidates = autokern.stats()["kernel_matmul"]
    return {"seconds": seconds, "bytes": max(0, taken - given), "candidates": candidates}


def run_memory(scale: Scale, device: str, report: Report) -> dict[str, Any]:
    """Measure the peak of products in fresh processes, forward and with gradients."""
    rows = []
    for n in scale.held:
        for dtype in DTYPES:
            for grad in (False, True):
                found = in_child("product_runs", "peak", n, 3, dtype, grad, limit=900.0)
                rows.append({"n": n, "dtype": dtype, "gradients": grad, **found})
                told = found.get("failed") or f"{found['bytes'] / 2**20:.0f} MiB, {found['seconds']:.2f} s"
                report(f"memory, n={n}, {dtype}, {'with gradients' if grad else 'forward'}: {told}")
    return {"d": 3, "columns": COLUMNS, "rows": rows}


SECTIONS: dict[str, Callable[[Scale, str, Report], dict[str, Any]]] = {
    "main": run_main,
    "regret": run_regret,
    "scaling": run_scaling,
    "memory": run_memory,
}
