"""Two calibrations in fresh homes: on how many keys of programs they choose differently; writes `agreement.json`.

`autokern calibrate --quick` runs twice, each into an empty home. Programs of `whole/` run once with what is shipped,
and say which keys they ask and how often. Where the profiles choose differently for a key, each judges what the other's
choice costs, by its own times. Calls within calls count in both, since a composite op's time holds that of its parts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import documents
import msgspec

from autokern.core.decision import Decision
from autokern.core.errors import AutokernError
from autokern.core.problem import Feasibility, Problem
from autokern.core.registry import get
from autokern.core.settings import Settings
from autokern.runtime import dispatch
from autokern.system import host
from autokern.tuning.chooser import Chooser
from autokern.tuning.policy import decide, described
from autokern.tuning.store import read_file

HERE = Path(__file__).parent
PROGRAMS = (
    "gp_tutorial", "gp_co2", "gp_hadamard", "gp_multitask", "gp_batch", "gp_product", "gp_lbfgs", "gp_stream",
    "gp_sgpr", "bo_qlogei", "bo_multitask", "bo_thompson",
)  # fmt: skip
CODE = """
import json, runpy, sys
import msgspec
import autokern.auto
from autokern.runtime import dispatch
runpy.run_path(sys.argv[1], run_name="__main__")
found = [(msgspec.to_builtins(decision.problem), calls) for decision, calls in dispatch.decisions()]
print("\\ntold", json.dumps(found))
"""


def keys(script: Path, home: str) -> dict[Problem, int]:
    """Return the keys that a program asks in an empty home, and the number of calls of each."""
    given = {**os.environ, "AUTOKERN_HOME": home, "AUTOKERN_CALIBRATE": "never"}
    command = [sys.executable, "-c", CODE, str(script)]
    told = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=True).stdout
    lines = [line for line in told.splitlines() if line.startswith("told ")]
    return {msgspec.convert(problem, Problem): calls for problem, calls in json.loads(lines[-1].removeprefix("told "))}


def calibrated(home: Path) -> Chooser:
    """Return what a quick calibration in an empty home knows."""
    home.mkdir(mode=0o700)
    command = [sys.executable, "-m", "autokern", "calibrate", "--quick", "--output", str(home / "profile.json")]
    given = {**os.environ, "AUTOKERN_HOME": str(home)}
    subprocess.run(command, env=given, stdout=subprocess.DEVNULL, check=True)
    return Chooser(read_file(home / "profile.json"))


def chosen(problem: Problem, chooser: Chooser) -> Decision:
    return described(decide(Feasibility(get(problem.op), problem), chooser, Settings()), chooser, Settings())


def judged(asked: Mapping[Problem, int], choosers: Sequence[Chooser]) -> dict[str, Any]:
    """Return the keys that were chosen differently, and the seconds of all calls by each profile's times."""
    differ, unknown, seconds, lost = 0, [0, 0], [0.0, 0.0], [0.0, 0.0]
    for problem, calls in asked.items():
        with contextlib.suppress(AutokernError):
            found = [chosen(problem, chooser) for chooser in choosers]
            differ += found[0].candidate != found[1].candidate
            for index, (own, other) in enumerate((found, found[::-1])):
                if other.candidate not in own.predicted or own.candidate not in own.predicted:
                    unknown[index] += own.candidate != other.candidate
                    continue
                seconds[index] += calls * own.predicted[own.candidate]
                lost[index] += calls * (own.predicted[other.candidate] - own.predicted[own.candidate])
    return {"keys": len(asked), "differ": differ, "unknown": unknown, "seconds": seconds, "lost": lost}


def measured() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        choosers = [calibrated(Path(folder, name)) for name in ("one", "other")]
        asked = {name: keys(HERE / "whole" / f"{name}.py", str(Path(folder, "empty"))) for name in PROGRAMS}
    dispatch.reset(Settings(calibrate="never"))
    cpu = host.current().fields["cpu"]
    return {
        "host": f"{cpu['model']}, {cpu['torch_threads']} threads; torch {host.current().fields['versions']['torch']}",
        "problems": [len(chooser.profile.trials) for chooser in choosers],
        "programs": {name: judged(of, choosers) for name, of in asked.items()},
    }


def costs(row: Mapping[str, Any]) -> str:
    """Return what the other's choices cost by each profile's times; it may have none of the keys in question."""
    told = []
    for seconds, lost, unknown in zip(row["seconds"], row["lost"], row["unknown"], strict=True):
        share = f"{100 * lost / (seconds or 1.0):.1f} %"
        told.append(
            share if not unknown else "not timed" if unknown == row["differ"] else f"{share}, {unknown} not timed"
        )
    return "; ".join(told)


def block(results: Mapping[str, Any]) -> str:
    rows = results["programs"]
    whole: dict[str, Any] = {name: sum(row[name] for row in rows.values()) for name in ("keys", "differ")}
    for name in ("seconds", "lost", "unknown"):
        whole[name] = [sum(row[name][index] for row in rows.values()) for index in (0, 1)]
    lines = ["| program | keys | chosen differently | cost by one profile's times, by the other's |"]
    lines.append("|---|---:|---:|---:|")
    for name, row in [*rows.items(), ("all", whole)]:
        lines.append(f"| {name} | {row['keys']} | {row['differ']} | {costs(row) if row['differ'] else '0 %'} |")
    told = f"{results['host']}; {' and '.join(map(str, results['problems']))} problems measured."
    return "\n".join([*lines, "", told, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare the choices of two quick calibrations for keys of programs.")
    parser.add_argument("--output", type=Path, default=HERE / "agreement.json", metavar="FILE")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="run nothing, write the table into this document")
    parser.add_argument("--check", type=Path, metavar="FILE", help="run nothing, exit 1 if that table is out of date")
    options = parser.parse_args(arguments)
    status = documents.served(parser, options, {"agreement": block})
    if status is not None:
        return status
    options.output.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
