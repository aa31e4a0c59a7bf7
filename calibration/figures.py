"""Tables, the plot and the README's block for the figures that `end_to_end.py` measures.

Everything here is a function of the results as they stand in `end_to_end.json`; nothing is measured. May import no
other file of this folder.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

JSON_NAME, PLOT_NAME = "end_to_end.json", "co2.png"
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
OLD_THRESHOLD = 2048
KERNELS = {"rbf": "RBF", "matern52": "Matérn 5/2"}

Results = Mapping[str, Any]
console = Console(width=None if sys.stdout.isatty() else 140)


class Row(NamedTuple):
    """One comparison as text; `headline` rows go to the README."""

    what: str
    off: str
    on: str
    faster: str
    agreement: str
    headline: bool


def duration(seconds: float) -> str:
    """Return a time to three digits with its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            value = seconds / size
            return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"
    raise AssertionError


def factor(figure: Results) -> str:
    """Return the median of the paired ratios with its quartiles."""
    low, high = figure["quartiles"]
    return f"{figure['ratio']:.2f}× ({low:.2f}–{high:.2f})"


def sentence(figure: Results) -> str:
    """Return one comparison in words."""
    return f"off {duration(figure['off'])}, on {duration(figure['on'])}, {factor(figure)} faster"


def small(value: float) -> str:
    """Return an error to one digit."""
    return f"{value:.0e}" if value else "0"


def rows(results: Results) -> Iterator[Row]:
    """Yield every comparison of the workloads that were run."""
    if "diabetes" in results:
        yield from diabetes_rows(results["diabetes"])
    if "co2" in results:
        yield from co2_rows(results["co2"])
    if "cg" in results:
        yield from cg_rows(results["cg"])


def diabetes_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each trained model."""
    for case in figures["cases"]:
        what = f"training step, diabetes, {KERNELS[case['kernel']]}, {case['dtype']}"
        agreement = f"loss {small(case['loss_difference'])}"
        yield Row(what, duration(case["off"]), duration(case["on"]), factor(case), agreement, True)


def co2_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for some sizes along the stream, and one for the whole."""
    checks = {check["n"]: check for check in figures["checks"]}
    headlines = {800, figures["last"]}
    for case in figures["at"]:
        n = case["n"]
        agreement = forecast_agreement([checks[n]]) if n in checks else ""
        times = duration(case["off"]), duration(case["on"])
        yield Row(f"CO₂ stream, update at n = {n:,}", *times, factor(case), agreement, n in headlines)
    total = figures["total"]
    what = f"CO₂ stream, n from {figures['start']:,} to {figures['last']:,}"
    times = duration(total["off"]), duration(total["on"])
    agreement = forecast_agreement(figures["checks"])
    yield Row(what, *times, f"{total['off'] / total['on']:.2f}×", agreement, True)


def forecast_agreement(checks: Sequence[Results]) -> str:
    """Return the largest errors of mean and variance against an exact refit, under autokern and in stock."""
    on, off = (
        " / ".join(small(max(check[side][what] for check in checks)) for what in ("mean", "variance"))
        for side in ("on", "off")
    )
    return f"forecast {on} (stock {off})"


