"""Bench: measures the gain of autokern's choices on this machine.

`regret` times the chosen candidate of random problems against all others, `kernel_matrices` every way to a kernel
matrix against stock, `end_to_end` real models with autokern off and on. Studies reuse `random_problems` and `regret`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from autokern.cli.bench.end_to_end import Workload, end_to_end, slower
from autokern.cli.bench.kernel_matrices import Cell, kernel_matrices
from autokern.cli.bench.regret import ABOUT_EXACT, EXACT, LEAST, Row, Verdict, apart, lost, noise_floor, timed, verdict
from autokern.core.errors import SettingsError
from autokern.core.problem import Problem
from autokern.core.registry import get, registered
from autokern.runtime import dispatch
from autokern.system import host, threads
from autokern.system.load import Watch
from autokern.system.progress import display
from autokern.tuning.calibration import chosen_devices
from autokern.tuning.drawing import contenders, draw

__all__ = [
    "ABOUT_EXACT",
    "EXACT",
    "Benchmark",
    "Cell",
    "Row",
    "Verdict",
    "Workload",
    "contenders",
    "end_to_end",
    "everything",
    "kernel_matrices",
    "lost",
    "noise_floor",
    "random_problems",
    "slower",
    "timed",
    "verdict",
]


_DOUBTFUL = 0.4
"""Standard error of a log ratio from which on a problem is left out: more than that of a single round."""


class Benchmark(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a benchmark, or of one part of it."""

    host: dict[str, Any]
    kernel_matrices: list[Cell] = []  # every way to a kernel matrix, against stock
    # The choices against the best candidates, by op and for ``"all"``; apart from these, those of `EXACT`.
    regret: dict[str, Verdict] = {}
    floor: Verdict | None = None  # the same of stock under another name: what is noise
    problems: list[Row] = []  # the problems behind `regret`
    chosen: list[str] = []  # for each of them
    workloads: list[Workload] = []  # whole models, off against on
    busy: str = ""  # what else used the machine meanwhile; empty where nothing did


def everything(full: bool, report: Callable[[Benchmark], None] = lambda part: None) -> Benchmark:
    """Measure all parts; a quick benchmark takes a minute, a full one some ten.

    Each part is reported as soon as it is measured.
    """
    devices, fields, watch = chosen_devices(None), host.current().fields, Watch()

    def busy() -> str:
        found = watch.reading()
        return str(found) if found.crowded(threads.current()) else ""

    def until(quick: float) -> float:
        return math.inf if full else time.perf_counter() + quick

    with display("1/3 kernel matrices") as progress:
        sizes, seconds = ((100, 1000, 4000), 5.0) if full else ((100, 1000), 0.6)
        cells = kernel_matrices(sizes, until(27), devices=devices, seconds=seconds, progress=progress)
    report(Benchmark(host=fields, kernel_matrices=cells, busy=busy()))
    rows: list[Row] = []
    for device in devices:
        with display(f"2/3 regret, {device}") as progress:
            rows += _timed(full, device, until(22 / len(devices)), progress)
    rows = [row for row in rows if row.is_steady]
    choices = {row.problem: dispatch.explain(row.problem).candidate for row in rows}
    usual, exact = apart(rows)
    groups = {op: [row for row in usual if row.problem.op == op] for op in sorted({row.problem.op for row in usual})}
    groups |= {EXACT: exact, "all": usual}
    verdicts = {name: verdict(of, choices.__getitem__) for name, of in groups.items() if of}
    judged = Benchmark(
        host=fields,
        regret=verdicts,
        floor=noise_floor(rows) if rows else None,
        problems=rows,
        chosen=[choices[row.problem] for row in rows],
    )
    report(msgspec.structs.replace(judged, busy=busy()))
    with display("3/3 whole models") as progress:
        workloads = end_to_end(until(12), progress=progress)
    report(Benchmark(host=fields, workloads=workloads, busy=busy()))
    return msgspec.structs.replace(judged, kernel_matrices=cells, workloads=workloads, busy=busy())


def random_problems(
    count: int,
    seed: int = 0,
    *,
    ops: Iterable[str] | None = None,
    dtypes: Sequence[str] = ("float32", "float64"),
    device: str = "cpu",
    flops: float | None = None,
    bytes: float | None = None,
) -> list[Problem]:
    """Return random problems of some ops, by default all that offer a choice on the device, in turn; see `draw`."""
    chosen = registered() if ops is None else [get(name) for name in dict.fromkeys(ops)]
    found = [draw(op, count, dtypes, device, f"{seed}:{op.name}", flops, bytes) for op in chosen]
    found = [problems for problems in found if problems]
    if not found:
        raise SettingsError(f"random problems were asked for; no op offers more than one candidate on {device!r}")
    turns = itertools.chain(*itertools.zip_longest(*found))
    return [problem for problem in turns if problem is not None][:count]


def _timed(full: bool, device: str, deadline: float, progress: Callable[[float, str], None]) -> list[Row]:
    flops, bytes = (2e10, 1e9) if full else (5e8, 5e7)
    problems = random_problems(120 if full else 40, seed=1, device=device, flops=flops, bytes=bytes)
    rows = timed(problems, deadline, seconds=1.0 if full else 0.15, progress=progress)
    return [row for row in rows if row.seconds >= LEAST]
