"""Probes: run code that may hang, crash or print in a child process within a time limit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from autokern.core.settings import is_ours

_TRIALS = Path(__file__).with_name("probe_programs") / "trials.py"
PROGRAMS = dict.fromkeys(("torch.compile", "GPU", "KeOps", "hooks"), _TRIALS)
"""Program of each trial; the name of the trial is its argument."""


class Answer(NamedTuple):
    """Result of a probe."""

    works: bool
    text: str  # its last line of output, or the failure
    seconds: float
    timed_out: bool = False


class Probe:
    """A running program of `PROGRAMS`; a ``with`` block starts it, and kills it at the end."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> Probe:
        self._folder = tempfile.TemporaryDirectory(prefix="autokern-", ignore_cleanup_errors=True)
        self._log = open(os.path.join(self._folder.name, "log"), "w+", encoding="utf-8", errors="replace")
        environment = {key: value for key, value in os.environ.items() if not is_ours(key)} | {
            "AUTOKERN_HOME": self._folder.name,
            "AUTOKERN_CALIBRATE": "never",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "KEOPS_CACHE_FOLDER": self._folder.name,  # empty: a result compiled earlier would hide a missing compiler
            "PYTHONOPTIMIZE": "",  # trials check by assertions
            "PYTHONPATH": os.pathsep.join(_path()),
        }
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, PROGRAMS[self._name], self._name],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=self._folder.name,
            env=environment,
            start_new_session=True,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._kill()
        self._log.close()
        self._folder.cleanup()

    def poll(self, give_up: bool = False) -> Answer | None:
        """Return the answer, or None while the program runs; with `give_up`, kill it and answer."""
        code = self._process.poll()
        seconds = time.monotonic() - self._began
        if code is None:
            if not give_up:
                return None
            self._kill()
            return Answer(False, f"did not finish within {seconds:.0f} s", seconds, True)
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        if code == 0:
            return Answer(True, lines[-1] if lines else "", seconds)
        if code < 0:
            return Answer(False, f"killed by signal {-code}", seconds)
        errors = [line for line in lines if re.match("[^:]*(Error|Exception)", line)]
        return Answer(False, (errors or lines or ["no output"])[-1][:300], seconds)

    def _kill(self) -> None:
        """Kill the program and all processes that it started."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        elif self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def _path() -> list[str]:
    """Return `sys.path` for another working directory, without the build folder that pykeops adds to it."""
    pykeops = sys.modules.get("pykeops")
    built = None if pykeops is None else Path(pykeops.get_build_folder())
    return [place for place in sys.path if place and Path(place) != built]
