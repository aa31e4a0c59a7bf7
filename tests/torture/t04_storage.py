"""T4: storage that fails. Whatever a publish's system calls answer, the old profile stays or the new one is whole.

Each call in turn answers ENOSPC, EIO, EROFS, EDQUOT or ESTALE, writes half, or the disk is really full: a small tmpfs
where one may be mounted, a limit on the size of files elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import tempfile
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
    """How much is done: what calls answer, and fillings of a real disk."""

    answers: tuple[int, ...]
    fillings: int


SIZES = {
    "ci": Size((errno.ENOSPC, errno.EIO, errno.EROFS), 12),
    "full": Size((errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.ESTALE, errno.ENOMEM, errno.EMFILE), 400),
}


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
        failures = kept_old = 0
        for index, name in enumerate(calls):
            faults = [tracing.Fault(index, "fail", number) for number in size.answers]
            faults += [tracing.Fault(index, "short")] if name == "write" else []
            for fault in faults:
                place.restore()
                outcome = tracing.traced(place.publish, fault, BOUNDARIES)
                how = errno.errorcode[fault.number] if fault.number else "half"
                where = f"{outcome.struck} (call {index}) answers {how}"
                failures += 1
                found.expect(outcome.status in (0, 1), f"{where}: the process ended with {outcome.status}")
                kept = place.held()
                found.expect(kept in (OLD, OLD | NEW), f"{where}: {sorted(kept)} is kept")
                told = outcome.status == 0
                found.expect(not told or kept == OLD | NEW, f"{where}: told of success, but {sorted(kept)} is kept")
                kept_old += kept == OLD
                aside, left = leftovers(place.home, ".bad"), leftovers(place.home, ".tmp")
                found.expect(not aside, f"{where}: a good profile was put aside")
                found.expect(len(left) <= 1, f"{where}: {left}")
                more = place.next_publish()
                found.expect(more == {64}, f"{where}: the next publish changes {more}")
        found.expect(len(calls) > 15, f"only {len(calls)} system calls were seen")
        found.figures["boundaries"] = f"{failures} failures at {len(calls)} calls, {kept_old} kept the old profile"


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
    main({"boundaries": boundaries, "full_disk": full_disk}, SIZES)
