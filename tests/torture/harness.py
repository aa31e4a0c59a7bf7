"""What tortures share: sizes, findings, a copy of the package with a deliberate fault, and a run in a fresh process.

A torture is a script of this folder, so that the package it tortures is whatever PYTHONPATH says: the real one, or a
copy with one line changed, which the torture must then find to be broken. It prints one line of JSON at its end.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PACKAGE = HERE.parent.parent / "autokern"


class Mutation(NamedTuple):
    """A deliberate fault in a copy of the package, in words; `part` of the torture must find it."""

    name: str
    file: str
    old: str  # stands in the file exactly once
    new: str
    part: str


class Findings:
    """What a torture found: numbers for the report by name, and promises that were broken, in words."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.broken: list[str] = []

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note a promise that does not hold."""
        if not holds:
            self.broken.append(otherwise)


Torture = Callable[[Findings, Any], None]


def forked(function: Callable[[], int], user: int | None = None) -> int:
    """Start a process, of another user if one is named, that ends with what a function returns; return its number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 99
    try:
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        status = function()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ended(child: int) -> int:
    """Wait for a process; return its exit status, negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(parts: Mapping[str, Torture], sizes: Mapping[str, Any]) -> None:
    """Run the script: ``script.py SIZE [PART ...]``, all parts by default.

    A script whose faults are found sooner has a size of its own for them, ``fault``.
    """
    size, *chosen = sys.argv[1:]
    logging.getLogger("autokern").disabled = True  # it has much to tell
    found = Findings()
    with tempfile.TemporaryDirectory() as home:
        os.environ["AUTOKERN_HOME"] = home  # never the tester's own
        for name in chosen or parts:
            parts[name](found, sizes.get(size, sizes["ci"]))
    print(json.dumps({"figures": found.figures, "broken": found.broken[:20], "count": len(found.broken)}))


def tortures() -> list[str]:
    """Return the names of the scripts."""
    return sorted(path.stem for path in HERE.glob("t[0-9]*.py"))


def mutated(mutation: Mutation, folder: Path) -> Path:
    """Copy the package into a folder, with its fault; return the folder."""
    copy = folder / "autokern"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        times = text.count(mutation.old)
        raise ValueError(f"{mutation.name}: {mutation.old!r} stands {times} times in {mutation.file}")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    return folder


def run(name: str, size: str, *parts: str, package: Path = PACKAGE.parent) -> dict[str, Any]:
    """Run parts of a torture, all if none is named, in a process of its own, with the package that a folder holds.

    One that is not done after half an hour, or two hours in full size, has hung, which is a fault as well.
    """
    limit = 7200.0 if size == "full" else 1800.0
    bare = {key: value for key, value in os.environ.items() if not key.startswith("AUTOKERN")}
    bare["PYTHONPATH"] = os.pathsep.join([str(package), str(HERE)])
    command = [sys.executable, str(HERE / f"{name}.py"), size, *parts]
    try:
        done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"figures": {}, "broken": [f"it hangs: not done after {limit:g} s"], "count": 1}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["nothing on stderr"]
        return {"figures": {}, "broken": [f"it ended with {done.returncode}: {lines[-1]}"], "count": 1}
    return dict(json.loads(done.stdout.splitlines()[-1]))
