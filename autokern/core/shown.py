"""Shown: results as HTML for notebooks, as data frames and as plots, of what is installed for them."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autokern.core.errors import AutokernError

__all__ = ["axes", "frame", "portrait", "require", "table"]

_MOST = 40
"""Rows that a notebook shows."""


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """Return an HTML table; columns that begin with ``>`` are aligned right. Colours are the reader's own."""
    found = [list(row) for row in rows]
    sides = ["right" if column.startswith(">") else "left" for column in columns]
    more = [f"and {len(found) - _MOST:,} more: to_frame() has all"] if len(found) > _MOST else []

    def cells(tag: str, row: Sequence[str]) -> str:
        made = (
            f'<{tag} style="text-align:{side};vertical-align:top">{html.escape(cell).replace(chr(10), "<br>")}</{tag}>'
            for side, cell in zip(sides, row, strict=True)
        )
        return f"<tr>{''.join(made)}</tr>"

    head = cells("th", [column.removeprefix(">") for column in columns])
    body = "".join(cells("td", row) for row in found[:_MOST])
    below = "".join(f"<div>{html.escape(note)}</div>" for note in (*more, *notes))
    heading = f"<div><strong>{html.escape(title)}</strong></div>"
    return f"<div>{heading}<table><thead>{head}</thead><tbody>{body}</tbody></table>{below}</div>"


def frame(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Any:
    """Return a pandas data frame; AutokernError if pandas is not installed."""
    return _installed("pandas", "to_frame()").DataFrame(list(rows), columns=list(columns))


def axes(given: Any) -> Any:
    """Return the axes to draw on, new ones unless some are given; AutokernError if matplotlib is not installed."""
    return _installed("matplotlib.pyplot", "plot()").subplots(layout="constrained")[1] if given is None else given


def portrait(part: str, *given: Any) -> Any:
    """Return what a function of the command line's module of portraits, imported at the call, makes of a profile."""
    return getattr(importlib.import_module("autokern.cli.portrait"), part)(*given)


def require(names: Iterable[str], what: str) -> None:
    """Raise AutokernError if one of some packages is not installed; none is imported."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise _missing(name, what, "it is not installed")


def _installed(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _missing(name.partition(".")[0], what, str(error)) from error


def _missing(package: str, what: str, found: str) -> AutokernError:
    return AutokernError(f"{what} needs {package}; found: {found}. `pip install {package}` provides it")
