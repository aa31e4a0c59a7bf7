"""What is shown on standard error: records of the log, and the progress of a measurement.

``AUTOKERN_LOG`` sets the level of the logger `autokern`. Without the variable the logger stays as the user has set it.
Records are shown only if the program has no handler of its own. Progress is a bar with the time left on a terminal,
elsewhere one line.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from autokern.core.recovery import uninterrupted

Progress = Callable[[float, str], None]
_BAR = 20
"""Characters of the bar."""
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


def silent(fraction: float, text: str) -> None:
    """Show nothing."""


@contextlib.contextmanager
def display(title: str, show: bool = True) -> Iterator[Progress]:
    """Yield a function of the fraction done and a line of text; without a terminal, write only the title."""
    if not show or sys.stderr is None or not sys.stderr.isatty():
        if show and not _log.isEnabledFor(logging.INFO) and sys.stderr is not None:  # else the log shows the title
            print(title, file=sys.stderr, flush=True)
        _log.info("%s", title)
        yield silent
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
