"""Tables, plots, the JSON and the block of docs/figures.md for what `end_to_end.py` measures; measures nothing."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import documents
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rows import COUNTS, KERNELS, Results, factor, per_second, rows, slashed, small

from autokern.core.output import duration
from autokern.system.files import write_whole

JSON_NAME, PLOT_NAME, TERRAIN_NAME = "end_to_end.json", "co2.png", "elevation.png"
OLD_THRESHOLD = 2048

console = Console(width=None if sys.stdout.isatty() else 150)


def machine(host: Results) -> str:
    threads = host["cpu"]["torch_threads"]
    return f"{host['cpu']['model']}, {threads} thread{'s' * (threads > 1)}"


def origin(results: Results) -> str:
    """Return on what, with which versions and when the results of one run were measured."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if name != "python")
    return f"{machine(results['host'])}; {versions}; {results['date']}"


def runs(results: Results) -> str:
    """Return where and when the workloads were run: one place and date, or each with its workloads."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, figures in results.items():
        if isinstance(figures, Mapping) and "run" in figures:
            run = figures["run"]
            found.setdefault(run["host"], {}).setdefault(run["date"], []).append(name)
    if sum(map(len, found.values())) < 2:
        found = {host: {date: [] for date in dates} for host, dates in found.items()}
    places = found or {machine(results["host"]): {results["date"]: []}}
    return "; ".join(
        f"{host}: "
        + ", ".join(f"{date} ({', '.join(names)})" if names else date for date, names in sorted(dates.items()))
        for host, dates in places.items()
    )


def caption(results: Results) -> str:
    """Return where, when and how the figures were measured."""
    versions = results["versions"]
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "gpytorch", "linear_operator"))
    quick = " (quick run)" if results["quick"] else ""
    training = "for training, that of loss / gradient, relative, from stock without CG; "
    return (
        f"{libraries}. {runs(results)}{quick}. Stock and autokern take turns in one run: times are "
        "medians, factors medians of paired ratios (quartiles). Agreement is the largest "
        f"difference from stock; {training if 'training' in results else ''}"
        "for forecasts, that of mean / variance from an exact refit."
    )


def markdown_table(results: Results) -> str:
    lines = ["| | stock | autokern | faster | agreement |", "|---|---:|---:|---:|---|"]
    lines += [f"| {' | '.join(row[:5])} |" for row in rows(results) if row.headline]
    return "\n".join([*lines, "", caption(results)])


def read(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / JSON_NAME).read_text(encoding="utf-8")))


def refresh(document: Path, folder: Path, check: bool) -> int:
    """Bring the figures in a document up to date; with `check` change nothing and return 1 if they are not."""
    same = documents.refresh(document, "figures", markdown_table(read(folder)) + "\n", check)
    if check and not same:
        console.print(f"The figures in {document.name} are not those of {JSON_NAME}: rewrite them with --readme.")
    return int(check and not same)


def table(title: str, heads: Sequence[str], caption: str = "", left: int = 1) -> Table:
    """Return an empty table; all columns but the first `left` hold figures."""
    made = Table(title=title, caption=caption or None)
    for column, head in enumerate(heads):
        made.add_column(head, justify="left" if column < left else "right")
    return made


def show(results: Results) -> None:
    """Print every comparison, and the tables of the workloads that need more than one."""
    every = table("autokern off and on", ("", "stock", "autokern", "faster"))
    every.add_column("agreement")
    for row in rows(results):
        every.add_row(*map(escape, row[:5]))
    console.print(every)
    console.print(caption(results), style="dim")
    if "cg" in results:
        console.print(f"CG, geometric mean of all sizes and dtypes: {results['cg']['geomean']:.2f}×")
    for name, made in TABLES.items():
        if name in results:
            console.print(made(results[name]))
    if "memory" in results:
        memory = results["memory"]
        console.print(f"memory over {memory['fits']:,} fits of {memory['n']} points: {resident(memory)}")


def resident(figures: Results) -> str:
    """Return resident memory at the beginning and at the end, and its peak."""
    first, last, peak = (f"{figures['resident_bytes'][key] / 2**20:.0f}" for key in ("first", "last", "peak"))
    return f"resident {first} → {last} MiB, peak {peak} MiB"


def training_table(figures: Results) -> Table:
    """Return each step against both of stock's ways and the floor."""
    notes = [
        f"against {name}: least {of['least']:.2f}×, geomean {of['geomean']:.2f}×"
        for name, of in figures["summary"].items()
    ]
    notes.append(f"floor: potrf, potri and {figures['passes']} passes over the matrix")
    heads = ("kernel", "dtype", "n", "stock", "exact", "autokern", "× stock", "× exact", "floor", "floors")
    made = table(f"training, d = {figures['d']}: stock, exact stock, autokern", heads, "\n".join(notes), 2)
    for case in sorted(figures["cases"], key=lambda case: (case["kernel"], case["dtype"])):
        default, exact = case["against_default"], case["against_exact"]
        times = (duration(seconds) for seconds in (default["off"], exact["off"], default["on"]))
        floor = (duration(case["floor"]["seconds"]), factor(case["floor"])) if "floor" in case else ("", "")
        names = KERNELS[case["kernel"]], case["dtype"], f"{case['n']:,}"
        made.add_row(*names, *times, factor(default), factor(exact), *floor)
    return made


