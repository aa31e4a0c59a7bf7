"""Tables of benchmarks for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from autokern.cli import tables
from autokern.cli.bench import ABOUT_EXACT, EXACT, Benchmark, Cell, Workload, lost, slower
from autokern.cli.tables import note, table, times
from autokern.core.units import duration
from autokern.tuning.measuring import WORTHLESS

_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def show(part: Benchmark) -> None:
    """Print all parts that a benchmark has."""
    if part.busy:
        told = f"meanwhile {part.busy}: what waited for a core is left out, and ratios are of a busy machine"
        tables.show(note(told, "yellow"))
    if part.kernel_matrices:
        tables.show(*_kernel_matrices(part.kernel_matrices))
    if part.regret:
        tables.show(*_verdicts(part))
    if part.workloads:
        tables.show(_workloads(part.workloads), *(note(line, "yellow") for line in slower(part.workloads)))


def _kernel_matrices(cells: Sequence[Cell]) -> list[RenderableType]:
    """Return a table for each family, dtype and device, candidates by sizes, and footnotes with reasons."""
    notes: dict[str, list[str]] = {}
    for cell in cells:
        if reason := _remark(cell):
            names = notes.setdefault(reason, [])
            names += [] if cell.candidate in names else [cell.candidate]
    marks = {reason: str(number).translate(_RAISED) for number, reason in enumerate(notes, 1)}
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        family = cell.problem.variant.partition("/")[0]
        groups.setdefault((family, cell.problem.dtype, cell.problem.device), []).append(cell)
    parts: list[RenderableType] = []
    for (family, dtype, device), group in groups.items():
        title = f"{family} on {device} in {dtype}, {group[0].problem.d} dimensions"
        parts.append(_kernel_table(title, group, marks))
    legend = "stock: time of one call; the others: how many times as fast. fwd: values, +bwd: and gradients"
    lines = [f"{marks[reason]} {', '.join(names)}: {reason}" for reason, names in notes.items()]
    parts += [note(line) for line in (legend, *lines, "")]
    return parts


def _remark(cell: Cell) -> str:
    if cell.failed:
        return f"not timed, {cell.failed}"
    if not cell.agrees:
        return f"differs from stock by {cell.agreement:.0e} of the largest entry"
    if cell.disturbed > WORTHLESS:
        return "not shown, threads waited for a core"
    return f"never chosen here, {cell.refused}" if cell.refused else ""


def _kernel_table(title: str, cells: Sequence[Cell], marks: Mapping[str, str]) -> RenderableType:
    problems = list(dict.fromkeys(cell.problem for cell in cells))
    by_place = {(cell.candidate, cell.problem): cell for cell in cells}
    names = dict.fromkeys(cell.candidate for cell in cells if not cell.failed)
    rows: list[list[str | Text]] = []
    for name in names:
        found = [by_place.get((name, p)) for p in problems]
        rows.append([name, *(Text("–") if c is None else _cell(c, marks.get(_remark(c), "")) for c in found)])
    for label, field in (("events", "event_seconds"), ("profiler", "profiler_seconds")):
        if any(getattr(cell, field) for cell in cells):
            for name in names:
                seconds = [getattr(by_place.get((name, p)), field, 0.0) for p in problems]
                rows.append([Text(f"{name}, {label}", style="dim"), *(duration(s) if s else "–" for s in seconds)])
    return table(title, ("candidate", *(f">n={p.n} {'+bwd' if p.grad else 'fwd'}" for p in problems)), rows)


def _cell(cell: Cell, footnote: str) -> Text:
    if cell.failed:
        text = Text("–", style="dim")
    elif cell.candidate == "stock":
        text = Text(duration(cell.seconds))
    elif not cell.agrees:
        text = Text("differs", style="red")
    elif cell.disturbed > WORTHLESS:
        text = Text("–", style="dim")
    else:
        text = times(cell.ratio)
    return text.append(footnote or " ", style="dim")


def _verdicts(part: Benchmark) -> list[RenderableType]:
    """Return the regret of the choices against the best candidates, by op and in all, and the worst ones."""
    columns = ("op", ">problems", ">geomean", ">95th %", ">slower than stock", ">× stock")
    lines = []
    for name, v in {**part.regret, **({"noise": part.floor} if part.floor else {})}.items():
        regrets = f"{v.regret_geomean:.3f}", f"{v.regret_p95:.2f}", f"{100 * v.slower_share:.0f} %"
        op = Text(name, style="bold" if name == "all" else "dim" if name == "noise" else "")
        lines.append((op, str(v.problems), *regrets, times(v.speedup)))
    pairs = sorted(zip(part.problems, part.chosen, strict=True), key=lambda pair: -lost(*pair))
    notes = [
        f"  {lost(row, name):.2f}  {row.problem}: chose {name}, best is {row.fastest}"
        for row, name in pairs[:3]
        if lost(row, name) > 1.05
    ]
    title = "regret: time of the choice over that of the best candidate, problems off the grid of 30 µs and more"
    legend = ["noise: stock against stock under another name"]
    legend += [f"{EXACT}: {ABOUT_EXACT}"] if EXACT in part.regret else []
    return [
        table(title, columns, lines),
        *(note(line) for line in [*legend, *(["worst:", *notes] if notes else []), ""]),
    ]


def _workloads(found: Sequence[Workload]) -> RenderableType:
    rows = [
        (row.name, row.dtype, duration(row.off), duration(row.on), times(row.speedup), f"{row.low:.2f}–{row.high:.2f}")
        for row in found
    ]
    title = "whole models, autokern off and on in turn"
    columns = ("workload", "dtype", ">off", ">on", ">× stock", ">quartiles")
    return table(title, columns, rows)
