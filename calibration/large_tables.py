"""The tables of `large.py` as Markdown, and what the package ships of its figures; measures nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from figures import origin
from large_models import MODELS
from measuring import geomean
from rows import factor, small

from autokern.core.output import duration

STEPPED, TIGHT = "heights", 1e-2
EXACT = 8000
"""Points up to which steps are compared with an exact one; beyond it, with the tight one."""
MAY_COST, BY_FACTOR = 1.3, ("fused", "mixed-inverse")


def shipped(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the package says: products, errors of stock's gradients, points up to which exact ones serve."""
    cases = results["models"]
    least = min(case["products"] for case in cases)
    points = sorted({case["n"] for case in cases})
    usual = [round(geomean(case["products"] for case in cases if case["n"] == n), 1) for n in points]
    errors = np.quantile([case["errors"]["off"]["gradient"] for case in cases], (0.1, 0.9)).tolist()
    alone = round(geomean(case["alone"] for case in cases if "alone" in case), 2)
    return {
        "least": least, "points": points, "usual": usual, "errors": [float(f"{e:.1g}") for e in errors],
        "alone": alone, "exact": exact_up_to(cases),
    }  # fmt: skip


def exact_up_to(cases: Iterable[Mapping[str, Any]]) -> int:
    """Return the points up to which steps by a factor take at most `MAY_COST` times stock's time, on their mean."""
    ratios: dict[int, list[float]] = {}
    for case in cases:
        if case["candidate"] in BY_FACTOR:
            ratios.setdefault(case["n"], []).append(1 / case["ratio"])
    allowed = 0
    for n in sorted(ratios):
        if geomean(ratios[n]) > MAY_COST:
            break
        allowed = n
    return allowed


def block(results: Mapping[str, Any]) -> str:
    """Return the tables as Markdown."""
    heads = ("model", "points", "stock", "autokern", "faster", "candidate", "products", "stock's errors", "autokern's")
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for case in results["models"]:
        cells = (
            MODELS[case["model"]].what, f"{case['n']:,}", duration(case["off"]), duration(case["on"]), factor(case),
            case["candidate"], str(case["products"]), *(both(case["errors"][side]) for side in ("off", "on")),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    if results["models"]:
        ratios = [case["ratio"] for case in results["models"]]
        worst = max(case["errors"]["on"]["gradient"] for case in results["models"])
        total = f"{geomean(ratios):.2f}× (least {min(ratios):.2f})"
        lines.append(f"| **all, geometric mean** | | | | {total} | | | | {small(worst)} at most |")
    heads = (
        "points",
        "autokern",
        "against stock",
        f"against stock to {TIGHT:g}",
        "candidate",
        "errors: stock",
        "tight",
        "autokern",
    )
    lines += ["", f"| {' | '.join(heads)} |", f"|{'---:|' * len(heads)}"]
    for step in results["steps"]:
        found = step.get("errors", {})
        errors = [both(found[side]) if side in found else "" for side in ("off", "tight", "on")]
        ratios = [step.get(f"against_{side}", {}).get("ratio") for side in ("off", "tight")]
        cells = (
            f"{step['n']:,}{'' if step['formed'] else ' (tiles)'}", duration(step["against_off"]["on"]),
            *("" if ratio is None else f"{ratio:.2f}×" for ratio in ratios), step["candidate"], *errors,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    note = (
        f"{origin(results)}; float64, no profile of the machine. Forward and backward pass, both sides in turn: "
        "medians, quartiles of paired ratios. Errors of loss / gradient: norm of the difference from exact, relative; "
        f"above {EXACT:,} points, from stock's tight one. The second table is {MODELS[STEPPED].what}; (tiles): stock's "
        "matrices do not fit the memory, its conjugate gradients run on tiles."
    )
    return "\n".join([*lines, "", note, ""])


def both(errors: Mapping[str, float]) -> str:
    return f"{small(errors['loss'])} / {small(errors['gradient'])}"


def written(results: Mapping[str, Any]) -> str:
    """Return the text of the file that the package ships."""
    return json.dumps(shipped(results), indent=1) + "\n"
