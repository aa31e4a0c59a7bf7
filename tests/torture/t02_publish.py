"""T2: publishes that are killed or whose storage fails: the old profile stays or the new one is whole.

Each call of the system that a publish makes in turn is the last one of its process, or answers ENOSPC, EIO, EROFS,
EDQUOT or ESTALE. Calibrations are killed at random times. The next process can work at once, and at most one temporary
file stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bare import HOST, at, kept, saved, store
from harness import Findings, Mutation, ended, forked, main

OLD, NEW = {8, 16}, {16, 32}
"""Sizes in the profile that is kept, and in the one that is published."""


class Size(NamedTuple):
    """How much is done: kills of a calibration, and what calls answer."""

    calibrations: int
    answers: tuple[int, ...]


USUAL = (errno.ENOSPC, errno.EIO, errno.EROFS)
SIZES = {
    "ci": Size(4, USUAL),
    "full": Size(60, (*USUAL, errno.EDQUOT, errno.ESTALE, errno.ENOMEM, errno.EMFILE)),
}


class Fault(NamedTuple):
    """What happens at one of the calls of the system, from 0."""

    index: int
    when: str  # "before" or "after" it
    number: int = 0  # the errno of a failure; without one the process is killed


def struck(publish: Callable[[], int], fault: Fault | None = None, names: Path | None = None) -> int:
    """Publish in a process, let a fault happen at one of its calls or note their names; return how it ended."""
    calls: list[str] = []

    def look(frame: Any, event: str, called: Any) -> None:
        if event.startswith("c_") and (called.__module__ or type(called.__self__).__module__) in _SYSTEM:
            when = "before" if event == "c_call" else "after"
            calls.extend([called.__name__] if when == "before" else [])
            if fault is not None and fault[:2] == (len(calls) - 1, when):
                if fault.number:
                    raise OSError(fault.number, os.strerror(fault.number))
                os.kill(os.getpid(), signal.SIGKILL)

    def run() -> int:
        sys.setprofile(look)
        status = publish()
        sys.setprofile(None)
        if names is not None:
            names.write_text(" ".join(calls[:-1]))  # without the last one of the profiler
        return status

    return ended(forked(run))


_SYSTEM = ("posix", "fcntl", "_io")


def publish(found: Findings, size: Size) -> None:
    """Kill a writer before and after each of its calls, at an empty, a filled and a damaged home."""
    _each(found, ("filled", "empty", "damaged"), [("before", 0), ("after", 0)])


def boundaries(found: Findings, size: Size) -> None:
    """Let each call of a publish fail in each way."""
    _each(found, ("filled",), [("before", number) for number in size.answers])


def _each(found: Findings, states: tuple[str, ...], faults: list[tuple[str, int]]) -> None:
    for state in states:
        with tempfile.TemporaryDirectory() as folder:
            before, home, names = (Path(folder, name) for name in ("before", "home", "names"))
            before.mkdir(mode=0o700)
            if state != "empty":
                path = saved(before, *OLD)
                assert path is not None
                path.write_bytes(path.read_bytes()[: -10 if state == "damaged" else None])
            shutil.copytree(before, home)
            assert struck(partial(_published, home), names=names) == 0
            calls, held = names.read_text().split(), []
            for index, name in enumerate(calls):
                for when, number in faults:
                    shutil.rmtree(home)
                    shutil.copytree(before, home)
                    where = f"{errno.errorcode.get(number, when)} at call {index} ({name})"
                    old = OLD if state == "filled" else set()
                    held.append(_survived(found, home, old, where, Fault(index, when, number)))
            found.expect(len(calls) > 20, f"only {len(calls)} calls of the system were seen")
            told = f"{len(held)} faults at {len(calls)} calls, {held.count(OLD)} kept the old profile"
            found.figures[f"{state} home, {'failures' if faults[0][1] else 'kills'}"] = told


def _published(home: Path) -> int:
    return 0 if saved(home, *NEW) else 1


def _survived(found: Findings, home: Path, old: set[int], where: str, fault: Fault) -> set[int]:
    """Publish with a fault where something is kept, and once more without; return what the first one kept."""
    status = struck(partial(_published, home), fault)
    found.expect(status in ((0, 1) if fault.number else (-signal.SIGKILL,)), f"{where}: ended with {status}")
    held, left = kept(home), list(home.glob("*.tmp"))
    found.expect(held in (old, old | NEW), f"{where}: {sorted(held)} is kept")
    found.expect(status != 0 or held == old | NEW, f"{where}: told of success, but {sorted(held)} is kept")
    found.expect(not fault.number or not list(home.glob("*.bad")), f"{where}: a good profile was put aside")
    found.expect(len(left) <= 1, f"{where}: {left}")
    start = time.perf_counter()
    saved(home, 64)
    found.expect(time.perf_counter() - start < 1, f"{where}: the next publish took a second")
    found.expect(kept(home) == held | {64}, f"{where}: the next publish leaves {sorted(kept(home))}")
    return held


def calibration(found: Findings, size: Size) -> None:
    """Kill real calibrations at random times; the profile grows or stays, and the lock is free at once."""
    with tempfile.TemporaryDirectory() as folder:
        home, draw = Path(folder, "home"), random.Random(1)
        saved(home, *OLD)
        command = [sys.executable, "-m", "autokern", "calibrate", "--quick", "--ops", "cholesky", "--budget", "2"]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        over = 0
        for _ in range(size.calibrations):
            with subprocess.Popen(command, env={**os.environ, "AUTOKERN_HOME": str(home)}, **quiet) as process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(draw.uniform(1.0, 3.5))
                over += process.poll() is not None
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            found.expect(kept(home) >= OLD, "another host's profile is lost")
            found.expect(not list(home.glob("*.bad")), "a profile was left damaged")
            for path in home.glob("*.json"):
                found.expect(store.load(at(home), path.stem) is not None, f"{path.name} cannot be read")
            with store.calibrating(at(home), HOST, "cholesky") as granted:
                found.expect(granted, "the right to calibrate stays with the dead")
        left = len(list(home.glob("*.tmp")))
        found.expect(left <= size.calibrations, f"{left} temporary files are left by {size.calibrations} kills")
        found.figures["calibration"] = f"{size.calibrations} kills ({over} had ended), {left} temporaries"


STORE, FILES = "tuning/store.py", "system/files.py"
MUTATIONS = [
    Mutation(
        "a profile is written in place first", STORE,
        "            with folder.temporary(profile.fingerprint, _encoded(",
        "            (folder.path / name).write_bytes(_encoded(_added(folder, profile)))\n"
        "            with folder.temporary(profile.fingerprint, _encoded(", "publish",
    ),
    Mutation(
        "an old profile is removed before the new one has its name", STORE,
        "                folder.replace(temporary, name)",
        "                folder.remove(name)\n                folder.replace(temporary, name)", "publish",
    ),
    Mutation(
        "errors of the system pass through", STORE,
        '    except uninterrupted(OSError, ProfileError) as error:\n        message = f"asked to keep',
        '    except ProfileError as error:\n        message = f"asked to keep', "boundaries",
    ),
    Mutation(
        "a failed write is taken for done", FILES, "written = os.write(fd, rest)\n",
        "written = len(rest)\n        with contextlib.suppress(OSError):\n            written = os.write(fd, rest)\n",
        "boundaries",
    ),
    Mutation(
        "a passing fault costs a good profile its name", STORE,
        "if isinstance(error, OSError) and error.errno not in _FOREIGN:", "if False:", "boundaries",
    ),
]  # fmt: skip

if __name__ == "__main__":
    main({"publish": publish, "boundaries": boundaries, "calibration": calibration}, SIZES)
