"""Probes: code that may hang, crash or print is tried in a process of its own, within a time limit."""

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

from autokern.system import keops

_TRIALS = Path(__file__).with_name("probe_programs") / "trials.py"
PROGRAMS = dict.fromkeys(("torch.compile", "GPU", "KeOps", "hooks"), _TRIALS)
"""Programs by the name of the trial, which is their argument."""


class Answer(NamedTuple):
    """Result of a probe: whether it works, its last line, and its time in seconds."""

    works: bool
    text: str
    seconds: float
    timed_out: bool = False


class Probe:
    """A program of `PROGRAMS` on trial, from the beginning of a ``with`` block to its end at the latest."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> Probe:
        self._folder = tempfile.TemporaryDirectory(prefix="autokern-", ignore_cleanup_errors=True)
        self._log = open(os.path.join(self._folder.name, "log"), "w+", encoding="utf-8", errors="replace")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("AUTOKERN")} | {
            "AUTOKERN_HOME": self._folder.name,
            "AUTOKERN_CALIBRATE": "never",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "KEOPS_CACHE_FOLDER": self._folder.name,  # an earlier compiled result proves no compiler
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
        """Return the answer if there is one; with `give_up`, always."""
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
        """End the program and all processes that it started."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        elif self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def _path() -> list[str]:
    """Return the module path for another working directory, without the build folder that pykeops has put there."""
    built = keops.build_folder()
    return [place for place in sys.path if place and (built is None or Path(place) != built)]
