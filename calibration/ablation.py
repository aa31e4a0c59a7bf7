"""What each part of autokern gains whole programs: all of it, and all but one part, in turn; writes `ablation.json`.

Parts are the files of hooks, the ops (forced to stock), the candidates that programs choose, first use, replays, and
all hooks together. A part that a program never reaches cannot gain it anything: a run under a profiler tells which
those are, and only the others are timed. Every program also runs once more with nothing left out, which shows noise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import documents
from gains import IMPORTS, environment, origin
from measuring import geomean

HERE = Path(__file__).parent
JSON, DOCUMENT, BLOCK = HERE / "ablation.json", HERE.parent / "docs" / "figures.md", "ablation"
PACKAGE = HERE.parent / "autokern"
LOSES = 1.02
"""Time without a part over time with it, above which a program is said to lose."""
CODE = (
    IMPORTS
    + """
script, off, trace = sys.argv[1:4]
from autokern.hooks import install
declare = install.hook
def hook(*args, **kwargs):
    home = sys._getframe(1).f_globals["__name__"].removeprefix("autokern.hooks.")
    return (lambda replacement: replacement) if off in ("hooks", "hooks/" + home) else declare(*args, **kwargs)
install.hook = hook
import autokern.auto
files = set()
def called(frame, event, argument):
    if event == "call":
        files.add(frame.f_code.co_filename)
if trace: sys.setprofile(called)
wall, cpu = time.perf_counter(), time.process_time()
runpy.run_path(script, run_name="__main__")
told = [time.perf_counter() - wall, time.process_time() - cpu]
sys.setprofile(None)
print("told", json.dumps([told, sorted(files), autokern.stats() if trace else {}]))
"""
)


def run(script: Path, off: str, threads: int, trace: bool = False) -> Any:
    """Run a script without one part; return seconds and CPU seconds after the imports, and what it reached."""
    order = {}
    if off == "first use":
        order = {"AUTOKERN_CALIBRATE": "never"}
    elif off == "replays":
        order = {"AUTOKERN_REPLAY": "0"}
    elif off.startswith("ops/"):
        order = {"AUTOKERN_FORCE": f"{off.removeprefix('ops/')}=stock"}
    elif "=" in off:
        order = {"AUTOKERN_EXCLUDE": off}
    command = [sys.executable, "-c", CODE, str(script), off, "trace" if trace else ""]
    with tempfile.TemporaryDirectory() as home:
        surroundings = environment("none", Path(home), threads, Path(home)) | order
        out = subprocess.run(command, env=surroundings, check=True, capture_output=True, text=True).stdout
    return json.loads(next(line for line in reversed(out.splitlines()) if line.startswith("told "))[5:])


def reached(script: Path, threads: int, asked: Sequence[str] = ()) -> list[str]:
    """Return the parts that a program reaches, of those that are asked for, if any are."""
    _, files, served = run(script, "", threads, trace=True)
    start, machinery = f"{PACKAGE}{os.sep}hooks{os.sep}", {"__init__", "install", "bypass"}
    within = {file[len(start) : -len(".py")].replace(os.sep, ".") for file in files if file.startswith(start)}
    hooks = [f"hooks/{file}" for file in sorted(within - machinery)]
    ops = {op: [name for name in by if name != "stock"] for op, by in served.items()}
    chosen = [f"{op}={name}" for op, names in ops.items() for name in names if len(names) > 1]
    used = [f"ops/{op}" for op, names in ops.items() if names]
    recorded = f"{PACKAGE}{os.sep}core{os.sep}replay{os.sep}recording.py"
    replays = ["replays"] if recorded in files else []
    parts = ["hooks", "first use", *replays, *hooks, *used, *chosen]
    return ["nothing", *(part for part in parts if part in asked or not asked)]


def measured(scripts: Sequence[Path], threads: int, rounds: int, asked: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield, by program, the least seconds and CPU seconds with all parts, and without each that it reaches."""
    for script in scripts:
        parts = ["", *reached(script, threads, asked)]
        found: dict[str, list[list[float]]] = {part: [] for part in parts}
        for round_ in range(rounds):
            for part in parts[:: 1 - 2 * (round_ % 2)]:
                found[part].append(run(script, part, threads)[0])
        least = {part: [min(each) for each in zip(*found[part], strict=True)] for part in parts}
        yield {"program": script.stem, "threads": threads, "all": least.pop(""), "without": least}


