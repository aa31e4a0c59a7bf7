"""Tables for the terminal, made of plain data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autokern.cli.bench import Cell, Row, Verdict, Workload
from autokern.cli.doctor import Finding
from autokern.core.decision import Decision
from autokern.core.problem import Problem
from autokern.tuning.profile import Ban, Crossover
from autokern.tuning.summary import Rough, Summary, Winner

__all__ = [
    "bans",
    "decisions",
    "duration",
    "findings",
    "kernel_matrices",
    "note",
    "rough",
    "show",
    "stats",
    "summaries",
    "verdicts",
    "winners",
    "workloads",
]

_GAIN, _LOSS = 1.05, 0.95
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_MARKS = {"ok": ("✓", "green"), "note": ("•", "yellow"), "problem": ("✗", "red")}


def show(*parts: RenderableType, stderr: bool = False) -> None:
    """Print tables or lines on standard output, or on standard error."""
    console = Console(stderr=stderr, highlight=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))  # a path that is broken up cannot be copied


def note(text: str, style: str = "dim") -> Text:
    """Return a line of plain text, without markup."""
    return Text(text, style=style)


def duration(seconds: float) -> str:
    """Return seconds as three digits with a unit.

    Examples
    --------
    >>> duration(0.00123)
    '1.23 ms'
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds * 1e6)} µs"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def _table(*columns: str) -> Table:
    """Return an empty table; a column whose name begins with ``>`` is aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        last = column == columns[-1]
        side: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        table.add_column(
            column.removeprefix(">"), justify=side, no_wrap=not last and column != "problem", overflow="fold"
        )
    return table


def _titled(title: str, table: Table) -> RenderableType:
    """Return a table under a title that may be wider than it."""
    return Group(Text(title, style="bold"), table)


def _times(ratio: float) -> Text:
    """Return a speed-up, coloured where it is more than noise."""
    if math.isnan(ratio):  # not timed
        return Text("–", style="dim")
    return Text(f"{ratio:.2f}", style="green" if ratio >= _GAIN else "red" if ratio <= _LOSS else "")


def _once(labels: Iterable[str], before: list[str]) -> list[str]:
    """Return labels, blank from the left where they repeat the row above; `before` is updated."""
    now = list(labels)
    same = 0
    while same < len(now) and before[same : same + 1] == now[same : same + 1]:
        same += 1
    before[:] = now
    return [""] * same + now[same:]


_MOST_STEPS = 5


def by_size(fastest: str, crossovers: Sequence[Crossover]) -> str:
    """Return in words which candidate is fastest at which size."""
    if not crossovers:
        return fastest
    if len(crossovers) > _MOST_STEPS:  # more than one size decides
        often = Counter(c.above for c in crossovers).most_common(1)[0][0]
        return f"mostly {often}, by m and n: autokern show OP"
    steps = [f"{c.below} to {c.size:.0f}" for c in crossovers]
    return ", ".join([*steps, crossovers[-1].above])


def summaries(found: Sequence[Summary], title: str) -> RenderableType:
    """Return a line for each op, device and dtype."""
    table = _table("op", "on", ">problems", ">× stock", "fastest by size")
    seen: list[str] = []
    for row in found:
        op = _once((row.op,), seen)[0]
        words = Text(by_size(row.fastest, row.crossovers))
        if row.banned:
            words.append(f"  banned: {', '.join(row.banned)}", style="red")
        table.add_row(op, f"{row.device} {row.dtype}", str(row.problems), _times(row.speedup), words)
    return _titled(title, table)


def sizes(problem: Problem) -> str:
    """Return the sizes of a problem in the usual notation, e.g. ``16 × (400, 400) d=8``."""
    batch = f"{problem.batch} × " if problem.batch != 1 else ""
    more = "".join(f" {name}={getattr(problem, name)}" for name in ("d", "rhs") if getattr(problem, name))
    return f"{batch}({problem.m}, {problem.n}){more}"


def _kind(problem: Problem) -> str:
    grad = f"gradient of {problem.grad}" if problem.grad else ""
    return ", ".join(filter(None, (problem.variant, grad)))


def winners(found: Sequence[Winner]) -> RenderableType:
    """Return a table for each kind of problem: the fastest candidate at each measured size, and by how much."""
    groups: dict[str, list[Winner]] = {}
    for row in found:
        p = row.problem
        words = ", ".join(filter(None, (f"{p.op} on {p.device} in {p.dtype}", _kind(p))))
        groups.setdefault(words, []).append(row)
    parts = []
    for words, group in groups.items():
        table = _table(">problem", "fastest", ">× stock", ">time", ">stock")
        for row in group:
            times = duration(row.seconds), duration(row.stock_seconds)
            table.add_row(sizes(row.problem), row.candidate, _times(row.speedup), *times)
        parts.append(_titled(words, table))
    return Group(*parts)


def rough(found: Sequence[Rough]) -> RenderableType:
    """Return a line for each candidate of lower precision: its gain and its error."""
    table = _table("op", "on", "candidate", ">problems", ">× best", ">error")
    for row in found:
        on, error = f"{row.device} {row.dtype}", f"{row.relative_error:.0e}"
        table.add_row(row.op, on, row.candidate, str(row.problems), _times(row.speedup), error)
    return _titled("lower precision, only when asked for; × best: of those within the bound", table)


def bans(found: Sequence[Ban]) -> RenderableType:
    """Return a line for each candidate that may not run on this host."""
    table = _table("candidate", "on", "reason")
    for ban in found:
        table.add_row(f"{ban.op}.{ban.candidate}", f"{ban.device} {ban.dtype}", ban.reason)
    return _titled("banned on this host", table)


def findings(found: Sequence[Finding]) -> Table:
    """Return a line for each finding, and under it what to do."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in found:
        mark, colour = _MARKS[row.status]
        words = Text(row.found)
        if row.advice:
            words.append(f"\n→ {row.advice}", style=colour)
        table.add_row(Text(mark, style=colour), Text(row.name, style="bold"), words)
    return table


