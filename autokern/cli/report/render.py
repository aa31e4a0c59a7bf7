"""HTML of a page: facts as JSON on standard input, the document on standard output.

This file is run by itself and imports nothing of autokern. Plots are SVG inside of the document; their text is
text, and their colours are variables of the style sheet, so that one document serves light and dark.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

_COLOURS = 8
"""Colours of candidates; more of them differ by their dashes."""
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_INK = {"#010101": "var(--ink)", "#020202": "var(--soft)", "#030303": "var(--grid)"}
_INK |= {f"#0a0a{k:02x}": f"var(--s{k})" for k in range(_COLOURS)}
"""Colours that stand for variables of the style sheet until the plot is drawn."""
_TEXT, _SOFT, _GRID = list(_INK)[:3]
_LEAST_TICKS, _MOST_TICKS = 3, 7
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11, "text.color": _TEXT,
    "axes.edgecolor": _SOFT, "axes.labelcolor": _TEXT, "xtick.color": _TEXT, "ytick.color": _TEXT,
    "grid.color": _GRID, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "lines.markersize": 3.5, "figure.constrained_layout.use": True,
}  # fmt: skip


def styles(plot: dict[str, Any]) -> dict[str, tuple[int | None, int]]:
    """Return colour and dash by line; stock has the colour of text."""
    others = [line["name"] for line in plot["lines"] if line["name"] != "stock"]
    return {"stock": (None, 0)} | {name: (k % _COLOURS, k // _COLOURS % len(_DASHES)) for k, name in enumerate(others)}


def svg(plot: dict[str, Any], number: int) -> str:
    """Return a plot as an SVG element; `number` keeps the names inside apart from those of other plots."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, NullLocator

    mpl.use("svg")
    style = styles(plot)
    settings: Any = {**_SETTINGS, "svg.hashsalt": f"plot {number}"}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(5.0, 3.4))  # as wide as its place: this sets the size of its text beside it
        ax = figure.subplots()
        ax.set(xscale="log", yscale="log", xlabel="n", ylabel="time of a call")
        for line in reversed(plot["lines"]):  # stock is drawn last, above all others
            colour, dash = style[line["name"]]
            ink = _TEXT if colour is None else f"#0a0a{colour:02x}"
            ax.plot(line["x"], line["y"], color=ink, linestyle=_DASHES[dash], linewidth=1.3)
            ax.plot(line["x"], [math.nan if y is None else y for y in line["runs"]], color=ink, linewidth=3.5)
            for n, seconds in line["points"]:
                ax.plot(n, seconds, "o", color=ink)
        for axis, ends in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
            axis.set_major_locator(FixedLocator(_ticks(*ends)))
            axis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(EngFormatter(unit="s", sep="\N{NO-BREAK SPACE}"))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        top: Any = {"transform": ax.get_xaxis_transform(), "clip_on": False}
        ax.plot(plot["marks"], [1.0] * len(plot["marks"]), "|", color=_TEXT, markersize=9, **top)
        out = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=no_metadata)
    return _inline(out.getvalue(), plot["title"])


def _ticks(low: float, high: float) -> list[float]:
    """Return some round numbers from one end to the other, the ends where there is none between."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for parts in ((1,), (1, 2, 5), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)):
        found = [part * 10.0**k for k in decades for part in parts if low <= part * 10.0**k <= high]
        if len(found) >= _LEAST_TICKS:
            break
    return found[:: 1 + len(found) // _MOST_TICKS] or [low, high]


def _inline(text: str, title: str) -> str:
    """Return the SVG element for a document: no prologue, no names of groups, colours by the style sheet."""
    from markupsafe import escape

    text = text[text.index("<svg") :]
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"#0[0-9a-f]{5}", lambda found: _INK.get(found[0], found[0]), text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*sans-serif", "system-ui, sans-serif", text)
    for size in ("width", "height"):  # the style sheet says
        text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text)
    return f'<svg role="img" aria-label="{escape(title)}: time of a call over n"' + text.removeprefix("<svg")


def marked(text: str) -> str:
    """Return text as HTML, with what stands between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def document(page: dict[str, Any]) -> str:
    """Return the HTML document of a page."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    options: Any = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    environment = jinja2.Environment(loader=loader, **options)
    numbers = itertools.count()
    environment.globals.update(svg=lambda plot: svg(plot, next(numbers)), styles=styles, marked=marked)
    return environment.get_template("page.html").render(page=page)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, which has modules of other names than Python expects there
    sys.stdout.buffer.write(document(json.load(sys.stdin.buffer)).encode())
