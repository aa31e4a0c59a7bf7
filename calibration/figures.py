"""Rows, tables, plots and the README's block for the figures that `end_to_end.py` measures.

Everything here is a function of the results as they stand in `end_to_end.json`; nothing is measured.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import documents
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table

JSON_NAME, PLOT_NAME, TERRAIN_NAME = "end_to_end.json", "co2.png", "elevation.png"
OLD_THRESHOLD = 2048
KERNELS = {"rbf": "RBF", "matern52": "Matérn 5/2"}
COUNTS = {1: "one process", 2: "two processes", 4: "four processes"}
README_SIZES = (100, 1000, 4000)

Results = Mapping[str, Any]

console = Console(width=None if sys.stdout.isatty() else 150)


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


def per_second(rate: float) -> str:
    """Return a number of steps per second."""
    return f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s"


def rates(figure: Results) -> str:
    """Return a comparison of steps per second in words."""
    off, on = (per_second(figure["rate"][side]) for side in ("off", "on"))
    return f"off {off}, on {on}, {factor(figure)} faster"


def small(value: float | None) -> str:
    """Return an error to one digit; one that is not finite is None in the JSON."""
    if value is None or not math.isfinite(value):
        return "nan"
    return f"{value:.0e}" if value else "0"


def slashed(errors: Results) -> str:
    """Return errors to one digit, a slash between them."""
    return " / ".join(map(small, errors.values()))


def compared(what: str, figure: Results, agreement: str, headline: bool = False) -> Row:
    """Return the row of two times and their ratio."""
    return Row(what, duration(figure["off"]), duration(figure["on"]), factor(figure), agreement, headline)


def training_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each trained model against stock with default settings."""
    for case in figures["cases"]:
        kernel, n, dtype, against = case["kernel"], case["n"], case["dtype"], case["against_default"]
        what = f"training step, n = {n:,}, {KERNELS[kernel]}, {dtype}"
        on, default = (slashed(case["agreement"][side]) for side in ("on", "default"))
        headline = (kernel, dtype) == ("matern52", "float64") and n in README_SIZES
        yield compared(what, against, f"loss / gradient {on} (stock {default})", headline)


def diabetes_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each trained model."""
    for case in figures["cases"]:
        what = f"training step, diabetes, {KERNELS[case['kernel']]}, {case['dtype']}"
        agreement = f"loss {small(case['loss_difference'])}"
        yield compared(what, case, agreement)


def botorch_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each size; the README has room for one."""
    for case in figures["cases"]:
        off, on = (case["evaluations"][side] for side in ("off", "on"))
        agreement = f"parameters {small(case['relative_parameter_difference'])}; {on} evaluations (stock {off})"
        what = f"BoTorch fit, n = {case['n']:,}, d = {figures['d']}"
        yield compared(what, case, agreement, case["n"] == 100)


def processes_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each number of processes and size, in steps per second of all processes together."""
    for case in figures["cases"]:
        processes, n = case["processes"], case["n"]
        name = COUNTS.get(processes, f"{processes} processes")
        what = f"{name}, training steps, n = {n:,}"
        off, on = (per_second(case["rate"][side]) for side in ("off", "on"))
        yield Row(what, off, on, factor(case), "", (processes, n) == (2, 100))


def co2_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for some sizes along the stream, and one for the whole."""
    checks = {check["n"]: check for check in figures["checks"]}
    for case in figures["at"]:
        n = case["n"]
        agreement = forecast_agreement([checks[n]]) if n in checks else ""
        yield compared(f"CO₂ stream, update at n = {n:,}", case, agreement)
    total = figures["total"]
    what = f"CO₂ stream, n from {figures['start']:,} to {figures['last']:,}"
    times = duration(total["off"]), duration(total["on"])
    agreement = forecast_agreement(figures["checks"])
    yield Row(what, *times, f"{total['off'] / total['on']:.2f}×", agreement, True)


def forecast_agreement(checks: Sequence[Results]) -> str:
    """Return the largest errors of mean and variance against an exact refit, under autokern and in stock."""
    on, off = (
        slashed({what: max(check[side][what] for check in checks) for what in ("mean", "variance")})
        for side in ("on", "off")
    )
    return f"forecast {on} (stock {off})"


