"""T6: another user of the machine, who may write next to us, races us with profiles, links and folders.

Nothing that he made is ever loaded, and nothing outside of our folder is touched. Needs root, to be two users.
`tests/tuning/test_store.py` has what he may have planted before.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bare import HOST, at, kept, saved, store
from harness import Findings, Mutation, ended, forked, main

from autokern.core.errors import ProfileError

VICTIM, ATTACKER = 54322, 54321
PLANTED = 666
"""The size in profiles of the attacker's; no other profile has it."""


class Size(NamedTuple):
    """How much is done: seconds of each race."""

    seconds: float


SIZES = {"fault": Size(10.0), "ci": Size(3.0), "full": Size(60.0)}


def _may_drop() -> bool:
    return hasattr(os, "setuid") and os.geteuid() == 0


def _plant(home: Path) -> int:
    """Make a folder that all may write to, with a valid profile in it that is not ours."""
    saved(home, PLANTED)
    for path in home.iterdir():
        path.chmod(0o644)
    home.chmod(0o777)
    return 0


@contextlib.contextmanager
def _shared() -> Iterator[tuple[Path, Path]]:
    """A folder as /tmp is, and a private one of the victim with something precious in it."""
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        top.chmod(0o755)
        shared, private = top / "shared", top / "private"
        shared.mkdir()
        shared.chmod(0o1777)
        private.mkdir(mode=0o700)
        (private / f"{HOST}.json").write_bytes(b"precious")
        (private / "0123456789abcdef.0123456789abcdef.tmp").write_bytes(b"precious")
        for path in (private, *private.iterdir()):
            os.chown(path, VICTIM, VICTIM)
            if path.is_file():
                os.utime(path, (0, 0))
        yield shared, private


def _precious(private: Path) -> bool:
    found = list(private.iterdir())
    return len(found) == 2 and all(path.is_file() and path.read_bytes() == b"precious" for path in found)


def race(found: Findings, size: Size) -> None:
    """Let the attacker exchange folder, link and file under the victim's hands while he loads and saves."""
    if not _may_drop():
        found.figures["race"] = "skipped: needs root"
        return
    with _shared() as (shared, private):
        home, bait = shared / "autokern", shared / "bait"
        assert ended(forked(lambda: _plant(bait), ATTACKER)) == 0

        def attack() -> int:
            draw = random.Random(6)
            while True:
                with contextlib.suppress(OSError):
                    kind = draw.randrange(4)
                    if kind == 0:
                        home.symlink_to(private)
                    elif kind == 1:
                        home.symlink_to(bait)
                    elif kind == 2:
                        bait.rename(home)
                    else:
                        home.mkdir()
                        (home / f"{HOST}.json").symlink_to(private / f"{HOST}.json")
                for undo in (home.unlink, lambda: home.rename(bait), lambda: shutil.rmtree(home)):
                    with contextlib.suppress(OSError):
                        undo()

        def use() -> int:
            ends, wrong, turns = time.monotonic() + size.seconds, 0, 0
            while time.monotonic() < ends:
                turns += 1
                try:
                    wrong += PLANTED in kept(home)
                    saved(home, 8)
                    with contextlib.suppress(ProfileError):  # it is another user's, and says so
                        store.clear(at(home))
                    shutil.rmtree(home, ignore_errors=True)
                except Exception:
                    return 98
            (private / "turns").write_text(str(turns))
            return min(wrong, 90)

        attacker = forked(attack, ATTACKER)
        status = ended(forked(use, VICTIM))
        os.kill(attacker, signal.SIGKILL)
        ended(attacker)
        turns = int((private / "turns").read_text()) if (private / "turns").exists() else 0
        (private / "turns").unlink(missing_ok=True)
        found.expect(status != 98, "the victim met an exception")
        found.expect(status == 0, f"planted profiles were loaded {status} times")
        found.expect(_precious(private), "something outside was touched")
        found.expect(turns > 50, f"the victim came to his turn {turns} times")
        found.figures["race"] = f"{turns} turns in {size.seconds:g} s"


MUTATIONS = [
    Mutation(
        "a folder is opened as a whole",
        "system/files.py",
        "self.fd = _reached(path, create) if private else os.open(path, _FOLDER)",
        "create and path.mkdir(mode=0o700, parents=True, exist_ok=True)\n        self.fd = os.open(path, _FOLDER)",
        "race",
    ),
]

if __name__ == "__main__":
    main({"race": race}, SIZES)