def decisions(found: Sequence[tuple[Decision, int]]) -> RenderableType:
    """Return the decisions that a process took, those that served most calls first."""
    if not found:
        return note("autokern took no decision in this process")
    table = _table(">calls", "problem", "runs", ">× stock", "why")
    for decision, calls in sorted(found, key=lambda pair: -pair[1]):
        problem = decision.problem
        words = ", ".join(filter(None, (problem.dtype, problem.device, _kind(problem))))
        table.add_row(
            str(calls),
            Text(f"{problem.op} {sizes(problem)}\n").append(words, style="dim"),
            decision.candidate,
            _times(decision.margin),
            decision.reason,
        )
    return _titled("autokern: decisions", table)


def stats(counts: Mapping[str, Mapping[str, int]]) -> RenderableType:
    """Return the number of calls by op and candidate."""
    if not counts:
        return note("autokern served no call in this process")
    table = _table("op", "candidate", ">calls")
    seen: list[str] = []
    for op, candidates in counts.items():
        for candidate, calls in sorted(candidates.items(), key=lambda pair: -pair[1]):
            table.add_row(*_once((op,), seen), candidate, f"{calls:,}")
    return _titled("autokern: calls", table)


def kernel_matrices(cells: Sequence[Cell]) -> list[RenderableType]:
    """Return a table for each family, dtype and device, candidates by sizes, and footnotes with reasons."""
    notes: dict[str, list[str]] = {}
    for cell in cells:
        if reason := _remark(cell):
            names = notes.setdefault(reason, [])
            names += [] if cell.candidate in names else [cell.candidate]
    marks = {reason: str(number).translate(_RAISED) for number, reason in enumerate(notes, 1)}
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        family = cell.problem.words[0]
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
    table = _table("candidate", *(f">n={p.n} {'+bwd' if p.grad else 'fwd'}" for p in problems))
    by_place = {(cell.candidate, cell.problem): cell for cell in cells}
    names = dict.fromkeys(cell.candidate for cell in cells if not cell.failed)
    for name in names:
        found = [by_place.get((name, p)) for p in problems]
        table.add_row(name, *(Text("–") if c is None else _cell(c, marks.get(_remark(c), "")) for c in found))
    for label, field in (("events", "event_seconds"), ("profiler", "profiler_seconds")):
        if any(getattr(cell, field) for cell in cells):
            for name in names:
                times = [getattr(by_place.get((name, p)), field, 0.0) for p in problems]
                table.add_row(Text(f"{name}, {label}", style="dim"), *(duration(s) if s else "–" for s in times))
    return _titled(title, table)


def _cell(cell: Cell, footnote: str) -> Text:
    if cell.failed:
        text = Text("–", style="dim")
    elif cell.candidate == "stock":
        text = Text(duration(cell.seconds))
    elif not cell.agrees:
        text = Text("differs", style="red")
    else:
        text = _times(cell.ratio)
    return text.append(footnote or " ", style="dim")


def verdicts(found: Mapping[str, Verdict], rows: Sequence[Row]) -> list[RenderableType]:
    """Return the regret of the choices against the best candidates, by op and in all, and the worst ones."""
    table = _table(
        "op",
        ">problems",
        ">geomean",
        ">95th %",
        ">slower than stock",
        ">× stock",
    )
    for name, v in found.items():
        cells = (f"{v.regret_geomean:.3f}", f"{v.regret_p95:.2f}", f"{100 * v.slower_share:.0f} %")
        style = "bold" if name == "all" else ""
        table.add_row(Text(name, style=style), str(v.problems), *cells, _times(v.speedup))
    worst = sorted(rows, key=lambda row: -row.regret)[:3]
    lines = [f"  {r.regret:.2f}  {r.problem}: chose {r.chosen}, best is {r.best}" for r in worst if r.regret > 1.05]
    title = "regret: time of the choice over that of the best candidate, problems off the grid"
    return [_titled(title, table), *(note(line) for line in ["worst:", *lines, ""] if lines)]


def workloads(found: Sequence[Workload]) -> RenderableType:
    """Return a line for each workload, off against on."""
    table = _table("workload", "dtype", ">off", ">on", ">× stock")
    for row in found:
        table.add_row(row.name, row.dtype, duration(row.off), duration(row.on), _times(row.speedup))
    return _titled("whole models, autokern off and on in turn", table)
