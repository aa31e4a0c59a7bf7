"""Writes `docs/machines.md` from the recorded hosts: what is fastest where, and what fixed thresholds cost there.

Nothing is timed: the figures are those that `autokern calibrate --full` recorded.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from autokern.cli.summary import known, present
from autokern.core.op import Op
from autokern.core.problem import Candidate, Feasibility, Problem
from autokern.tuning.profile import Profile, Trial
from autokern.tuning.store import read_file

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "machines.md"
HEAD = """# Recorded machines

What `autokern calibrate --full` measured on real machines, written by `calibration/machines.py` from
`calibration/hosts/`. Your own: `autokern show`. *Gain* is the geometric mean, over the problems measured, of the time
of stock over that of the fastest candidate; *fastest* is for single matrices without gradients, by the larger
dimension.
"""
MOVED = ("qr", "cholesky", "kernel_matrix", "kernel_matmul", "exact_log_prob")
"""Ops whose work may be done on another device than the data lies on."""
THRESHOLDS = {2048: "before linear_operator 0.5.3", 128: "since"}
"""Columns up to which linear_operator has decomposed a matrix on the CPU."""


class Replayed(Feasibility):
    """The table of a problem on a recorded host: candidates are available that were measured there for its group."""

    __slots__ = ("_measured",)

    def __init__(self, op: Op, problem: Problem, profile: Profile) -> None:
        super().__init__(op, problem)
        self._measured = {name for t in profile.trials if t.problem.group == problem.group for name in t.timings}

    def why_not(self, candidate: Candidate) -> str | None:
        why = candidate.unsupported(self.problem)  # `unavailable` would ask this machine
        if why is None and candidate.accuracy != "approximate" and candidate.name not in self._measured:
            why = "it was not measured on the recorded host"
        return why


def page(hosts: Sequence[Path]) -> str:
    return "\n".join([HEAD, *("\n".join(section(path.stem, present(read_file(path)))) for path in hosts)])


def section(name: str, profile: Profile) -> Iterator[str]:
    cpu, versions = profile.host["cpu"], profile.host["versions"]
    gpus = [gpu.get("name", gpu["kind"]) for gpu in profile.host["accelerators"]]
    where = ", ".join([*gpus, f"{cpu['model']}, {cpu['threads']} threads"])
    yield f"## {where}\n"
    yield (
        f"`hosts/{name}.json`; torch {versions['torch']}, gpytorch {versions['gpytorch']}, linear_operator "
        f"{versions['linear_operator']}; {profile.created[:10]}, {len(profile.trials)} problems.\n"
    )
    yield from _table(
        ("op", "data on", "dtype", "problems", "gain", "fastest"),
        [(f"`{s.op}`", s.device, s.dtype, s.problems, f"{s.speedup:.2f}", s.fastest) for s in known(profile).ops],
    )
    if gpus:
        yield from _between_devices(profile)


def _between_devices(profile: Profile) -> Iterator[str]:
    """Yield the gain of choosing between CPU and GPU: in batches, and against fixed thresholds."""
    yield "### CPU or GPU, in batches\n"
    rows = []
    for winner in known(profile, MOVED).winners:
        p = winner.problem
        if p.batch > 1 and (not p.grad or p.op == "exact_log_prob"):
            sizes = f"{p.batch} × {p.m} × {p.n}"
            ms = f"{1e3 * winner.stock_seconds:.3g}"
            rows.append((f"`{p.op}`", p.device, p.dtype, sizes, winner.candidate, ms, f"{winner.speedup:.2f}"))
    yield from _table(("op", "data on", "dtype", "sizes", "fastest", "stock, ms", "times as fast"), rows)
    yield "### What a fixed threshold costs\n"
    yield (
        "Time of a QR decomposition of data on the GPU by linear_operator's rule, over that of the better of CPU and "
        "GPU: geometric mean and worst of the measured problems.\n"
    )
    rows = []
    for most, when in THRESHOLDS.items():
        for dtype in ("float32", "float64"):
            costs = rule_costs(profile.trials, most, dtype)
            if costs:
                mean = math.exp(sum(map(math.log, costs)) / len(costs))
                rows.append((f"CPU up to {most} ({when})", dtype, len(costs), f"{mean:.2f}", f"{max(costs):.1f}"))
    yield from _table(("rule", "dtype", "problems", "mean", "worst"), rows)


def rule_costs(trials: Sequence[Trial], most: int, dtype: str) -> list[float]:
    """Return what "on the CPU up to so many columns" costs beside the better of both, for each QR measured."""
    found = []
    for trial in trials:
        p, times = trial.problem, {name: timing.seconds for name, timing in trial.timings.items()}
        if (p.op, p.dtype, p.grad) != ("qr", dtype, "") or p.device == "cpu":
            continue
        cpu, there = times.get("cpu"), times.get("native")
        cpu, there = (times["stock"], there) if cpu is None else (cpu, times["stock"])  # stock is one of the two
        if cpu is not None and there is not None:
            found.append((cpu if p.n <= most else there) / min(cpu, there))
    return found


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)
    yield ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; with ``--check`` the exit status is 1 if it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if the page is out of date")
    options = parser.parse_args(arguments)
    fresh = page(sorted((HERE / "hosts").glob("*.json")))
    if options.check:
        return int(DOCUMENT.read_text(encoding="utf-8") != fresh)
    DOCUMENT.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
