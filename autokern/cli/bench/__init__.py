"""Bench: measures the gain of autokern's choices on this machine.

`regret` times the chosen candidate of random problems against all others, `kernel_matrices` every way to a kernel
matrix against stock, `end_to_end` real models with autokern off and on. Studies reuse `random_problems` and `regret`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from autokern.cli.bench.end_to_end import Workload, end_to_end
from autokern.cli.bench.kernel_matrices import Cell, kernel_matrices
from autokern.cli.bench.problems import contenders, random_problems
from autokern.cli.bench.regret import Row, Verdict, regret, verdict
from autokern.runtime import dispatch
from autokern.system import host
from autokern.system.progress import display
from autokern.tuning.calibration import chosen_devices

__all__ = [
    "Benchmark",
    "Cell",
    "Row",
    "Verdict",
    "Workload",
    "contenders",
    "end_to_end",
    "everything",
    "kernel_matrices",
    "random_problems",
    "regret",
    "verdict",
]


class Benchmark(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a benchmark, or of one part of it.

    Parameters
    ----------
    host : dict
        The measured host.
    kernel_matrices : list of Cell
        Every way to a kernel matrix, against stock.
    regret : dict of Verdict
        The choices against the best candidates, by op and for ``"all"``.
    problems : list of Row
        The problems behind `regret`.
    workloads : list of Workload
        Whole models, off against on.
    """

    host: dict[str, Any]
    kernel_matrices: list[Cell] = []
    regret: dict[str, Verdict] = {}
    problems: list[Row] = []
    workloads: list[Workload] = []


def everything(full: bool, report: Callable[[Benchmark], None] = lambda part: None) -> Benchmark:
    """Measure all parts; a quick benchmark takes a minute, a full one some ten.

    Parameters
    ----------
    full : bool
        Whether to measure more sizes and problems, without limits of time.
    report : callable
        Called with each part as soon as it is measured.
    """
    devices, fields = chosen_devices(None), host.current().fields

    def until(quick: float) -> float:
        return math.inf if full else time.perf_counter() + quick

    with display("1/3 kernel matrices") as progress:
        sizes, seconds = ((100, 1000, 4000), 5.0) if full else ((100, 1000), 0.6)
        cells = kernel_matrices(sizes, until(27), devices=devices, seconds=seconds, progress=progress)
    report(Benchmark(host=fields, kernel_matrices=cells))
    rows: list[Row] = []
    for device in devices:
        with display(f"2/3 regret, {device}") as progress:
            rows += _regret(full, device, until(22 / len(devices)), progress)
    groups = {op: [row for row in rows if row.problem.op == op] for op in sorted({row.problem.op for row in rows})}
    verdicts = {name: verdict(group) for name, group in ({**groups, "all": rows} if rows else {}).items()}
    report(Benchmark(host=fields, regret=verdicts, problems=rows))
    with display("3/3 whole models") as progress:
        workloads = end_to_end(until(12), progress=progress)
    report(Benchmark(host=fields, workloads=workloads))
    return Benchmark(host=fields, kernel_matrices=cells, regret=verdicts, problems=rows, workloads=workloads)


def _regret(full: bool, device: str, deadline: float, progress: Callable[[float, str], None]) -> list[Row]:
    flops, bytes = (2e10, 1e9) if full else (5e8, 5e7)
    problems = random_problems(120 if full else 40, seed=1, device=device, flops=flops, bytes=bytes)
    seconds = 2.0 if full else 0.3
    return regret(problems, deadline, lambda p: dispatch.explain(p).candidate, seconds=seconds, progress=progress)
