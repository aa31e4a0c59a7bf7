"""T2: publishes that are killed or whose storage fails: the old profile stays or the new one is whole.

Each system call of a publish in turn is the last one of its process, answers ENOSPC, EIO, EROFS, EDQUOT or ESTALE, or
writes half. Calibrations are killed at random times. A disk is really full: a small tmpfs where one may be mounted, a
limit on the size of files elsewhere. The next process can work at once, and at most one temporary file stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import tracing
from bare import HOST, NEW, OLD, Rewritten, at, leftovers, profile, saved, sizes, store
from harness import Findings, Mutation, main, tmpfs

BOUNDARIES = frozenset(
    {"openat", "write", "fsync", "rename", "renameat", "renameat2", "flock", "fstat", "newfstatat", "read", "close",
     "unlinkat", "unlink", "getdents64", "mkdir", "mkdirat", "statx", "fcntl"}
)  # fmt: skip


class Size(NamedTuple):
    """How much is done: kills of a calibration, what calls answer, and fillings of a real disk."""

    calibrations: int
    answers: tuple[int, ...]
    fillings: int


USUAL = (errno.ENOSPC, errno.EIO, errno.EROFS)
SIZES = {
    "ci": Size(4, USUAL, 12),
    "full": Size(60, (*USUAL, errno.EDQUOT, errno.ESTALE, errno.ENOMEM, errno.EMFILE), 400),
}


def publish(found: Findings, size: Size) -> None:
    """Kill a writer before and after each of its system calls, at an empty, a filled and a damaged home."""
    if (why := tracing.problem()) is not None:
        found.figures["publish"] = f"skipped: {why}"
        return
    for state in ("filled", "empty", "damaged"):
        with tempfile.TemporaryDirectory() as folder:
            place = Rewritten(Path(folder))
            if state == "empty":
                place.before.mkdir(mode=0o700)
            else:
                path = saved(place.before, profile(*OLD))
                assert path is not None
                path.write_bytes(path.read_bytes()[: -10 if state == "damaged" else None])
            place.restore()
            calls = tracing.traced(place.publish).calls
            for index in range(len(calls)):
                for what in ("kill before", "kill after"):
                    _struck(found, place, OLD if state == "filled" else set(), tracing.Fault(index, what))
            found.expect(len(calls) > 20, f"only {len(calls)} system calls were seen")
            found.figures[f"{state} home"] = f"{2 * len(calls)} kills"


def boundaries(found: Findings, size: Size) -> None:
    """Let each system call of a publish fail in each way."""
    if (why := tracing.problem()) is not None:
        found.figures["boundaries"] = f"skipped: {why}"
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Rewritten(Path(folder))
        saved(place.before, profile(*OLD))
        place.restore()
        calls = tracing.traced(place.publish, among=BOUNDARIES).calls
        held = []
        for index, name in enumerate(calls):
            faults = [tracing.Fault(index, "fail", number) for number in size.answers]
            faults += [tracing.Fault(index, "short")] if name == "write" else []
            held += [_struck(found, place, OLD, fault, BOUNDARIES) for fault in faults]
        found.expect(len(calls) > 15, f"only {len(calls)} system calls were seen")
        told = f"{len(held)} failures at {len(calls)} calls, {held.count(OLD)} kept the old profile"
        found.figures["boundaries"] = told


def _struck(
    found: Findings, place: Rewritten, kept: set[int], fault: tracing.Fault, among: frozenset[str] | None = None
) -> set[int]:
    """Publish with a fault where something is kept, and once more without; return what the first one kept."""
    place.restore()
    outcome = tracing.traced(place.publish, fault, among)
    how = errno.errorcode[fault.number] if fault.number else fault.what
    where, killed = f"{how} at call {fault.index} ({outcome.struck or 'not reached'})", fault.what.startswith("kill")
    ends = (-signal.SIGKILL,) if killed else (0, 1)
    found.expect(not outcome.struck or outcome.status in ends, f"{where}: ended with {outcome.status}")
    held, left = place.held(), leftovers(place.home, ".tmp")
    found.expect(held in (kept, kept | NEW), f"{where}: {sorted(held)} is kept")
    found.expect(outcome.status != 0 or held == kept | NEW, f"{where}: told of success, but {sorted(held)} is kept")
    found.expect(killed or not leftovers(place.home, ".bad"), f"{where}: a good profile was put aside")
    found.expect(len(left) <= 1, f"{where}: {left}")
    start = time.perf_counter()
    more = place.next_publish()
    found.expect(time.perf_counter() - start < 1, f"{where}: the next publish took a second")
    found.expect(more == {64}, f"{where}: the next publish changes {more}")
    return held


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


def full_disk(found: Findings, size: Size) -> None:
    """Fill a disk to various degrees before a publish, or limit the size of files."""
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder, "small")
        small.mkdir()
        with tmpfs(small) as mounted:
            if mounted:
                _fill(found, small, size.fillings)
            else:
                _limit(found, small / "home", size.fillings)


def _fill(found: Findings, disk: Path, fillings: int) -> None:
    home, ballast = disk / "home", disk / "ballast"
    refused = 0
    for index in range(fillings):
        shutil.rmtree(home, ignore_errors=True)
        saved(home, profile(*OLD))
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            room = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 4096 * (index % 5)
            file.write(b"x" * room)
        written = saved(home, profile(*NEW))
        refused += written is None
        ballast.unlink()
        kept = sizes(store.load(at(home), HOST))
        found.expect(kept == (OLD if written is None else OLD | NEW), f"full disk: {sorted(kept)} is kept")
        found.expect(saved(home, profile(64)) is not None, "full disk: nothing can be written when there is room again")
        found.expect(not leftovers(home, ".tmp"), f"full disk: {leftovers(home, '.tmp')}")
    found.expect(refused > 0, "the disk was never full")
    found.figures["full disk"] = f"{fillings} fillings of a tmpfs, {refused} publishes refused"


def _limit(found: Findings, home: Path, fillings: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    refused = 0
    for index in range(fillings):
        shutil.rmtree(home, ignore_errors=True)
        saved(home, profile(*OLD))
        resource.setrlimit(resource.RLIMIT_FSIZE, (index * 97 % 1200, before[1]))
        try:
            written = saved(home, profile(*NEW))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        refused += written is None
        kept = sizes(store.load(at(home), HOST))
        found.expect(kept == (OLD if written is None else OLD | NEW), f"file size limit: {sorted(kept)} is kept")
    found.expect(refused > 0, "the limit was never reached")
    found.figures["full disk"] = f"{fillings} limits on the size of files (nothing may be mounted), {refused} refused"


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
    Mutation(
        "errors of the system pass through",
        "tuning/store.py",
        '    except uninterrupted(OSError, ProfileError) as error:\n        message = f"asked to keep',
        '    except ProfileError as error:\n        message = f"asked to keep',
        "boundaries",
    ),
    Mutation(
        "a failed write is taken for done",
        "system/files.py",
        "written = os.write(fd, rest)\n",
        "written = len(rest)\n        with contextlib.suppress(OSError):\n            written = os.write(fd, rest)\n",
        "full_disk",
    ),
    Mutation(
        "a passing fault costs a good profile its name",
        "tuning/store.py",
        "if isinstance(error, OSError) and error.errno not in _FOREIGN:",
        "if False:",
        "boundaries",
    ),
]

if __name__ == "__main__":
    parts = {"publish": publish, "boundaries": boundaries, "full_disk": full_disk, "calibration": calibration}
    main(parts, SIZES)