def jump_table(figures: Results) -> Table:
    """Return loss and norm of the gradient around stock's limit for Cholesky, with their errors against float64."""
    heads = "dtype, n, exact loss, stock, autokern, exact gradient, stock, autokern, stock, autokern"
    title = f"noise {figures['noise']:g}: exact loss and norm of its gradient, relative errors; time of a step"
    made = table(title, heads.split(", "))
    for case in figures["cases"]:
        cells = [case["dtype"], f"{case['n']:,}"]
        for value, what in (("loss", "loss"), ("gradient_norm", "gradient")):
            errors = (small(case["error"][side][what]) for side in ("off", "on"))
            cells += [f"{case[value]['truth']:.4f}", *errors]
        made.add_row(*cells, duration(case["off"]), duration(case["on"]))
    return made


def processes_table(figures: Results) -> Table:
    """Return steps per second of all processes together, stock → autokern, for every size."""
    counts = sorted({case["processes"] for case in figures["cases"]})
    heads = ("n", *(COUNTS.get(count, f"{count} processes") for count in counts))
    made = table("training steps per second of all processes, stock → autokern", heads, left=0)
    for n in sorted({case["n"] for case in figures["cases"]}):
        of = {case["processes"]: case for case in figures["cases"] if case["n"] == n}
        rates = {count: " → ".join(map(per_second, case["rate"].values())) for count, case in of.items()}
        made.add_row(f"{n:,}", *(f"{rates[c]}, {factor(of[c])}" if c in of else "" for c in counts))
    return made


def forecast_table(figures: Results) -> Table:
    """Return the errors of a year's forecast, mean / variance, against an exact refit along the stream."""
    title, heads = "errors of 52 weeks of forecast, mean / variance", ("n", "stock", "autokern", "default refit")
    made = table(title, heads, resident(figures), left=0)
    for check in figures["checks"]:
        errors = [slashed(check[key]) for key in ("off", "on", "default_refit")]
        made.add_row(f"{check['n']:,}", *errors)
    return made


TABLES = {"training": training_table, "jump": jump_table, "processes": processes_table, "co2": forecast_table}


def plain(value: Any) -> Any:
    """Return `value` as JSON holds it: floats of six digits, what is not finite as None, what JSON lacks as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value if isinstance(value, (int, str, type(None))) else str(value)


def save(results: Results, path: Path) -> None:
    """Write the JSON of a script whose results are few; an interrupt leaves the former one."""
    write_whole(path, (json.dumps(plain(results), indent=1, ensure_ascii=False) + "\n").encode())


def write(results: Results, folder: Path) -> None:
    """Write the JSON, with each list of numbers on one line, and the plots of what there is to plot."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plain(results), indent=1, ensure_ascii=False, allow_nan=False)
    text = re.sub(r"\[[-+.\deE,\s]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    (folder / JSON_NAME).write_text(text + "\n", encoding="utf-8")
    if "co2" in results:
        plot(results["co2"], folder / PLOT_NAME)
    if "heights" in results.get("elevation", {}).get("child", {}):
        plot_terrain(results["elevation"], folder / TERRAIN_NAME)


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


def plot_terrain(figures: Results, path: Path) -> None:
    """Draw the heights that were held out, their prediction, and the difference."""
    from matplotlib.figure import Figure

    child = figures["child"]
    heights, predicted = (np.array(child[what], float).reshape(child["shape"]) for what in ("heights", "predicted"))
    gap = predicted - heights
    most = float(np.quantile(np.abs(gap), 0.99))
    figure = Figure(figsize=(11, 3), layout="constrained")
    colours = {"cmap": "terrain", "vmin": heights.min(), "vmax": heights.max()}
    panels = (
        (heights, f"{heights.size:,} heights held out", colours),
        (predicted, f"predicted from {figures['n']:,} others", colours),
        (gap, f"error, RMSE {child['rmse']['all']:.1f} m", {"cmap": "RdBu_r", "vmin": -most, "vmax": most}),
    )
    for axes, (values, title, options) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        axes.set_title(title, fontsize=10)
        axes.set(xticks=[], yticks=[])
        figure.colorbar(axes.imshow(values, **options), ax=axes, label="m", shrink=0.9)
    figure.savefig(path, dpi=150, metadata={"Software": None})
