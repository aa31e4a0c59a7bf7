"""One function of this folder in a fresh process, so that its memory is seen, with a time limit.

Nothing here knows a model.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
"""What is freed goes back to the system at once, so that nothing freed before hides what is taken later."""


def in_child(
    module: str,
    function: str,
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    limit: float = 600.0,
    returned: bool = True,
) -> dict[str, Any]:
    """Return what a function of a module returns in a fresh process, or why it failed, under `failed`.

    Parameters
    ----------
    module, function : str
        A module of this folder, and one of its functions, which returns a dictionary that JSON can hold.
    *arguments
        What JSON can hold.
    environment : mapping, optional
        Variables that differ from those of this process.
    limit : float
        Seconds after which the process is ended.
    returned : bool
        Whether memory goes back to the system as soon as it is freed. Its peak is seen better then, and every matrix
        takes its pages anew, which can double the time of a dense step.
    """
    code = (
        "import json, sys\n"
        "name, function, arguments = json.loads(sys.argv[1])\n"
        "module = __import__(name)\n"
        "print(json.dumps(getattr(module, function)(*arguments)))"
    )
    command = [sys.executable, "-c", code, json.dumps([module, function, arguments])]
    surroundings = {**os.environ, **(MALLOC if returned else {}), **(environment or {})}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=FOLDER, env=surroundings, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {limit:g} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return {"failed": lines[-1][:600]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


class Peak:
    """The most resident memory of this process from now on, above what there is now. Linux only."""

    def __init__(self) -> None:
        gc.collect()
        forget_peak()
        self._before = status("VmRSS")

    def bytes(self) -> int:
        return max(0, status("VmHWM") - self._before)


def forget_peak() -> None:
    """Let the kernel take ``VmHWM`` of from now on. Linux only."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def status(field: str) -> int:
    """Return a figure of this process's memory in bytes, ``VmRSS`` or ``VmHWM``. Linux only."""
    return 1024 * int(Path("/proc/self/status").read_text(encoding="ascii").partition(f"{field}:")[2].split()[0])
