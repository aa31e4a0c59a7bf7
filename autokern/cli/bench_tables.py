"""Tables of benchmarks for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from autokern.cli import tables
from autokern.cli.bench import Benchmark, Cell, Row, Verdict, Workload
from autokern.cli.tables import duration, note, table, times

_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def show(part: Benchmark) -> None:
    """Print all parts that a benchmark has."""
    if part.kernel_matrices:
        tables.show(*_kernel_matrices(part.kernel_matrices))
    if part.regret:
        tables.show(*_verdicts(part.regret, part.problems))
    if part.workloads:
        tables.show(_workloads(part.workloads))


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
    else:
        text = times(cell.ratio)
    return text.append(footnote or " ", style="dim")


def _verdicts(found: Mapping[str, Verdict], rows: Sequence[Row]) -> list[RenderableType]:
    """Return the regret of the choices against the best candidates, by op and in all, and the worst ones."""
    columns = ("op", ">problems", ">geomean", ">95th %", ">slower than stock", ">× stock")
    lines = []
    for name, v in found.items():
        regrets = f"{v.regret_geomean:.3f}", f"{v.regret_p95:.2f}", f"{100 * v.slower_share:.0f} %"
        op = Text(name, style="bold" if name == "all" else "")
        lines.append((op, str(v.problems), *regrets, times(v.speedup)))
    worst = [row for row in sorted(rows, key=lambda row: -row.regret)[:3] if row.regret > 1.05]
    notes = [f"  {r.regret:.2f}  {r.problem}: chose {r.chosen}, best is {r.best}" for r in worst]
    title = "regret: time of the choice over that of the best candidate, problems off the grid"
    return [table(title, columns, lines), *(note(line) for line in ["worst:", *notes, ""] if notes)]


def _workloads(found: Sequence[Workload]) -> RenderableType:
    rows = ((row.name, row.dtype, duration(row.off), duration(row.on), times(row.speedup)) for row in found)
    title, columns = "whole models, autokern off and on in turn", ("workload", "dtype", ">off", ">on", ">× stock")
    return table(title, columns, rows)
