"""Tables and plots of `baselines.py`; measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from figures import origin
from rows import mebibytes, small

from autokern.core.output import duration

TITLES = {
    "heights": "Elevation model, 20,000 points, metres",
    "all-heights": "Elevation model, all 134,813 points that are not held out, metres",
    "roads": "Simulated roads, 434,874 points in three dimensions, standard deviations of the heights",
    "co2": "CO₂ series, sum of three Matérn processes, ppm",
}
UNITS = {"heights": "m", "all-heights": "m", "roads": "σ", "co2": "ppm"}
COLUMNS = 11
"""Columns of a product of training: the data and ten probes."""

LABELS = {
    "part": "exact model of a part", "autokern": "exact, autokern", "stock": "stock's default",
    "exact stock": "stock, dense factor",
}  # fmt: skip
HEADS = ("", "points", "steps", "seconds", "RMSE", "NLL", "peak", "residual")

Results = Mapping[str, Any]


def label(name: str) -> str:
    """Return what the table calls a method."""
    if name == "part":
        return "exact model of a part"
    return {"autokern": "exact, autokern", "stock": "stock's default", "exact stock": "stock, dense factor"}.get(
        name, name
    )


def rows(methods: Results) -> list[str]:
    lines = []
    for name, found in methods.items():
        if "failed" in found:
            lines.append(f"| {label(name)} | | | | {found['failed']} | | | |")
            continue
        last, n = found["points"][-1], found.get("n", 2000)
        nll = f"{last['nll']:.3g}" if "nll" in last else ""
        peak = mebibytes(found["bytes"]) if "bytes" in found else ""
        steps = found.get("steps", "")
        steps = f"{len(steps)}" if isinstance(steps, list) else f"{steps:,}" if steps else ""
        residual = f"{found['residual']:.0e}" if "residual" in found else ""
        seconds = duration(last["seconds"])
        cells = (label(name), f"{n:,}", steps, seconds, f"{last['rmse']:.3g}", nll, peak, residual)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def remark(name: str, methods: Results) -> str:
    """Return what the table does not say of the exact model: residuals of training, steps that were not run."""
    own = methods["autokern"]
    if "failed" in own:
        return ""
    told = []
    if own["reports"]:
        worst = max(report["residual"] for report in own["reports"])
        products = [report["products"] for report in own["reports"]]
        told.append(f"Training steps of the exact model reach a residual of {worst:.0e} in {max(products)} products.")
    if name == "roads" and own["reports"]:
        n, every = own["n"], methods["SVGP, 512"]["n"]
        product = own[f"product_{COLUMNS}"] * (every / n) ** 2
        step = median(own["steps"]) * (every / n) ** 2
        told.append(
            f"It learns {n:,} of the points. With all of them a product with {COLUMNS} columns would take "
            f"{duration(product)} and a step {duration(step)}: {duration(own[f'product_{COLUMNS}'])} and "
            f"{duration(median(own['steps']))} here, times ({every:,} / {n:,})². Neither was run."
        )
    if name == "co2":
        gap = {
            side: abs(methods[side]["loss"][-1] - methods["exact stock"]["loss"][-1]) for side in ("autokern", "stock")
        }
        times = ", ".join(f"{label(side)} {duration(median(methods[side]['steps'][1:]))}" for side in methods)
        told.append(
            f"Median step: {times}. The last loss, to six digits, differs from that of the dense factor by "
            f"{small(gap['autokern'])} (stock's default {small(gap['stock'])}). "
            f"It ran {', '.join(own['calls']['exact_log_prob'])}."
        )
    return " ".join(told)


def block(results: Results) -> str:
    """Return the tables as Markdown."""
    parts = []
    for name, title in TITLES.items():
        if name not in results["workloads"]:
            continue
        methods = results["workloads"][name]["methods"]
        parts += [
            f"{title}:",
            "",
            "| | points | steps | seconds | RMSE | NLL | peak | residual |",
            f"|---|{'---:|' * 7}",
        ]
        parts += [*rows(methods), ""]
        if said := remark(name, methods):
            parts += [said, ""]
    return "\n".join([*parts, f"{origin(results)}.", ""])


def plot(results: Results, folder: Path) -> None:
    """Draw RMSE and NLL over seconds, a panel for each workload."""
    from matplotlib.figure import Figure

    names = [name for name in TITLES if name in results["workloads"] and name != "co2"]
    if not names:
        return
    for what, path in (("rmse", "baselines_rmse.png"), ("nll", "baselines_nll.png")):
        figure = Figure(figsize=(4.6 * len(names), 4), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            for method, found in results["workloads"][name]["methods"].items():
                points = [(p["seconds"], p[what]) for p in found.get("points", []) if what in p]
                if points:
                    line = "o-" if method == "autokern" else "s" if method == "part" else ".-"
                    text = f"{label(method)}, {found['n']:,}" if method == "autokern" else label(method)
                    axes.plot(*zip(*points, strict=True), line, label=text)
            axes.set(xscale="log", yscale="log" if what == "rmse" else "linear", xlabel="seconds")
            axes.set_ylabel(f"RMSE ({UNITS[name]})" if what == "rmse" else "negative log likelihood of a point")
            axes.set_title(TITLES[name].rpartition(",")[0], fontsize=9)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter("{x:g}")
            axes.tick_params(which="both", labelsize=7)
            axes.grid(which="both", alpha=0.2)
            axes.legend(fontsize=7)
        figure.savefig(folder / path, dpi=120, metadata={"Software": None})
