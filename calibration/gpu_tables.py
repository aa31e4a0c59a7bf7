"""What `gpu.py` tells of its rows: lines for the terminal, tables in Markdown, the sentence of the README."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from figures import origin
from measuring import geomean
from training import DIMENSIONS

from autokern.core.output import duration

Row = dict[str, Any]
Sections = Mapping[str, Mapping[str, Row]]
UNRECORDED = ", without recordings"
"""End of the names of rows measured with AUTOKERN_GRAPHS=off."""
EXACT = 1e-5
"""Error of a gradient above which a step was not exact."""
EXPLAINED = (
    f"- A training step is one of Adam for a Matérn 5/2 kernel with a lengthscale for each of {DIMENSIONS} dimensions;",
    "  stock iterates above 800 points unless it is told to stay exact. *Unrecorded*: times as fast as stock with",
    "  `AUTOKERN_GRAPHS=off`. *Floor*, of exact steps: how many times as long they take as n³ operations, those of a",
    "  factor and an inverse, at the rate of a product of two matrices of 8,192 rows.",
    "- An update is by one point for each member of a batch: stock's time, and how many times as fast.",
    "- Products are of an RBF kernel of 100,000 points and 11 columns; *the matrix*: built as a whole and multiplied.",
    "  *Floor*: how many times as long they take as exponentials, distances and products by their best tiles.",
    "- Inverses are those for a Cholesky factor: by torch, and by products of halves.",
    "- Programs are scripts of `calibration/whole/`, everything on the GPU, timed once after the imports.",
)
"""What the tables hold."""


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


def by_machine(results: Any) -> dict[str, Any]:
    """Return what was read from JSON; ValueError if it is not results by the name of a machine."""
    machines = list(results.values()) if isinstance(results, dict) else [None]
    if not all(isinstance(one, dict) and {"date", "host", "versions"} <= one.keys() for one in machines):
        raise ValueError("these are no results by the name of a machine; an older release wrote those of one machine")
    return dict(results)


def named(results: Mapping[str, Any]) -> str:
    """Return the name of the accelerator that was measured, or of the CPU that played one."""
    found = results["host"].get("accelerators") or [{"name": results["host"]["cpu"]["model"]}]
    return str(found[0]["name"])


def good(sections: Sections, section: str) -> dict[str, Row]:
    """Return the rows of a section that did not fail."""
    return {name: row for name, row in sections.get(section, {}).items() if "error" not in row}


def ratios(sections: Sections, section: str) -> list[float]:
    """Return stock's times over autokern's, recordings allowed."""
    rows = good(sections, section).items()
    return [row.get("against_default", row)["ratio"] for name, row in rows if not name.endswith(UNRECORDED)]


def told(found: list[float]) -> str:
    """Return geometric mean and least of ratios."""
    return f"{geomean(found):.2f}× as fast (geometric mean, least {min(found):.2f}×)"


def short(results: Mapping[str, Any]) -> str:
    """Return the sentence of the README: each section by the machine that was measured last.

    Raises
    ------
    ValueError
        If no step, no update or no program was measured.
    """
    latest: dict[str, str] = {}
    for machine, found in newest_last(results):
        latest |= dict.fromkeys(found["sections"], machine)
    if missing := {"steps", "fantasies", "programs"} - set(latest):
        raise ValueError(f"no {' and no '.join(sorted(missing))} were measured")
    parts: dict[str, list[str]] = {}
    for section in ("steps", "fantasies", "programs"):
        sections = results[latest[section]]["sections"]
        rows = [name for name in good(sections, section) if not name.endswith(UNRECORDED)]
        sizes = [int(name.removeprefix("n=").partition(",")[0]) for name in rows if name.startswith("n=")]
        what = {
            "steps": f"training steps of {min(sizes, default=0):,} to {max(sizes, default=0):,} points",
            "fantasies": f"updates by one point of up to 128 models of {max(sizes, default=0):,} points",
            "programs": f"{len(rows)} programs of BoTorch after the imports",
        }[section]
        parts.setdefault(latest[section], []).append(f"{what} are {told(ratios(sections, section))}")
    sentences = [f"On an {machine}, {', and '.join(found)}." for machine, found in parts.items()]
    return f"{' '.join(sentences)} [CPU or GPU](docs/cpu-or-gpu.md) has all sizes.\n"


def newest_last(results: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the machines and what was measured on each, in the order of the dates."""
    return sorted(by_machine(results).items(), key=lambda item: str(item[1]["date"]))


