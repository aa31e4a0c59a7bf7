"""What autokern does on other releases of the libraries; writes `stacks.json` and the table in docs/support.md.

    python calibration/stacks.py                     adds the releases that are installed
    python calibration/stacks.py FOLDER[:FOLDER] ... adds stacks: folders of `pip install --target`, first on the path
    ... --readme docs/support.md                     writes the table (--check: compares)

A stack is one process each. The program is that of torture T14 (training, predictions, fantasies, tasks, batches, SVGP,
operators, a BoTorch loop), run by stock of that release and by autokern, as it chooses and twice at random. All that it
notes must agree to 1e-8 of the largest entry. "In part" names the functions of the release whose work stays stock's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import documents

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
JSON = HERE / "stacks.json"
LIBRARIES = ("torch", "gpytorch", "linear_operator", "botorch", "scipy")


def alone(auto: bool, orders: dict[str, str]) -> dict[str, Any]:
    """Run the program in this process; return what it notes, and what autokern did."""
    os.environ.update(orders)
    if auto:
        import autokern.auto
    import release_runs

    release_runs.import_libraries(True)
    from release_program import PARTS

    found: dict[str, Any] = {"ran": release_runs.run_program(tuple(PARTS))}
    if auto:
        import autokern
        from autokern.core.releases import known

        served = {op for op, chosen in autokern.stats().items() if set(chosen) - {"stock"}}
        found |= {"off": known.unknown(), "served": sorted(served)}
    return found


def stack() -> dict[str, Any]:
    """Run the program as stock and with autokern, in forks of this process; return a row of the table."""
    import importlib.metadata

    import release_runs
    from releases import WAYS

    row: dict[str, Any] = {name: importlib.metadata.version(name).partition("+")[0] for name in LIBRARIES}
    row["python"] = ".".join(map(str, sys.version_info[:2]))
    stock = release_runs.in_fork(lambda: alone(False, {}))
    parts = [part for part, ran in stock["ran"].items() if not ran.raised]
    row |= {"parts": len(parts), "import": "works", "differences": [], "off": [], "served": []}
    for orders in WAYS:
        mine = release_runs.in_fork(lambda orders=orders: alone(True, orders))
        if isinstance(mine, release_runs.Died):
            row["import"] = f"ended with {mine.status}"
            continue
        if not orders:
            row |= {"off": sorted(mine["off"]), "served": mine["served"]}
        for part in parts:
            told = mine["ran"][part].raised or release_runs.gap(mine["ran"][part].facts, stock["ran"][part].facts)
            row["differences"] += [f"{part}: {told}"] if told else []
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    lines = ["| Python | " + " | ".join(LIBRARIES) + " | program | ops in it | stock computes |"]
    lines.append("|---" * (len(LIBRARIES) + 4) + "|")
    for row in rows:
        off = sorted({name.partition(":")[2].rpartition(".")[0] or name.partition(":")[2] for name in row["off"]})
        agrees = f"{row['parts']} parts agree" if not row["differences"] else row["differences"][0]
        cells = [row["python"], *(row[name] for name in LIBRARIES)]
        cells += [agrees if row["import"] == "works" else row["import"], str(len(row["served"]))]
        cells.append("with " + ", ".join(f"`{name}`" for name in off) if off else "nothing")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stacks", nargs="*", default=[""], help="folders, the first on the path first")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has all else")
    parser.add_argument("--output", type=Path, default=JSON)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--readme", type=Path, help="write the table into this document")
    parser.add_argument("--check", type=Path, help="compare the table in this document")
    options = parser.parse_args()
    if options.one:
        options.output.write_text(json.dumps(stack()), encoding="utf-8")
        return 0
    if (status := documents.served(parser, options, {"stacks": table})) is not None:
        return status
    rows = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else []
    for folders in options.stacks:
        with tempfile.TemporaryDirectory() as home:
            path = os.pathsep.join([str(ROOT), str(HERE), str(ROOT / "tests" / "torture"), *filter(None, [folders])])
            own = {"PYTHONPATH": path, "AUTOKERN_HOME": home, "AUTOKERN_CALIBRATE": "never", "PYTHONWARNINGS": "ignore"}
            command = [options.python, __file__, "--one", "--output", f"{home}/row.json"]
            subprocess.run(command, env={**os.environ, **own}, check=True)
            row = json.loads(Path(home, "row.json").read_text(encoding="utf-8"))
        rows = [one for one in rows if any(one[name] != row[name] for name in (*LIBRARIES, "python"))] + [row]
        print(json.dumps(row))
    rows.sort(key=lambda row: [[int(n) for n in row[name].split(".")] for name in ("gpytorch", "botorch", "torch")])
    options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