def cg_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each size and dtype; the largest size is the headline."""
    largest = max(case["n"] for case in figures["cases"])
    for case in figures["cases"]:
        what = f"{figures['iterations']} CG iterations, n = {case['n']:,}, {case['dtype']}"
        agreement = f"iterate {small(case['difference'])}"
        yield compared(what, case, agreement, (case["n"], case["dtype"]) == (largest, "float64"))


def mebibytes(count: float) -> str:
    """Return a number of bytes in MiB."""
    return f"{count / 2**20:,.0f} MiB"


def needs(figures: Results) -> str:
    """Return what stock would take."""
    return f"needs {figures['stock_needs_bytes'] / 2**30:,.0f} GiB"


def matrixfree_rows(figures: Results) -> Iterator[Row]:
    """Yield rows for training and predictions without a matrix, and for each comparison with conjugate gradients."""
    child, what = figures["child"], f"no matrix, n = {figures['n']:,}, float32"
    if "failed" in child:
        yield Row(f"{what}: training", needs(figures), "failed", "", child["failed"], False)
    else:
        agreement = f"{mebibytes(child['bytes'])}; {child['products']:.0f} products a step"
        step = duration(statistics.mean(child["seconds"]))
        yield Row(f"training step, {what}", needs(figures), step, "", agreement, True)
        yield Row(f"{figures['points']:,} means, {what}", "", duration(child["mean_seconds"]), "", "", False)
        yield Row(f"{figures['variances']:,} variances, {what}", "", duration(child["variance_seconds"]), "", "", False)
    for case in figures["cases"]:
        what = f"no matrix against CG on it, n = {case['n']:,}, {case['dtype']}, {case['way']}"
        agreement = f"loss / gradient {slashed({name: case[name] for name in ('loss', 'gradient')})}"
        yield Row(what, "", f"{case['products']} products", "", agreement, False)


def refusal_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for what was said to a matrix that cannot be had."""
    child = figures["child"]
    time = "failed" if "failed" in child else duration(child["seconds"])
    agreement = child.get("failed") or f"{child['error']}: {child['message']}"
    yield Row(f"to_dense, n = {figures['n']:,}", needs(figures), time, "", agreement, False)


def elevation_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for the terrain: training and prediction together."""
    child, what = figures["child"], f"elevation model, n = {figures['n']:,}, {figures['steps']} steps and predictions"
    if "failed" in child:
        yield Row(what, needs(figures), "failed", "", child["failed"], False)
        return
    part, error = child["part"], child["rmse"]
    agreement = (
        f"{mebibytes(child['bytes'])}; RMSE {error['all']:.0f} m (exact on {part['n']:,}: {part['rmse']:.0f} m, "
        f"mean: {error['trivial']:.0f} m)"
    )
    seconds = child["training_seconds"] + child["prediction_seconds"]
    yield Row(what, needs(figures), duration(seconds), "", agreement, True)


def posterior_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each size and setting, first predictions before later ones."""
    for case in figures["cases"]:
        which = "first" if case["first"] else "later"
        fast = ", fast_pred_var" if case["fast"] else ""
        what = f"{which} prediction, {figures['points']} points, n = {case['n']:,}{fast}"
        agreement = f"{slashed(case['error']['on'])} (stock {slashed(case['error']['off'])})"
        headline = case["n"] == 1000 and not case["fast"]
        yield compared(what, case, agreement, headline)


def points_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each number of test points; where stock's joint matrix does not fit, its size."""
    for case in figures["cases"]:
        on = case["sides"]["on"]
        seconds, mebibytes = (statistics.median(one[what] for one in on) for what in ("seconds", "mebibytes"))
        agreement = f"{mebibytes:.0f} MiB; {small(max(one['error'] for one in on))}"
        off, faster = f"needs {case['stock_needs_bytes'] / 2**30:.0f} GiB", ""
        if "ratio" in case:
            off, faster = duration(case["off"]), factor(case)
        last = case is figures["cases"][-1]
        yield Row(f"{case['m']:,} test points, n = {case['n']}", off, duration(seconds), faster, agreement, last)


