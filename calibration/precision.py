"""Lower precision against the best that keeps the bound: time, memory and measured error, in turns in one run.

Writes `precision.json` and the table in `docs/how-it-decides.md`. May import no other file of this folder.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

import autokern  # noqa: F401  (registers every op)
from autokern import accuracies, host, timer
from autokern.op import get, inside
from autokern.problem import Problem

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "how-it-decides.md"
BLOCK = re.compile(r"(<!-- precision: [^>]*-->\n).*?(<!-- /precision -->)", re.DOTALL)
MOST_TRUTH = 2**25
"""Elements up to which float64 truth is formed; larger problems are compared with the best that keeps the bound."""


class Row(msgspec.Struct, frozen=True):
    """One candidate on one problem: seconds, how many times as fast as the best within the bound, bytes, error."""

    problem: Problem
    candidate: str
    seconds: float
    speedup: float
    memory: int
    relative_error: float


def problems(device: str) -> Iterator[Problem]:
    """Yield what is compared: products that no memory limits, and what a training step takes."""
    large = 12000 if device == "cpu" else 60000
    dtypes = ("float64",) if device == "cpu" else ("float64", "float32")
    for dtype in dtypes:
        base = Problem(op="kernel_matmul", rhs=11, dtype=dtype, device=device)
        for n, d, variant in ((4000, 10, "rbf/same"), (large, 10, "rbf/same"), (4000, 50, "matern52/cross")):
            yield base.replace(m=n, n=n, d=d, variant=variant)
        yield base.replace(m=4000, n=4000, d=10, variant="rbf/same", grad="theta")
    for n in (300, 1000, 2500, 5000):
        variant = "cholesky" if n <= 800 else "cg"
        yield Problem(op="exact_log_prob", m=n, n=n, d=8, device=device, grad="theta", variant=f"matern52/{variant}")
        yield Problem(op="inv_quad_logdet", m=n, n=n, rhs=1, device=device, grad="a", variant=variant)


def measured(problem: Problem, seconds: float) -> list[Row]:
    """Return what approximates beside the fastest candidate that does not, on one problem, timed in turns."""
    op = get(problem.op)
    room = 0.4 * host.available_memory(problem.device)
    able = [c for c in op.feasible(problem) if not c.setup and c.memory(problem) < room]
    args = op.sample(problem, torch.Generator().manual_seed(5))
    calls = {c.name: op.trial(c.run, problem, args) for c in able}

    def synchronize() -> None:
        host.synchronize(problem.device)

    once = {name: min(timer.once(call, synchronize) for _ in range(2)) for name, call in calls.items()}
    rough = [c.name for c in able if c.accuracy == "approximate"]
    exact = [c.name for c in able if c.name not in rough and not (c.as_stock and problem.variant.endswith("cg"))]
    kept = min(exact, key=once.__getitem__)
    found = timer.compare(
        {n: calls[n] for n in (kept, *rough)}, synchronize=synchronize, seconds=seconds, rounds=(5, 200)
    )
    small = problem.batch * problem.m * problem.n <= MOST_TRUTH
    truth = accuracies.truth(op, problem, args) if small else calls[kept]()
    return [
        Row(
            problem,
            name,
            timing.seconds,
            1 / timing.ratio,
            op[name].memory(problem),
            accuracies.relative_error(op, calls[name](), truth),
        )
        for name, timing in found.items()
    ]


def lines(rows: Sequence[Row]) -> list[str]:
    """Return the rows of one problem as lines of a Markdown table."""
    found = []
    for row in rows:
        label = f"`{row.problem}`" if row is rows[0] else ""
        size = f"{row.memory / 2**20:.0f}"
        cells = (
            label,
            row.candidate,
            f"{1e3 * row.seconds:.3g}",
            f"{row.speedup:.2f}",
            size,
            f"{row.relative_error:.0e}",
        )
        found.append(f"| {' | '.join(cells)} |")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write `precision.json`, and the docs if they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu (default) or the kind of an accelerator")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each problem")
    parser.add_argument("--output", type=Path, default=HERE / "precision.json")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/how-it-decides.md")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    printed = ["| problem | candidate | ms | × | MiB | error |", "|---|---|---|---|---|---|"]
    inside.active = True
    for problem in problems(options.device):
        found = measured(problem, options.seconds)
        rows, printed = rows + found, printed + lines(found)
        print(*lines(found), sep="\n", flush=True)
    fields: dict[str, Any] = host.current().fields
    report = {"machine": fields, "python": platform.python_version(), "rows": msgspec.to_builtins(rows)}
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.docs:
        where = f"{fields['cpu']['model']}, {torch.get_num_threads()} threads:\n"
        fresh = "\n".join([where, *printed, ""])
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(BLOCK.sub(lambda match: match[1] + fresh + match[2], text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
