"""Pages as plain data: text that is ready to be read, and numbers for plots and bars."""

from __future__ import annotations

import re

import msgspec

__all__ = ["Card", "Line", "Page", "Plot", "Section", "Table", "Tile", "without_paths"]

_PATH = re.compile(r"(?<![\w./~\\])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\:;,'\"()<>]+){2,}[/\\]?")


class Tile(msgspec.Struct, frozen=True):
    """One figure at the top of a page."""

    label: str
    value: str
    note: str = ""


class Table(msgspec.Struct, frozen=True):
    """A table; columns that begin with ``>`` are aligned right.

    Each row may have a bar, as a part of the longest one; `bar` says of what.
    """

    columns: list[str]
    rows: list[list[str]]
    bars: list[float] = []
    bar: str = ""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A line that opens: what it is about, its figure with a bar, and below the reasons and a table."""

    title: str
    words: str
    value: str
    bar: float = 0.0
    lines: list[str] = []
    table: Table | None = None


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a plot, with its band and with points beside it; stock is the reference of all others."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] = []
    high: list[float] = []
    points: list[tuple[float, float]] = []
    stock: bool = False
    note: str = ""


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """A plot of time over size, both logarithmic."""

    title: str
    xlabel: str
    ylabel: str
    lines: list[Line]  # at least one
    choices: list[tuple[float, float, str]] = []  # from where to where which line is chosen
    marks: list[float] = []  # sizes that the program asked


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a page under a heading."""

    title: str
    notes: list[str] = []
    facts: list[tuple[str, str]] = []
    tables: list[Table] = []
    cards: list[Card] = []
    plots: list[Plot] = []


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A whole page: its headings, its figures, and its sections."""

    kind: str
    title: str
    words: str
    tiles: list[Tile] = []
    notes: list[str] = []
    sections: list[Section] = []


def without_paths(text: str) -> str:
    """Return text with an ellipsis for each path of this machine.

    Examples
    --------
    >>> without_paths("no compiler in /opt/gcc/bin; matern52/same/ard")
    'no compiler in …; matern52/same/ard'
    """
    return _PATH.sub("…", text)
