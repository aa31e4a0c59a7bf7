"""T2: publishes that are killed or whose storage fails: the old profile stays or the new one is whole.

Each call of the system that a publish makes in turn is the last one of its process, or answers ENOSPC, EIO, EROFS,
EDQUOT or ESTALE. Calibrations are killed at random times. The next process can work at once, and at most one temporary
file stays.
"""

import contextlib
import errno
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from support import synthetic
from support.synthetic import HOST, profile

from autokern.core.settings import Settings
from autokern.tuning import store

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(7200)]
OLD, NEW = {8, 16}, {16, 32}
"""Sizes in the profile that is kept, and in the one that is published."""
KILLS = [(state, when, 0) for state in ("filled", "empty", "damaged") for when in ("before", "after")]
USUAL = ("ENOSPC", "EIO", "EROFS")
RARE = ("EDQUOT", "ESTALE", "ENOMEM", "EMFILE")
_FAST = (0, 5, 6)  # a kill before a call, one after a call, and a full disk: those of the fast tests


def kept(home):
    return synthetic.kept(Settings(home=home)) or set()


def saved(home, *sizes):
    store._reported.clear()
    return store.save(Settings(home=home), profile(*sizes))


def struck(home, index=-1, when="", number=0, names=None):
    """Publish in a process that is killed, or told of a failure, at one of its calls; return how it ended."""
    calls: list[str] = []

    def look(frame: Any, event: str, called: Any) -> None:
        if event.startswith("c_") and (called.__module__ or type(called.__self__).__module__) in (
            "posix", "fcntl", "_io",
        ):  # fmt: skip
            calls.extend([called.__name__] if event == "c_call" else [])
            if (index, when) == (len(calls) - 1, "before" if event == "c_call" else "after"):
                if number:
                    raise OSError(number, os.strerror(number))
                os.kill(os.getpid(), signal.SIGKILL)

    def run() -> int:
        sys.setprofile(look)
        status = 0 if saved(home, *NEW) else 1
        sys.setprofile(None)
        if names is not None:
            names.write_text(" ".join(calls[:-1]))  # without the last one of the profiler
        return status

    process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(run()))
    process.start()
    process.join()
    return process.exitcode


def faults(full):
    return [*KILLS, *(("filled", "before", getattr(errno, name)) for name in (*USUAL, *RARE * full))]


@pytest.mark.parametrize(("state", "when", "number"), [
    pytest.param(*fault, marks=[pytest.mark.slow] * (k not in _FAST)) for k, fault in enumerate(faults(full=True))
])  # fmt: skip
def test_a_writer_that_is_killed_or_fails_at_any_call_leaves_the_old_profile_or_the_new_one(
    tmp_path, in_earnest, state, when, number
):
    if (state, when, number) not in faults(in_earnest):
        pytest.skip("by --torture=full")
    before, home, names = (tmp_path / name for name in ("before", "home", "names"))
    before.mkdir(mode=0o700)
    if state != "empty":
        path = saved(before, *OLD)
        path.write_bytes(path.read_bytes()[: -10 if state == "damaged" else None])
    shutil.copytree(before, home)
    assert struck(home, names=names) == 0
    calls, old = names.read_text().split(), OLD if state == "filled" else set()
    assert len(calls) > 20
    assert calls.count("fsync") == 2, "of file and folder"
    for index, name in enumerate(calls):
        shutil.rmtree(home)
        shutil.copytree(before, home)
        where = f"call {index} ({name})"
        status = struck(home, index, when, number)
        assert status in ((0, 1) if number else (-signal.SIGKILL,)), where
        held = kept(home)
        assert held in (old, old | NEW), where
        assert status != 0 or held == old | NEW, f"{where}: told of success"
        assert not number or not list(home.glob("*.bad")), f"{where}: a good profile was put aside"
        assert len(list(home.glob("*.tmp"))) <= (not number or name in ("unlink", "remove")), where
        start = time.perf_counter()
        saved(home, 64)
        assert time.perf_counter() - start < 1, f"{where}: the next publish took a second"
        assert kept(home) == held | {64}, where


@pytest.mark.slow
def test_a_calibration_that_is_killed_loses_nothing_and_frees_the_lock(tmp_path, in_earnest):
    home, draw, kills = tmp_path / "home", random.Random(1), 60 if in_earnest else 4
    saved(home, *OLD)
    command = [sys.executable, "-m", "autokern", "calibrate", "--quick", "--ops", "cholesky", "--budget", "2"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    for _ in range(kills):
        with subprocess.Popen(command, env={**os.environ, "AUTOKERN_HOME": str(home)}, **quiet) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(draw.uniform(1.0, 3.5))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert kept(home) >= OLD, "another host's profile"
        assert not list(home.glob("*.bad"))
        assert all(store.load(Settings(home=home), path.stem) is not None for path in home.glob("*.json"))
        with store.calibrating(Settings(home=home), HOST, "cholesky") as granted:
            assert granted, "the right to calibrate stays with the dead"
    assert len(list(home.glob("*.tmp"))) <= kills
