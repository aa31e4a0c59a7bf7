"""The report of a benchmark: whole models, choices against the best candidates, ways to a kernel matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autokern.cli.bench import ABOUT_EXACT, EXACT, Benchmark, Cell, Workload, lost, slower
from autokern.cli.report import machine
from autokern.cli.report.page import Line, Page, Plot, Section, Table, Tile, without_paths
from autokern.core.units import duration
from autokern.system import host
from autokern.tuning.measuring import WORTHLESS

__all__ = ["of_benchmark"]

_MOST_ROWS = 60


def of_benchmark(found: Benchmark) -> Page:
    """Return the page of a benchmark."""
    sections = [*_workloads(found.workloads), *_regret(found), *_kernel_matrices(found.kernel_matrices)]
    sections.append(Section(title="Threads", facts=machine.thread_facts()))
    sections.append(machine.host_section(found.host, host.fingerprint_of(found.host)))
    tiles = []
    if found.workloads:
        mean = math.exp(sum(math.log(row.speedup) for row in found.workloads) / len(found.workloads))
        tiles.append(Tile("whole models", f"{mean:.2f} ×", "as fast as stock, geometric mean, measured"))
    if "all" in found.regret:
        one = found.regret["all"]
        tiles.append(Tile("choices", f"{one.speedup:.2f} ×", f"as fast as stock, of {one.problems} random problems"))
        tiles.append(Tile("regret", f"{one.regret_geomean:.3f}", "time over that of the best candidate"))
        tiles.append(Tile("slower than stock", f"{100 * one.slower_share:.0f} %", "of these problems, by over 5 %"))
    busy = [f"Meanwhile {found.busy}: ratios are of a busy machine."] if found.busy else []
    words = f"{machine.now()} · {machine.in_short(found.host)}"
    return Page(
        kind="bench", title="What autokern is worth here", words=words, tiles=tiles, notes=busy, sections=sections
    )


def _workloads(found: Sequence[Workload]) -> list[Section]:
    if not found:
        return []
    columns = ["workload", "dtype", ">off", ">on", ">× stock", ">quartiles"]
    rows = [
        [w.name, w.dtype, duration(w.off), duration(w.on), f"{w.speedup:.2f}", f"{w.low:.2f}–{w.high:.2f}"]
        for w in found
    ]
    notes = ["Seconds of a step, autokern off and on in turn.", *slower(found)]
    longest = max(w.speedup for w in found)
    table = Table(columns, rows, [w.speedup / longest for w in found], "× stock")
    return [Section(title="Whole models", tables=[table], notes=notes)]


def _regret(part: Benchmark) -> list[Section]:
    """Return the regret of the choices by op, and the problems behind it, the worst first."""
    if not part.regret:
        return []
    verdicts = {**part.regret, **({"noise": part.floor} if part.floor else {})}
    rows = [
        [name, str(v.problems), f"{v.regret_geomean:.3f}", f"{v.regret_p95:.2f}", f"{100 * v.slower_share:.0f} %",
         f"{v.speedup:.2f}"]
        for name, v in verdicts.items()
    ]  # fmt: skip
    columns = ["op", ">problems", ">geomean", ">95th %", ">slower than stock", ">× stock"]
    pairs = sorted(zip(part.problems, part.chosen, strict=True), key=lambda pair: -lost(*pair))
    problems = [
        [str(row.problem), name, row.fastest, duration(row.seconds), f"{1 / row.over_stock(name):.2f}",
         f"{lost(row, name):.2f}"]
        for row, name in pairs[:_MOST_ROWS]
    ]  # fmt: skip
    told = ["problem", "chosen", "fastest", ">stock", ">× stock", ">regret"]
    notes = [
        "Time of the choice over that of the best candidate, on random problems that no calibration has seen, of 30 µs "
        "and more. Noise: stock against stock under another name."
    ]
    notes += [f"{EXACT.capitalize()}: {ABOUT_EXACT}."] if EXACT in part.regret else []
    return [Section(title="Choices and regret", tables=[Table(columns, rows), Table(told, problems)], notes=notes)]


def _kernel_matrices(cells: Sequence[Cell]) -> list[Section]:
    """Return a plot for each family, dtype, device and gradient, and the reasons why cells are not drawn."""
    groups: dict[tuple[str, str, str, str, int], list[Cell]] = {}
    for cell in cells:
        p = cell.problem
        groups.setdefault((p.variant, p.dtype, p.device, p.grad, p.d), []).append(cell)
    plots, left = list[Plot](), dict[str, dict[str, None]]()
    for (variant, dtype, device, grad, d), group in groups.items():
        by: dict[str, list[tuple[float, float]]] = {}
        for cell in group:
            if reason := _left_out(cell):
                left.setdefault(without_paths(reason), {})[cell.candidate] = None
            else:
                by.setdefault(cell.candidate, []).append((float(cell.problem.n), cell.seconds))
        lines = [
            Line(name=name, x=[n for n, _ in at], y=[s for _, s in at], points=at, stock=name == "stock")
            for name, at in sorted(((name, sorted(at)) for name, at in by.items()), key=lambda pair: pair[0] != "stock")
        ]
        title = f"{variant} on {device} in {dtype}, d={d}{', with gradients' if grad else ''}"
        if lines:
            plots.append(Plot(title=title, xlabel="n", ylabel="time of a call", lines=lines))
    notes = ["Measured time of each way to a kernel matrix; each result is compared with stock's before it is timed."]
    found = [Section(title="Kernel matrices", plots=plots, notes=notes)] if plots else []
    facts = [(reason, ", ".join(names)) for reason, names in left.items()]
    return found + ([Section(title="Kernel matrices that are not drawn", facts=facts)] if facts else [])


def _left_out(cell: Cell) -> str:
    if cell.failed:
        return cell.failed
    if not cell.agrees:
        return f"differs from stock by {cell.agreement:.0e} of the largest entry"
    return "threads waited for a core" if cell.disturbed > WORTHLESS else ""
