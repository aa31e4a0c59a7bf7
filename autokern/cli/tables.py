"""Tables for the terminal, made of plain data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autokern.cli.doctor import Finding
from autokern.cli.summary import Known, Rough, Summary, Winner
from autokern.cli.thresholds import Line
from autokern.core.decision import Decision
from autokern.core.problem import Problem
from autokern.core.units import duration, legible
from autokern.tuning.profile import Ban, Crossover, Examined

_GAIN, _LOSS = 1.05, 0.95
_MOST_STEPS = 5
_LEAST_ROOM = 14
"""Characters for the last column below which it goes on lines of its own; its longest word must fit too."""
_MARKS = {"ok": ("✓", "green"), "note": ("•", "yellow"), "problem": ("✗", "red")}


def show(*parts: RenderableType, stderr: bool = False) -> None:
    """Print tables or lines on standard output, or on standard error."""
    console = Console(stderr=stderr, highlight=False)
    for part in parts:
        with console.capture() as captured:
            console.print(part, soft_wrap=isinstance(part, Text))  # a path that is broken up cannot be copied
        console.file.write(legible(captured.get(), console.file))
    console.file.flush()


def note(text: str, style: str = "dim") -> Text:
    """Return text without markup."""
    return Text(text, style=style)


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str | Text]]) -> RenderableType:
    """Return a table under a title that may be wider than it; columns that begin with ``>`` are aligned right.

    Where too little room is left for the last column, its text stands below the others.
    """
    columns = list(columns)
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    taken = 2 + sum(_widest(column, cells, k) + 3 for k, column in enumerate(columns[:-1]))
    longest = max((len(word) for row in cells for word in row[-1].plain.split()), default=0)
    if not columns[-1].startswith(">") and Console().width - taken < max(_LEAST_ROOM, longest):
        return _stacked(title, columns, cells, taken)
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    *others, last = columns
    for column in (*others, last):
        side: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        wraps = column in (last, "problem")
        made.add_column(column.removeprefix(">"), justify=side, no_wrap=not wraps, overflow="fold")
    for row in cells:
        made.add_row(*row)
    return Group(Text(title, style="bold"), made)


def _widest(column: str, rows: Sequence[Sequence[Text]], k: int) -> int:
    lines = (line for row in rows for line in row[k].plain.split("\n"))
    return max([len(column.removeprefix(">")), *map(len, lines)])


def _stacked(title: str, columns: Sequence[str], rows: Sequence[Sequence[Text]], taken: int) -> RenderableType:
    """Return a table whose last column stands on lines of its own."""
    above = columns[:-1]
    parts: list[RenderableType] = [Text(title, style="bold"), Text("")]
    for row in ([Text(column.removeprefix(">"), style="bold") for column in columns], *rows):
        made = Table(box=None, show_header=False, pad_edge=False)
        for k, column in enumerate(above):
            fits = taken <= Console().width or column not in (">problem", "problem")
            side: Literal["left", "right"] = "right" if column.startswith(">") else "left"
            made.add_column(
                justify=side, no_wrap=fits, overflow="fold", min_width=_widest(column, rows, k) if fits else 1
            )
        made.add_row(*row[:-1])
        parts += [made, Padding(row[-1], (0, 0, 0, 4))]
    return Group(*parts)


def times(ratio: float) -> Text:
    """Return a speed-up, coloured where it is more than noise."""
    if math.isnan(ratio):  # not timed
        return Text("–", style="dim")
    return Text(f"{ratio:.2f}", style="green" if ratio >= _GAIN else "red" if ratio <= _LOSS else "")


def once(labels: Iterable[str]) -> Iterator[str]:
    """Yield labels, blank where they repeat the one before."""
    before = None
    for label in labels:
        yield "" if label == before else label
        before = label


def by_size(fastest: str, crossovers: Sequence[Crossover]) -> str:
    """Return in words which candidate is fastest at which size, or how often, as `Summary.fastest` tells."""
    if not crossovers:
        return fastest
    if len(crossovers) > _MOST_STEPS:  # more than one size decides
        often = Counter(c.above for c in crossovers).most_common(1)[0][0]
        return f"mostly {often}, by m and n: autokern show OP"
    return ", ".join([*(f"{c.below} to {c.size:.0f}" for c in crossovers), crossovers[-1].above])


def summaries(found: Sequence[Summary], title: str) -> RenderableType:
    """Return a line for each op, device and dtype."""
    rows: list[tuple[str | Text, ...]] = []
    for op, row in zip(once(row.op for row in found), found, strict=True):
        words = Text(by_size(row.fastest, row.crossovers))
        if row.banned:
            words.append(f"  banned: {', '.join(row.banned)}", style="red")
        rows.append((op, f"{row.device} {row.dtype}", row.measured, times(row.speedup), words))
    return table(title, ("op", "on", ">problems", ">× stock", "fastest by size"), rows)


def sizes(problem: Problem) -> str:
    """Return the sizes of a problem in the usual notation, e.g. ``16 × (400, 400) d=8``."""
    batch = f"{problem.batch} × " if problem.batch != 1 else ""
    more = "".join(f" {name}={getattr(problem, name)}" for name in ("d", "rhs") if getattr(problem, name))
    return f"{batch}({problem.m}, {problem.n}){more}"


def _words(*first: str, problem: Problem) -> str:
    grad = f"gradient of {problem.grad}" if problem.grad else ""
    return ", ".join(filter(None, (*first, problem.variant, grad)))


def winners(found: Sequence[Winner]) -> RenderableType:
    """Return a table for each kind of problem: the fastest candidate at each measured size, and by how much."""
    groups: dict[str, list[tuple[str | Text, ...]]] = {}
    for row in found:
        p, seconds = row.problem, (duration(row.seconds), duration(row.stock_seconds))
        lines = groups.setdefault(_words(f"{p.op} on {p.device} in {p.dtype}", problem=p), [])
        lines.append((sizes(p), row.candidate, times(row.speedup), *seconds))
    columns = (">problem", "fastest", ">× stock", ">time", ">stock")
    return Group(*(table(title, columns, rows) for title, rows in groups.items()))


def rough(found: Sequence[Rough]) -> RenderableType:
    """Return a line for each candidate of lower precision: its gain and its error."""
    title = "lower precision, only when asked for; × best: of those within the bound"
    columns = ("op", "on", "candidate", ">problems", ">× best", ">error")
    rows = []
    for row in found:
        gain, error = times(row.speedup), f"{row.relative_error:.0e}"
        rows.append((row.op, f"{row.device} {row.dtype}", row.candidate, str(row.problems), gain, error))
    return table(title, columns, rows)


def bans(found: Sequence[Ban]) -> RenderableType:
    """Return a line for each candidate that may not run on this host."""
    rows = ((f"{ban.op}.{ban.candidate}", f"{ban.device} {ban.dtype}", ban.reason) for ban in found)
    return table("banned on this host", ("candidate", "on", "reason"), rows)


def exam(found: Sequence[Examined]) -> RenderableType:
    """Return what a calibration gains in things that programs do, and where other choices than its own serve."""
    rows: list[tuple[str | Text, ...]] = []
    for row in found:
        task = Text(row.task).append(f"\n  (here {row.kept} choices are kept)" if row.kept else "", style="dim")
        speedups = times(1 / row.shipped), times(1 / row.new), times(row.shipped / row.new)
        rows.append((task, duration(row.seconds), *speedups))
    gain = math.exp(sum(math.log(row.shipped / row.new) for row in found) / len(found))
    title = f"exam: {gain:.2f} times the speed of the shipped choices; ×: stock's time over theirs"
    return table(title, ("timed in turns", ">stock", ">× shipped", ">× now", ">gain"), rows)


def thresholds(found: Sequence[Line]) -> RenderableType:
    """Return which candidate serves up to which size, for each kind of problem."""
    rows = [(_words(p.dtype, problem=p), sizes(p.replace(m=0, n=0)).removeprefix("(0, 0)").strip(), str(line))
            for line in found for p in (line.problem,)]  # fmt: skip
    return table("choices by the number of columns or points, n", ("kind", "sizes", "choice"), rows)


def counted(count: int, word: str) -> str:
    """Return a number of things in words.

    Examples
    --------
    >>> counted(2, "problem"), counted(0, "note")
    ('2 problems', 'no notes')
    """
    return f"{count or 'no'} {word}{'' if count == 1 else 's'}"


def findings(found: Sequence[Finding]) -> RenderableType:
    """Return a line for each finding, under it the advice, and at the end their numbers."""
    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column()
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for row in found:
        mark, colour = _MARKS[row.status]
        words = Text(row.found)
        if row.advice:
            words.append(f"\n→ {row.advice}", style=colour)
        made.add_row(Text(mark, style=colour), Text(row.name, style="bold"), words)
    statuses = Counter(row.status for row in found)
    problems, notes = (counted(statuses[status], status) for status in ("problem", "note"))
    colour = "red" if statuses["problem"] else "green"
    return Group(made, note(f"{len(found)} checks, {problems}, {notes}", colour))


def decisions(found: Sequence[tuple[Decision, int]]) -> RenderableType:
    """Return the decisions of a process, those that served most calls first."""
    if not found:
        return note("autokern took no decision in this process")
    rows = []
    for decision, calls in sorted(found, key=lambda pair: -pair[1]):
        p = decision.problem
        name = Text(f"{p.op} {sizes(p)}\n").append(_words(p.dtype, p.device, problem=p), style="dim")
        rows.append((str(calls), name, decision.candidate, times(decision.margin), decision.why))
    return table("autokern: decisions", (">calls", "problem", "runs", ">× stock", "why"), rows)


def stats(counts: Mapping[str, Mapping[str, int]]) -> RenderableType:
    """Return the number of calls by op and candidate."""
    if not counts:
        return note("autokern served no call in this process")
    found = [(op, *pair) for op, by in counts.items() for pair in sorted(by.items(), key=lambda pair: -pair[1])]
    ops = once(op for op, *_ in found)
    rows = ((op, candidate, f"{calls:,}") for op, (_, candidate, calls) in zip(ops, found, strict=True))
    return table("autokern: calls", ("op", "candidate", ">calls"), rows)


def show_known(found: Known, title: str) -> None:
    """Print what is known of ops, what of it is rough, and what is banned."""
    if found.ops:
        show(summaries(found.ops, title))
    if found.exam:
        show(exam(found.exam))
    if found.rough:
        show(rough(found.rough))
    if found.banned:
        show(bans(found.banned))
