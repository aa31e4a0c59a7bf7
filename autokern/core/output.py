"""Output for people: numbers as text, results in notebooks, records of the log, and the progress of a measurement.

Text has only characters that the reader's stream can write. ``AUTOKERN_LOG`` sets the level of the logger `autokern`;
without it the logger stays as the user has set it. Records are shown only if the program has no handler of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from autokern.core.errors import uninterrupted
from autokern.core.problem import nothing

_PLAIN = str.maketrans("µ×–→✓•✗é₂⁰¹²³⁴⁵⁶⁷⁸⁹\u00a0", "ux->+*!e20123456789 ") | {ord("…"): "...", ord("≤"): "<="}
"""ASCII substitutes of the characters that a stream may be unable to write."""


def duration(seconds: float) -> str:
    """Return seconds as three digits with a unit, such as ``1.23 ms``."""
    unit, size = ("s", 1.0) if seconds >= 0.9995 else ("ms", 1e-3) if seconds >= 0.9995e-3 else ("µs", 1e-6)
    value = seconds / size
    return f"{value:.{0 if value >= 99.5 else 1 if value >= 9.95 else 2}f} {unit}"


def sized(count: int) -> str:
    """Return a number of bytes as text, such as ``1.5 GiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size / 8:
            return f"{count / size:,.0f} {unit}" if count >= 1000 * size else f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def legible(text: str, stream: Any = None) -> str:
    """Return text with substitutes for the characters that a stream cannot write, by default standard output."""
    encoding = getattr(sys.stdout if stream is None else stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    except LookupError:
        pass
    return text


class Shown:
    """A result that a notebook shows as a table; the module that renders the table is imported on first use."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(importlib.import_module("autokern.cli.report").html(self))

    def to_frame(self) -> Any:
        """Return a pandas data frame: a row for each candidate, decision, part of a model, or timing of a profile.

        Times are in seconds, memory in bytes. AutokernError if pandas is not installed.
        """
        return importlib.import_module("autokern.cli.report").frame(self)


Progress = Callable[[float, str], None]
_BAR = 20  # characters of the bar
_log = logging.getLogger("autokern")


class _Handler(logging.Handler):
    """Writes to the present `sys.stderr`, unless another handler gets the records."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        others = [handler for handler in _log.handlers if handler is not self]
        if _log.propagate:
            others += logging.getLogger().handlers
        if not others and sys.stderr is not None:
            try:
                print(f"autokern: {record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)
            except uninterrupted(Exception):  # as the handlers of logging do
                self.handleError(record)


_handler = _Handler()


def log_from(level: str | None) -> None:
    """Set the logger's level and show its records, if a level is given."""
    if level is not None:
        _log.setLevel(level.upper())
        _log.addHandler(_handler)


@contextlib.contextmanager
def display(title: str, show: bool = True) -> Iterator[Progress]:
    """Yield a function of the fraction done and a line of text; without a terminal, write only the title."""
    if not show or sys.stderr is None or not sys.stderr.isatty():
        if show and not _log.isEnabledFor(logging.INFO) and sys.stderr is not None:  # else the log shows the title
            print(title, file=sys.stderr, flush=True)
        _log.info("%s", title)
        yield nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    room = max(0, console.width - _BAR - len(" -:--:-- ") - 2)  # longer text would displace the bar
    columns = BarColumn(_BAR), TimeRemainingColumn(), TextColumn("{task.description}", markup=False)
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title[:room], total=1.0)
        yield lambda fraction, text: bar.update(task, completed=fraction, description=f"{title} {text}"[:room])