def cg_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each size and dtype; the largest size is the headline."""
    largest = max(case["n"] for case in figures["cases"])
    for case in figures["cases"]:
        what = f"{figures['iterations']} CG iterations, n = {case['n']:,}, {case['dtype']}"
        agreement = f"iterate {small(case['difference'])}"
        yield Row(what, duration(case["off"]), duration(case["on"]), factor(case), agreement, case["n"] == largest)


def caption(results: Results) -> str:
    """Return where, when and how the figures were measured."""
    cpu, versions = results["host"]["cpu"], results["versions"]
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "gpytorch", "linear_operator"))
    quick = " (quick run)" if results["quick"] else ""
    return (
        f"{cpu['model']}, {cpu['torch_threads']} threads; {libraries}; {results['date']}{quick}. Stock and autokern "
        "take turns in one run: times are medians, factors medians of paired ratios (quartiles). Agreement is the "
        "largest difference from stock; for forecasts, that of mean / variance from an exact refit."
    )


def markdown_table(results: Results) -> str:
    """Return the before/after table of the README."""
    lines = ["| | stock | autokern | faster | agreement |", "|---|---:|---:|---:|---|"]
    lines += [f"| {' | '.join(row[:5])} |" for row in rows(results) if row.headline]
    return "\n".join([*lines, "", caption(results)])


def with_block(text: str, table: str) -> str:
    """Return a document with the block between the markers replaced.

    Raises
    ------
    ValueError
        If the document does not hold exactly one pair of markers, in order.
    """
    if (text.count(BEGIN), text.count(END)) != (1, 1) or text.index(BEGIN) > text.index(END):
        raise ValueError(f"no place for the figures: expected one {BEGIN} followed by one {END}")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def refresh(document: Path, folder: Path, check: bool) -> int:
    """Bring the figures in a document up to date; with `check` change nothing and return 1 if they are not."""
    text = document.read_text(encoding="utf-8")
    fresh = with_block(text, markdown_table(json.loads((folder / JSON_NAME).read_text(encoding="utf-8"))))
    if check and fresh != text:
        console.print(f"The figures in {document.name} are not those of {JSON_NAME}: rewrite them with --readme.")
        return 1
    if not check:
        document.write_text(fresh, encoding="utf-8")
    return 0


def show(results: Results) -> None:
    """Print every comparison, and the errors of the stream's forecasts."""
    table = Table(title="autokern off and on")
    for name in ("", "stock", "autokern", "faster", "agreement"):
        table.add_column(name, justify="right" if name in ("stock", "autokern", "faster") else "left")
    for row in rows(results):
        table.add_row(*row[:5])
    console.print(table)
    console.print(caption(results), style="dim")
    if "cg" in results:
        console.print(f"CG, geometric mean of all sizes and dtypes: {results['cg']['geomean']:.2f}×")
    if "co2" in results:
        console.print(forecast_table(results["co2"]))


def forecast_table(figures: Results) -> Table:
    """Return the errors of a year's forecast, mean / variance, against an exact refit along the stream."""
    resident = " → ".join(f"{figures['resident_bytes'][key] / 2**20:.0f}" for key in ("first", "last"))
    peak = figures["resident_bytes"]["peak"] / 2**20
    table = Table(
        title="errors of 52 weeks of forecast, mean / variance", caption=f"resident {resident} MiB, peak {peak:.0f} MiB"
    )
    for name in ("n", "stock", "autokern", "refit, default settings"):
        table.add_column(name, justify="right")
    for check in figures["checks"]:
        errors = [" / ".join(map(small, check[key].values())) for key in ("off", "on", "default_refit")]
        table.add_row(f"{check['n']:,}", *errors)
    return table


def plain(value: Any) -> Any:
    """Return `value` with mapping keys, and all that JSON does not know, as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (int, float, str, type(None))) else str(value)


def brief(value: Any) -> Any:
    """Return `value` with every float rounded to six digits: no timing and no error is known better."""
    if isinstance(value, Mapping):
        return {key: brief(item) for key, item in value.items()}
    if isinstance(value, list):
        return [brief(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write(results: Results, folder: Path) -> None:
    """Write the JSON, with each list of numbers on one line, and the plot if there is a stream to plot."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(brief(plain(results)), indent=1, ensure_ascii=False, allow_nan=False)
    text = re.sub(r"\[[-+.\deE,\s]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    (folder / JSON_NAME).write_text(text + "\n", encoding="utf-8")
    if "co2" in results:
        plot(results["co2"], folder / PLOT_NAME)


def smooth(values: NDArray[np.float64], width: int = 25) -> NDArray[np.float64]:
    """Return the running median over `width` values, over fewer at the ends."""
    half = width // 2
    return np.array([np.median(values[max(i - half, 0) : i + half + 1]) for i in range(len(values))])


def plot(figures: Results, path: Path) -> None:
    """Draw time per update against the number of points, autokern off and on."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for side, label, colour in (("off", "stock", "tab:gray"), ("on", "autokern", "tab:blue")):
        times = 1e3 * np.array(figures["seconds"][side])
        n = figures["start"] + np.arange(len(times))
        axes.plot(n, times, ".", color=colour, alpha=0.2, markersize=2)
        axes.plot(n, smooth(times), color=colour, label=f"{label} (running median of 25)")
    if figures["last"] > OLD_THRESHOLD:
        axes.axvline(OLD_THRESHOLD, color="black", linestyle=":", linewidth=1, label="the old QR threshold, 2048")
    axes.set(yscale="log", xlabel="points in the model, n", ylabel="time per update (ms)")
    axes.set_title("Mauna Loa CO₂, one get_fantasy_model per week, float64")
    axes.grid(which="both", alpha=0.2)
    axes.legend()
    figure.savefig(path, dpi=150, metadata={"Software": None})
