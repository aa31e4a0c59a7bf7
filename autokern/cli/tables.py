"""Tables as plain data, for the terminal, HTML pages and notebooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Rendered
from rich.text import Text

from autokern.cli.summary import Known, Line, Winner
from autokern.core.decision import Decision
from autokern.core.output import duration, legible
from autokern.core.problem import Problem
from autokern.runtime.api import grouped

_GAIN, _LOSS = 1.05, 0.95
_LEAST_ROOM, _LONG_WORD = 14, 40  # fewest characters of the last column, most for a long word; else rows are sentences
Served = Sequence[tuple[Decision, int]]
_COLOURS = {"✓": "green", "•": "yellow", "✗": "red"}


class Table(msgspec.Struct, frozen=True):
    """A table; columns that begin with ``>`` are aligned right, columns with ``×`` hold factors relative to stock."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def show(*parts: Table | str, stderr: bool = False) -> None:
    """Print tables (of empty ones, the title) and lines, which are not wrapped, so that paths can be copied."""
    console = Console(stderr=stderr, highlight=False)
    for part in parts:
        with console.capture() as captured:
            if isinstance(part, Table) and part.rows:
                console.print(_rendered(part, console.width))
            else:
                console.print(Text(part.title if isinstance(part, Table) else part, "dim"), soft_wrap=True)
        console.file.write(legible(captured.get(), console.file))
    console.file.flush()


def _rendered(table: Table, width: int) -> RenderableType:
    """Return a table for the terminal; if too little room is left for its last column, rows become sentences."""
    title, names = Text(table.title, "bold"), [column.removeprefix(">") for column in table.columns]
    *others, last = zip(names, *table.rows, strict=True)
    taken = sum(3 + max(len(line) for cell in column for line in cell.split("\n")) for column in others)
    longest = max(len(word) for cell in last for word in cell.split())
    room = max(map(len, last)) if table.columns[-1].startswith(">") else max(_LEAST_ROOM, min(longest, _LONG_WORD))
    if width - taken < room:
        pairs = (zip(names, row, strict=True) for row in table.rows)
        told = ("; ".join(f"{name} {cell}".strip() for name, cell in row if cell) for row in pairs)
        return Group(title, *(Padding(Text(line), (0, 0, 0, 2)) for line in told))
    made = Rendered(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, name in zip(table.columns, names, strict=True):
        side = "right" if column.startswith(">") else "left"
        made.add_column(name, justify=side, no_wrap=column != table.columns[-1], overflow="fold")  # type: ignore[arg-type]

    def cell(column: str, text: str) -> Text:
        factor = float(text) if "×" in column else 1.0
        colour = "green" if factor >= _GAIN else "red" if factor <= _LOSS else _COLOURS.get(text, "")
        return Text(text, colour)

    for row in table.rows:
        made.add_row(*map(cell, names, row))
    return Group(title, made)


def ops(found: Known, title: str) -> Table:
    """Return a table with a row for each op, device and dtype."""
    rows = []
    for row in found.ops:
        problems = f"{row.problems:,}" + (f", {row.disturbed:,} disturbed" if row.disturbed else "")
        fastest = row.fastest + (f"; banned: {', '.join(row.banned)}" if row.banned else "")
        rows.append((row.op, f"{row.device} {row.dtype}", problems, f"{row.speedup:.2f}", fastest))
    return Table(title, ("op", "on", ">problems", ">× stock", "fastest by size"), rows)


def of_known(found: Known, title: str) -> list[Table]:
    """Return the non-empty tables of ops, the exam, and bans."""
    made = [ops(found, title)]
    if found.exam:
        gain = math.exp(sum(math.log(row.shipped / row.new) for row in found.exam) / len(found.exam))
        told = f"exam: {gain:.2f} times the speed of the shipped choices; ×: stock's time over theirs"
        rows = [
            (row.task + (f"\n(here {row.kept} choices are kept)" if row.kept else ""), duration(row.seconds),
             f"{1 / row.shipped:.2f}", f"{1 / row.new:.2f}", f"{row.shipped / row.new:.2f}")
            for row in found.exam
        ]  # fmt: skip
        made.append(Table(told, ("timed in turns", ">stock", ">× shipped", ">× now", ">× gained"), rows))
    bans = [(f"{ban.op}.{ban.candidate}", f"{ban.device} {ban.dtype}", ban.reason) for ban in found.banned]
    return [table for table in (*made, Table("banned on this host", ("candidate", "on", "reason"), bans)) if table.rows]


def winners(found: Sequence[Winner]) -> list[Table]:
    """Return a table for each kind of problem: the fastest candidate at each measured size, and by how much."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for row in found:
        p, seconds = row.problem, (duration(row.seconds), duration(row.stock_seconds))
        words = f"{p.op} on {p.device} in {p.dtype}", p.variant, f"gradient of {p.grad}" if p.grad else ""
        lines = groups.setdefault(", ".join(filter(None, words)), [])
        lines.append((_sizes(p), row.candidate, f"{row.speedup:.2f}", *seconds))
    return [Table(of, (">problem", "fastest", ">× stock", ">time", ">stock"), rows) for of, rows in groups.items()]


def thresholds(found: Sequence[Line]) -> Table:
    """Return a table of the candidates by size, for each kind of problem."""
    rows = []
    for line in found:
        p, numbers = line.problem, [f"{name}={n}" for name in ("d", "rhs") if (n := getattr(line.problem, name))]
        more = p.grad and f"gradient of {p.grad}", f"batches of {p.batch}" if p.batch > 1 else "", *numbers
        words = (", ".join(filter(None, of)) for of in ((p.device, p.dtype, p.variant), more))
        rows.append(("\n".join(filter(None, words)), str(line)))
    return Table("choices by the number of columns or points, n", ("kind", "choice"), rows)


def candidates(decision: Decision, title: str = "") -> Table:
    """Return a table of a decision's candidates with their costs, or why they cannot serve."""
    rows = []
    for name, cost, why in decision.candidates():
        words = ("", "", "", "") if cost is None else cost.words()
        rows.append((name, *words, "runs" if name == decision.candidate else why and f"cannot: {why}"))
    return Table(title, ("candidate", ">latency", ">throughput", ">memory", ">error", ""), rows)


def decisions(found: Served, saved: Callable[[Served], str] | None = None) -> Table:
    """Return a table of a process's decisions by op, candidate and reason, with the `saved` time of calls if given."""
    columns, rows = ["what ran", ">calls", ">times stock", *[">saved, predicted"] * bool(saved), "on what, and why"], []
    for group in grouped(found):
        seconds = [saved(group.pairs)] if saved else []
        rows.append([group.ran, f"{group.calls:,}", group.gain, *seconds, f"{group.sizes}\n{group.why}".strip()])
    return Table("decisions of this process" if rows else "autokern took no decision in this process", columns, rows)


def counted(count: int, word: str) -> str:
    """Return a number of things in words: ``2 problems``, ``no notes``."""
    return f"{count or 'no'} {word}{'' if count == 1 else 's'}"


def _sizes(problem: Problem) -> str:
    """Return the sizes of a problem in the usual notation, e.g. ``16 × (400, 400) d=8``."""
    batch = f"{problem.batch} × " if problem.batch != 1 else ""
    more = "".join(f" {name}={getattr(problem, name)}" for name in ("d", "rhs") if getattr(problem, name))
    return f"{batch}({problem.m}, {problem.n}){more}"
