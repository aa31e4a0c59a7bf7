"""Packages that build on BoTorch: examples of theirs, without and with autokern; a table in docs/support.md.

    pip install ax-platform xopt 'bofire[optimization]' baybe optuna optuna-integration    # beside autokern
    python calibration/third_parties.py                            runs what is installed, adds it to third_parties.json
    python calibration/third_parties.py --readme docs/support.md   writes the table (--check: compares)

The programs are those in `third/`; each prints the objective's values at the points that it tried, in order. Each run
is a process of its own on one thread, with nothing measured before. Optimisers magnify rounding, so stock also runs
with fits that end a few units in the last place elsewhere: how far its values then agree with its own is told beside.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import documents

HERE = Path(__file__).resolve().parent
JSON = HERE / "third_parties.json"
PACKAGES = {
    "ax": "ax-platform", "baybe": "baybe", "bofire": "bofire", "optuna": "optuna-integration", "xopt": "xopt",
}  # fmt: skip
"""Distribution by the first word of a program's name."""
BY = (1e-15, -1e-15, 1e-14)
"""By which share fitted parameters are moved."""
MOVED = """import sys, torch, botorch.optim.fit
from botorch.optim import core
stock = core.scipy_minimize
def fitted(closure, parameters, *args, **options):
    found = stock(closure, parameters, *args, **options)
    with torch.no_grad():
        for k, parameter in enumerate(parameters.values()):
            parameter.mul_(1 + by * (-1) ** k)
    return found
for module in list(sys.modules.values()):
    if getattr(module, "scipy_minimize", None) is stock:
        module.scipy_minimize = fitted
"""
START = "import runpy, sys\nrunpy.run_path(sys.argv[1], run_name='__main__')\n"
SERVED = "print('ops', *(op for op, by in autokern.stats().items() if set(by) - {'stock'}), sep=', ')"
SAME = 1e-6


def run(script: Path, on: bool, by: float = 0.0) -> dict[str, Any]:
    """Run a program to its end; return its values, CPU seconds, and the ops that candidates served."""
    code = f"import autokern, autokern.auto\n{START}{SERVED}" if on else START
    code = f"by = {by}\n{MOVED}{code}" if by else code
    with tempfile.TemporaryDirectory() as home:
        own = {
            "AUTOKERN_HOME": home,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = subprocess.run(
            [sys.executable, "-c", code, str(script)], env={**os.environ, **own}, cwd=home, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"{script.stem} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = {line.split(maxsplit=1)[0]: line for line in ended.stdout.splitlines() if line.strip()}
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    values = [float(word) for word in lines["final"].split()[1:]]
    return {"final": values, "cpu": cpu, "ops": lines.get("ops,", "").split(", ")[1:]}


def alike(one: Sequence[float], other: Sequence[float]) -> int:
    """Return how many values agree from the first on, to a millionth of the largest."""
    size = max(map(abs, other))
    pairs = enumerate(zip(one, other, strict=True))
    return next((place for place, (a, b) in pairs if abs(a - b) > SAME * size), len(other))


def measured(script: Path, rounds: int) -> dict[str, Any]:
    """Run a program without and with autokern in turn, after one of each that is not counted."""
    runs = [(run(script, False), run(script, True)) for _ in range(rounds + 1)][1:]
    stock, ours = runs[0]
    moved = [run(script, False, by)["final"] for by in BY]
    package = PACKAGES[script.stem.partition("_")[0]]
    names = (package, "torch", "gpytorch", "botorch")
    return {
        "versions": {name: importlib.metadata.version(name).partition("+")[0] for name in names},
        "package": package,
        "values": {"stock": stock["final"], "autokern": ours["final"], "stock, moved": moved},
        "cpu": [min(off["cpu"] for off, _ in runs), min(on["cpu"] for _, on in runs)],
        "ops": ours["ops"],
    }


def table(rows: dict[str, Any]) -> str:
    """Return the table in Markdown."""
    heads = (
        "package",
        "points tried",
        "the same points",
        "least value, stock and autokern",
        "CPU time, stock and autokern",
        "ops in it",
    )
    lines = [f"| {' | '.join(heads)} |", "|---|---:|---:|---:|---:|---|"]
    for name, row in sorted(rows.items()):
        stock, ours, moved = row["values"].values()
        points = len(stock)
        cells = (
            f"{row['package']} {row['versions'][row['package']]} (`{name}.py`)", str(points),
            f"{alike(ours, stock)} ({min(alike(each, stock) for each in moved)})", f"{min(stock):.4g}, {min(ours):.4g}",
            "{:.1f} s, {:.1f} s".format(*row["cpu"]), ", ".join(f"`{op}`" for op in row["ops"]) or "none",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    versions = next(iter(rows.values()))["versions"] if rows else {}
    told = ", ".join(f"{name} {versions[name]}" for name in ("torch", "gpytorch", "botorch") if name in versions)
    return "\n".join([*lines, "", f"{told}; one thread.", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="names of programs in third/ (default: all that are installed)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=JSON)
    parser.add_argument("--readme", type=Path, help="write the table into this document")
    parser.add_argument("--check", type=Path, help="compare the table in this document")
    options = parser.parse_args()
    if (status := documents.served(parser, options, {"third": table})) is not None:
        return status
    rows = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {}
    for script in sorted((HERE / "third").glob("*.py")):
        module = script.stem.partition("_")[0]
        if script.stem not in (options.programs or [script.stem]) or importlib.util.find_spec(module) is None:
            continue
        rows[script.stem] = measured(script, options.rounds)
        print(script.stem, json.dumps(rows[script.stem]), flush=True)
        options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
