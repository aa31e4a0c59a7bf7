"""HTML of a page: its facts in a template, with plots as SVG elements.

Text of a plot is text, and its colours are variables of the style sheet, so that one document serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autokern.core.units import duration

_COLOURS, _DASHES = 8, 4
"""Colours of candidates; more of them differ by their dashes."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 450.0, 12.0, 265.0
"""Edges of the area of a plot, in units of its view box."""
_LEAST_TICKS, _MOST_TICKS = 3, 7


class _Axis(NamedTuple):
    """A logarithmic axis: the values at its ends, and where these are."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        """Return where a value is."""
        return self.start + (self.stop - self.start) * math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        """Return some round numbers from one end to the other, the ends where there is none between."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for parts in ((1,), (1, 2, 5), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)):
            found = [part * 10.0**k for k in decades for part in parts if self.low <= part * 10.0**k <= self.high]
            if len(found) >= _LEAST_TICKS:
                break
        return found[:: 1 + len(found) // _MOST_TICKS] or [self.low, self.high]


def _axis(values: Sequence[float], start: float, stop: float) -> _Axis:
    return _Axis(min(values) / 1.1, max(values) * 1.1, start, stop)


def styles(plot: dict[str, Any]) -> dict[str, str]:
    """Return the classes of each line, of colour and dash; stock has the colour of text."""
    others = [line["name"] for line in plot["lines"] if line["name"] != "stock"]
    classes = {name: f"c{k % _COLOURS} dash{k // _COLOURS % _DASHES}" for k, name in enumerate(others)}
    return {"stock": "dash0", **classes}


def drawn(plot: dict[str, Any]) -> dict[str, Any]:
    """Return what the template draws of a plot: lines, ticks and marks, in units of its view box."""
    lines = plot["lines"]
    x = _axis([n for line in lines for n in line["x"]], _LEFT, _RIGHT)
    y = _axis([s for line in lines for s in (*line["y"], *(point[1] for point in line["points"]))], _BOTTOM, _TOP)

    def path(sizes: Iterable[float], seconds: Iterable[float | None]) -> str:
        found, pen = [], "M"
        for n, s in zip(sizes, seconds, strict=True):
            found += [] if s is None else [f"{pen}{x.at(n):.1f} {y.at(s):.1f}"]
            pen = "M" if s is None else "L"
        return "".join(found)

    def time(seconds: float) -> str:
        number, unit = duration(seconds).split()
        return f"{float(number):g} {unit}"

    each = styles(plot)
    return {
        "lines": [
            {"style": each[line["name"]], "path": path(line["x"], line["y"]), "runs": path(line["x"], line["runs"]),
             "dots": [(round(x.at(n), 1), round(y.at(s), 1)) for n, s in line["points"]]}
            for line in reversed(lines)  # stock is drawn last, above all others
        ],
        "across": [(round(x.at(n), 1), f"{n:,.0f}") for n in x.ticks()],
        "up": [(round(y.at(s), 1), time(s)) for s in y.ticks()],
        "marks": [round(x.at(n), 1) for n in plot["marks"]],
    }  # fmt: skip


def document(page: dict[str, Any]) -> str:
    """Return the HTML document of a page."""
    import jinja2
    import markupsafe

    def marked(text: str) -> markupsafe.Markup:
        """Return text as HTML, with what stands between backticks as code."""
        parts = [
            markupsafe.Markup("<code>{}</code>" if k % 2 else "{}").format(p) for k, p in enumerate(text.split("`"))
        ]
        return markupsafe.Markup("").join(parts)

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    options: Any = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    environment = jinja2.Environment(loader=loader, **options)
    environment.globals.update(drawn=drawn, styles=styles, marked=marked)
    return environment.get_template("page.html").render(page=page)
