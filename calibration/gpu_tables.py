"""What `gpu.py` tells of its rows: lines for the terminal, tables in Markdown, the sentence of the README."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from figures import origin
from measuring import geomean
from training import DIMENSIONS

from autokern.core.output import duration

Row = dict[str, Any]
UNRECORDED = ", without recordings"
"""End of the names of rows measured with AUTOKERN_GRAPHS=off."""


def sentence(row: Row) -> str:
    """Return the figure of a row that matters most."""
    if "against_default" in row:
        return f"{row['against_default']['ratio']:.2f}x stock, {row['against_exact']['ratio']:.2f}x exact stock"
    if "regret" in row:
        return f"{row['chosen']}, best {row['best']}, regret {row['regret']:.2f}"
    return (
        ", ".join(f"{key} {value:.3g}" for key, value in row.items() if isinstance(value, (int, float)))
        or str(row)[:300]
    )


def summary(results: Mapping[str, Any]) -> list[str]:
    """Return a line for each section: rows, failures, and how they compare with stock."""
    lines = []
    for section, rows in results["sections"].items():
        good = [row for row in rows.values() if "error" not in row]
        line = f"{section}: {len(good)} rows, {len(rows) - len(good)} failed"
        for key, of in (("ratio", "stock"), ("regret", "the best")):
            ratios = [row.get("against_default", row).get(key) for row in good]
            ratios = [ratio for ratio in ratios if ratio]
            if ratios:
                spread = f"least {min(ratios):.2f}, most {max(ratios):.2f}"
                line += f"; {key} to {of}: geometric mean {geomean(ratios):.2f}, {spread}"
        lines.append(line)
    return lines


def good(sections: Mapping[str, Any], section: str) -> dict[str, Row]:
    """Return the rows of a section that did not fail."""
    return {name: row for name, row in sections.get(section, {}).items() if "error" not in row}


def means(sections: Mapping[str, Any]) -> tuple[str, str]:
    """Return geometric mean and least ratio of steps and of programs to stock.

    Raises
    ------
    ValueError
        If no step or no program was measured.
    """
    steps = [row["against_default"]["ratio"] for row in good(sections, "steps").values()]
    whole = [row["ratio"] for row in good(sections, "programs").values()]
    if not (steps and whole):
        raise ValueError("no steps or no programs were measured")
    first, second = (
        f"{geomean(ratios):.2f}× as fast (geometric mean, least {min(ratios):.2f}×)" for ratios in (steps, whole)
    )
    return first, second


def short(results: Mapping[str, Any]) -> str:
    """Return the sentence of the README."""
    sections, gpu = results["sections"], results["host"]["accelerators"][0]["name"]
    steps, whole = means(sections)
    sizes = [int(name.removeprefix("n=").partition(",")[0]) for name in good(sections, "steps")]
    scripts = {name.partition(",")[0] for name in good(sections, "programs")}
    return (
        f"On a GPU ({gpu}), training steps of {min(sizes):,} to {max(sizes):,} points are {steps}, and "
        f"{len(scripts)} programs of BoTorch after the imports {whole}; "
        "[CPU or GPU](docs/cpu-or-gpu.md) has all sizes.\n"
    )


def block(results: Mapping[str, Any]) -> str:
    """Return the tables of training steps and of programs."""
    gpu, sections = results["host"]["accelerators"][0]["name"], results["sections"]
    lines = ["| n | dtype | stock | stock, exact | autokern | × stock | × exact |", "|---|---|---|---|---|---|---|"]
    for name, row in good(sections, "steps").items():
        n, dtype = name.removeprefix("n=").split(", ")
        usual, exact = row["against_default"], row["against_exact"]
        seconds = " | ".join(duration(s) for s in (usual["off"], exact["off"], usual["on"]))
        lines.append(f"| {int(n):,} | {dtype} | {seconds} | {usual['ratio']:.2f} | {exact['ratio']:.2f} |")
    lines += ["", "| program | stock | autokern | × stock |", "|---|---|---|---|"]
    for name, row in good(sections, "programs").items():
        seconds = " | ".join(duration(row["runs"][side]["seconds"]) for side in ("off", "on"))
        lines.append(f"| `{name.removesuffix(', pair 1')}` | {seconds} | {row['ratio']:.2f} |")
    steps, programs = means(sections)
    note = (
        f"{gpu} beside {origin(results)}; with `AUTOKERN_GRAPHS=on`. Steps are {steps}, programs "
        f"{programs}. A step is one of Adam for a Matérn 5/2 kernel with a lengthscale for each of {DIMENSIONS} "
        "dimensions; stock iterates above 800 points unless it is told to stay exact. Programs are scripts of "
        "`calibration/whole/`, everything on the GPU, timed once after the imports."
    )
    return "\n".join([*lines, "", note, ""])