def block(results: Mapping[str, Any]) -> str:
    """Return the tables of every machine, the last one first."""
    lines: list[str] = []
    for machine, found in reversed(newest_last(results)):
        sections = found["sections"]
        lines += [f"### {machine}", "", f"Beside {origin(found)}; with `AUTOKERN_GRAPHS=on`.", ""]
        for section, write in TABLES.items():
            if good(sections, section):
                lines += [*write(sections), ""]
    return "\n".join([*lines, *EXPLAINED, ""])


def steps(sections: Sections) -> Iterable[str]:
    yield f"Training steps are {told(ratios(sections, 'steps'))}."
    yield from ("", "| n | dtype | stock | stock, exact | autokern | × stock | × exact | unrecorded | floor |")
    yield "|---|---|---|---|---|---|---|---|---|"
    rows = good(sections, "steps")
    for name, row in rows.items():
        if name.endswith(UNRECORDED):
            continue
        n, dtype = name.removeprefix("n=").split(", ")
        usual, exact = row["against_default"], row["against_exact"]
        seconds = " | ".join(duration(s) for s in (usual["off"], exact["off"], usual["on"]))
        plain = rows.get(name + UNRECORDED)
        recorded = f"{plain['against_default']['ratio']:.2f}" if plain else ""
        over = usual["on"] * good(sections, "peaks")[f"gemm, {dtype}"]["flops_per_second"] / int(n) ** 3
        floor = f"{over:,.0f}" if int(n) >= 1000 and row["agreement"]["on"]["gradient"] < EXACT else ""
        yield (
            f"| {int(n):,} | {dtype} | {seconds} | {usual['ratio']:.2f} | {exact['ratio']:.2f} | {recorded} | {floor} |"
        )


def fantasies(sections: Sections) -> Iterable[str]:
    rows = good(sections, "fantasies")
    batches = sorted({int(name.partition("batch=")[2]) for name in rows})
    yield f"Updates with new points are {told(ratios(sections, 'fantasies'))}."
    yield from ("", f"| n | {' | '.join(f'batch {batch}' for batch in batches)} |", "|---" * (len(batches) + 1) + "|")
    for n in dict.fromkeys(name.partition(",")[0] for name in rows):
        cells = (rows.get(f"{n}, batch={batch}") for batch in batches)
        shown = (f"{duration(row['off'])}, {row['ratio']:.2f}×" if row else "" for row in cells)
        yield f"| {int(n.removeprefix('n=')):,} | {' | '.join(shown)} |"


def products(sections: Sections) -> Iterable[str]:
    yield from (
        "Products of many points:",
        "",
        "| d | dtype | points | KeOps | the matrix | stock | autokern | × the best | floor |",
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, row in good(sections, "products").items():
        _, _, d, dtype, points = name.split(", ")
        taken = row["seconds"]
        chosen = taken.get(row["chosen"])
        cells = [duration(taken[way]) if way in taken else "" for way in ("KeOps", "the matrix", "stock")]
        ours = f"{duration(chosen)} | {row['ratio']:.2f} | {row['over_floor']:.2f}" if chosen else " | | "
        yield f"| {d.removeprefix('d=')} | {dtype} | {points} | {' | '.join(cells)} | {ours} |"


def inverses(sections: Sections) -> Iterable[str]:
    yield from ("Inverses:", "", "| n | dtype | torch | by products | times as fast |", "|---|---|---|---|---|")
    for name, row in good(sections, "inverses").items():
        n, dtype = name.removeprefix("n=").split(", ")
        yield f"| {int(n):,} | {dtype} | {duration(row['off'])} | {duration(row['on'])} | {row['ratio']:.2f} |"


def whole(sections: Sections) -> Iterable[str]:
    yield f"Programs are {told(ratios(sections, 'programs'))}."
    yield from ("", "| program | stock | autokern | × stock | recorded, × stock |", "|---|---|---|---|---|")
    for name, row in good(sections, "programs").items():
        seconds = " | ".join(duration(row["runs"][side]["seconds"]) for side in ("off", "on"))
        recorded = f"{row['recorded']:.2f}" if "recorded" in row else ""
        yield f"| `{name}` | {seconds} | {row['ratio']:.2f} | {recorded} |"


TABLES = {"steps": steps, "fantasies": fantasies, "products": products, "inverses": inverses, "programs": whole}
"""What writes the table of each section."""
