"""Progress of a measurement: a bar with the time left on a terminal, one log line elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[float, str], None]
_log = logging.getLogger("autokern")


def silent(fraction: float, text: str) -> None:
    """Show nothing."""


@contextlib.contextmanager
def display(title: str, show: bool = True) -> Iterator[Progress]:
    """Yield a function that takes the fraction done and a line of text.

    Parameters
    ----------
    title : str
        Title of the bar.
    show : bool
        Whether to show a bar; without a terminal on standard error one log line is written instead.
    """
    if not show or not sys.stderr.isatty():
        _log.info("%s", title)
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TimeRemainingColumn(), TextColumn("[dim]{task.fields[at]}"))
    with Bar(TextColumn("{task.description}"), *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0, at="")

        def update(fraction: float, text: str) -> None:
            bar.update(task, completed=fraction, at=text[:60])

        yield update