def fantasies_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each size and number of new points."""
    for case in figures["cases"]:
        points = f"{case['q']} point{'s' * (case['q'] > 1)}"
        agreement = f"{slashed(case['error']['on'])} (stock {slashed(case['error']['off'])})"
        what = f"update by {points}, n = {case['n']:,}"
        headline = (case["q"], case["n"]) == (1, 800)
        yield compared(what, case, agreement, headline)


def acquisition_rows(figures: Results) -> Iterator[Row]:
    """Yield a row for each acquisition function and number of restarts."""
    for case in figures["cases"]:
        agreement = f"{small(case['difference']['value'])} / {small(case['difference']['gradient'])}"
        restarts = f"{case['restarts']} restart{'s' * (case['restarts'] > 1)}"
        what = f"{case['function']} and gradient, n = {case['n']}, {restarts}"
        headline = case["restarts"] == 5
        yield compared(what, case, agreement, headline)


ROWS: Mapping[str, Callable[[Results], Iterator[Row]]] = {
    "training": training_rows,
    "diabetes": diabetes_rows,
    "botorch": botorch_rows,
    "processes": processes_rows,
    "posterior": posterior_rows,
    "points": points_rows,
    "fantasies": fantasies_rows,
    "acquisition": acquisition_rows,
    "co2": co2_rows,
    "cg": cg_rows,
    "matrixfree": matrixfree_rows,
    "refusal": refusal_rows,
    "elevation": elevation_rows,
}


def rows(results: Results) -> Iterator[Row]:
    """Yield every comparison of the workloads that were run."""
    for name, yielded in ROWS.items():
        if name in results:
            yield from yielded(results[name])


def machine(host: Results) -> str:
    """Return the processor and the number of threads."""
    return f"{host['cpu']['model']}, {host['cpu']['torch_threads']} threads"


def dates(results: Results) -> str:
    """Return when the workloads were run: one date, or each with its workloads."""
    found: dict[str, list[str]] = {}
    for name, figures in results.items():
        if isinstance(figures, Mapping) and "run" in figures:
            found.setdefault(figures["run"]["date"], []).append(name)
    if len(found) > 1:
        return ", ".join(f"{date} ({', '.join(names)})" for date, names in sorted(found.items()))
    return str(next(iter(found), results["date"]))


def caption(results: Results) -> str:
    """Return where, when and how the figures were measured."""
    versions = results["versions"]
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "gpytorch", "linear_operator"))
    quick = " (quick run)" if results["quick"] else ""
    training = "for training, that of loss / gradient, relative, from stock without CG; "
    return (
        f"{machine(results['host'])}; {libraries}; {dates(results)}{quick}. Stock and autokern "
        "take turns in one run: times are medians, factors medians of paired ratios (quartiles). Agreement is the "
        f"largest difference from stock; {training if 'training' in results else ''}"
        "for forecasts, that of mean / variance from an exact refit."
    )


def markdown_table(results: Results) -> str:
    """Return the before/after table of the README."""
    lines = ["| | stock | autokern | faster | agreement |", "|---|---:|---:|---:|---|"]
    lines += [f"| {' | '.join(row[:5])} |" for row in rows(results) if row.headline]
    return "\n".join([*lines, "", caption(results)])


def read(folder: Path) -> dict[str, Any]:
    """Return the results in the JSON of a folder."""
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
    every = Table(title="autokern off and on")
    for name in ("", "stock", "autokern", "faster", "agreement"):
        every.add_column(name, justify="right" if name in ("stock", "autokern", "faster") else "left")
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
    title = f"training, d = {figures['d']}: stock, stock forced to stay exact, autokern"
    made = table(title, heads, "\n".join(notes), 2)
    for case in sorted(figures["cases"], key=lambda case: (case["kernel"], case["dtype"])):
        default, exact = case["against_default"], case["against_exact"]
        times = (duration(seconds) for seconds in (default["off"], exact["off"], default["on"]))
        floor = (duration(case["floor"]["seconds"]), factor(case["floor"])) if "floor" in case else ("", "")
        names = KERNELS[case["kernel"]], case["dtype"], f"{case['n']:,}"
        made.add_row(*names, *times, factor(default), factor(exact), *floor)
    return made


def jump_table(figures: Results) -> Table:
    """Return loss and norm of the gradient around stock's limit for Cholesky, with their errors against float64."""
    heads = (
        "dtype",
        "n",
        "exact loss",
        "stock",
        "autokern",
        "exact gradient",
        "stock",
        "autokern",
        "stock",
        "autokern",
    )
    title = (
        f"noise {figures['noise']:g}: loss and norm of its gradient in exact float64, relative errors; time of a step"
    )
    made = table(title, heads)
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
        cells = {
            count: f"{' → '.join(map(per_second, case['rate'].values()))}, {factor(case)}" for count, case in of.items()
        }
        made.add_row(f"{n:,}", *(cells.get(count, "") for count in counts))
    return made


def forecast_table(figures: Results) -> Table:
    """Return the errors of a year's forecast, mean / variance, against an exact refit along the stream."""
    heads = ("n", "stock", "autokern", "refit, default settings")
    made = table("errors of 52 weeks of forecast, mean / variance", heads, resident(figures), left=0)
    for check in figures["checks"]:
        errors = [slashed(check[key]) for key in ("off", "on", "default_refit")]
        made.add_row(f"{check['n']:,}", *errors)
    return made


TABLES = {"training": training_table, "jump": jump_table, "processes": processes_table, "co2": forecast_table}


def plain(value: Any) -> Any:
    """Return `value` with mapping keys, and all that JSON does not know, as text; what is not finite is nothing."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (int, float, str, type(None))) else str(value)


def brief(value: Any) -> Any:
    """Return `value` with every float rounded to six digits: no timing and no error is known better."""
    if isinstance(value, Mapping):
        return {key: brief(item) for key, item in value.items()}
    if isinstance(value, list):
        return [brief(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write(results: Results, folder: Path) -> None:
    """Write the JSON, with each list of numbers on one line, and the plots of what there is to plot."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(brief(plain(results)), indent=1, ensure_ascii=False, allow_nan=False)
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
    heights, predicted = (
        np.array(child[name], dtype=float).reshape(child["shape"]) for name in ("heights", "predicted")
    )
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
        drawn = axes.imshow(values, **options)
        axes.set_title(title, fontsize=10)
        axes.set(xticks=[], yticks=[])
        figure.colorbar(drawn, ax=axes, label="m", shrink=0.9)
    figure.savefig(path, dpi=150, metadata={"Software": None})
