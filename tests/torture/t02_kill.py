"""T2: kill -9 at every system call of a publish, and in the middle of calibrations.

No profile is lost, the next process can work at once, and at most one temporary file stays.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import tracing
from bare import HOST, NEW, OLD, Rewritten, at, leftovers, profile, saved, sizes, store
from harness import Findings, Mutation, main


class Size(NamedTuple):
    """How much is done: kills of a calibration."""

    calibrations: int


SIZES = {"ci": Size(4), "full": Size(60)}


def publish(found: Findings, size: Size) -> None:
    """Kill a writer before and after each of its system calls, at an empty, a filled and a damaged home."""
    if (why := tracing.problem()) is not None:
        found.figures["publish"] = f"skipped: {why}"
        return
    for state in ("filled", "empty", "damaged"):
        _publish(found, state)


def _publish(found: Findings, state: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place, kept = Rewritten(Path(folder)), {"filled": OLD}.get(state, set())
        if state == "filled":
            saved(place.before, profile(*OLD))
        elif state == "damaged":
            path = saved(place.before, profile(*OLD))
            assert path is not None
            path.write_bytes(path.read_bytes()[:-10])
        else:
            place.before.mkdir(mode=0o700)
        place.restore()
        calls = tracing.traced(place.publish).calls
        slowest, most = 0.0, 0
        for index in range(len(calls)):
            for what in ("kill before", "kill after"):
                place.restore()
                outcome = tracing.traced(place.publish, tracing.Fault(index, what))
                where = f"{state} home, {what} call {index} ({outcome.struck or 'not reached'})"
                if outcome.struck:
                    found.expect(outcome.status == -signal.SIGKILL, f"{where}: ended with {outcome.status}")
                held = place.held()
                found.expect(held in (kept, kept | NEW), f"{where}: {sorted(held)} is kept")
                most = max(most, len(leftovers(place.home, ".tmp")))
                start = time.perf_counter()
                more = place.next_publish()
                slowest = max(slowest, time.perf_counter() - start)
                found.expect(more == {64}, f"{where}: the next publish changes {more}")
        found.expect(most <= 1, f"{state} home: {most} temporary files are left")
        found.expect(slowest < 1, f"{state} home: the next publish took {slowest:.2f} s")
        found.expect(len(calls) > 20, f"only {len(calls)} system calls were seen")
        told = f"{2 * len(calls)} kills, at most {most} temporary, next publish within {slowest:.3f} s"
        found.figures[f"{state} home"] = told


def calibration(found: Findings, size: Size) -> None:
    """Kill real calibrations at random times; the profile grows or stays, and the lock is free at once."""
    with tempfile.TemporaryDirectory() as folder:
        home, draw = Path(folder, "home"), random.Random(1)
        saved(home, profile(*OLD))
        command = [sys.executable, "-m", "autokern", "calibrate", "--quick", "--ops", "cholesky", "--budget", "2"]
        environment = {**os.environ, "AUTOKERN_HOME": str(home)}
        ended = 0
        for _ in range(size.calibrations):
            with subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            ) as process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(draw.uniform(1.0, 3.5))
                ended += process.poll() is not None
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            found.expect(sizes(store.load(at(home), HOST)) >= OLD, "another host's profile is lost")
            found.expect(not leftovers(home, ".bad"), "a profile was left damaged")
            for path in home.glob("*.json"):
                loaded = store.load(at(home), path.stem)
                found.expect(loaded is not None, f"{path.name} cannot be read")
            with store.calibrating(at(home), HOST, "cholesky") as granted:
                found.expect(granted, "the right to calibrate stays with the dead")
        left = len(leftovers(home, ".tmp"))
        found.expect(left <= size.calibrations, f"{left} temporary files are left by {size.calibrations} kills")
        found.figures["calibration"] = f"{size.calibrations} kills ({ended} had ended), {left} temporaries"


MUTATIONS = [
    Mutation(
        "a profile is written in place first",
        "tuning/store.py",
        "            with folder.temporary(profile.fingerprint, _encoded(",
        "            (folder.path / name).write_bytes(_encoded(_added(folder, profile)))\n"
        "            with folder.temporary(profile.fingerprint, _encoded(",
        "publish",
    ),
    Mutation(
        "an old profile is removed before the new one has its name",
        "tuning/store.py",
        "                folder.replace(temporary, name)",
        "                folder.remove(name)\n                folder.replace(temporary, name)",
        "publish",
    ),
]

if __name__ == "__main__":
    main({"publish": publish, "calibration": calibration}, SIZES)