def lines_of(part: str) -> int | None:
    """Return the lines of the file of a hook or an op."""
    file = PACKAGE / f"{part.replace('.', os.sep)}.py"
    return len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else None


def slower(row: Mapping[str, Any], part: str) -> tuple[float, bool]:
    """Return how many times as long a program takes without a part, and whether that is a loss and no noise."""
    whole = [min(pair) for pair in zip(row["all"], row["without"]["nothing"], strict=True)]
    noise = [max(pair) / min(pair) for pair in zip(row["all"], row["without"]["nothing"], strict=True)]
    ratios = [without / least for without, least in zip(row["without"][part], whole, strict=True)]
    return ratios[0], all(ratio > max(LOSES, of) for ratio, of in zip(ratios, noise, strict=True))


def table(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table: parts, and the programs that lose without them."""
    run_, rows = figures["run"], figures["programs"]
    yield "| without | lines | programs that reach it | time, geometric mean | programs that lose more than noise |"
    yield "|---|---:|---:|---:|---|"
    parts = dict.fromkeys(part for row in rows for part in row["without"])
    for part in sorted(parts, key=lambda part: ("/" in part, "=" in part, part)):
        of = [row for row in rows if part in row["without"]]
        ratios = {f"{row['program']}{' (one thread)' * (row['threads'] == 1)}": slower(row, part) for row in of}
        losers = sorted((-wall, name) for name, (wall, loses) in ratios.items() if loses and part != "nothing")
        named = ", ".join(f"{name} {-wall:.2f}" for wall, name in losers[:4])
        more = f" and {len(losers) - 4} more" if len(losers) > 4 else ""
        mean = geomean([wall for wall, _ in ratios.values()])
        yield f"| {part} | {figures['lines'].get(part) or ''} | {len(of)} | {mean:.3f} | {named}{more} |"
    counts = " and ".join(str(count) for count in sorted({row["threads"] for row in rows}, reverse=True))
    yield ""
    yield (
        f"{run_['cpu']}, {counts} threads, {run_['date']}. No profile; seconds after the imports, the least of "
        f"{figures['rounds']} rounds in turn, without the part over the lesser of two with all parts ('nothing' leaves "
        "nothing out). A program loses where wall and CPU time exceed 1.02 and the ratio of those two."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the programs, or write the table into the docs, or tell by the exit status whether it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", type=Path, default=sorted((HERE / "whole").glob("*.py")))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="*", default=(), help="only these, such as replays or hooks/posterior")
    parser.add_argument("--output", type=Path, default=JSON)
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    if options.docs or options.check:
        block = "\n".join(table(json.loads(options.output.read_text()))) + "\n"
        same = documents.refresh(DOCUMENT, BLOCK, block, options.check)
        return int(options.check and not same)
    before = json.loads(options.output.read_text()) if options.output.exists() else {"lines": {}, "programs": []}
    names = {script.stem for script in options.scripts}
    kept = [row for row in before["programs"] if (row["threads"], row["program"] in names) != (options.threads, True)]
    figures = {
        "run": origin(options.threads), "rounds": options.rounds, "lines": before["lines"], "programs": kept,
    }  # fmt: skip
    for row in measured(options.scripts, options.threads, options.rounds, options.parts):
        figures["programs"].append(row)
        figures["lines"] |= {part: lines_of(part) for part in row["without"]}
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
        print(row["program"], {part: round(v[0] / row["all"][0], 3) for part, v in row["without"].items()}, flush=True)
    print("\n".join(table(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
