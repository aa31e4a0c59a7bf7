"""Progress of a measurement: on a terminal a bar with the time left, elsewhere one line."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[float, str], None]
_BAR = 20
"""Characters of the bar."""
_log = logging.getLogger("autokern")


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
