"""T6: another user of the machine, who may write next to us, races us with profiles, links and folders.

Nothing that he made is ever loaded, and nothing outside of our folder is touched. Needs root, to be two users.
`tests/tuning/test_store.py` has what he may have planted before.
"""

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from forks import ended, forked
from support.synthetic import HOST, kept, profile

from autokern.core.errors import ProfileError
from autokern.core.settings import Settings
from autokern.tuning import store

VICTIM, ATTACKER = 54322, 54321
PLANTED = 666
"""The size in profiles of the attacker's; no other profile has it."""


def plant(home: Path) -> int:
    """Make a folder that all may write to, with a valid profile in it that is not ours."""
    store.save(Settings(home=home), profile(PLANTED))
    for path in home.iterdir():
        path.chmod(0o644)
    home.chmod(0o777)
    return 0


@pytest.fixture
def places():
    """A folder as /tmp is, and a private one of the victim with something precious in it."""
    with tempfile.TemporaryDirectory() as folder:
        shared, private = Path(folder, "shared"), Path(folder, "private")
        Path(folder).chmod(0o755)
        shared.mkdir()
        shared.chmod(0o1777)
        private.mkdir(mode=0o700)
        os.chown(private, VICTIM, VICTIM)
        for name in (f"{HOST}.json", "0123456789abcdef.0123456789abcdef.tmp"):
            (private / name).write_bytes(b"precious")
            os.chown(private / name, VICTIM, VICTIM)
            os.utime(private / name, (0, 0))
        yield shared, private


@pytest.mark.skipif(not hasattr(os, "setuid") or os.geteuid() != 0, reason="needs root, to be two users")
@pytest.mark.filterwarnings("ignore")
def test_an_attacker_who_exchanges_folder_link_and_file_meanwhile_plants_and_touches_nothing(places, in_earnest):
    (shared, private), seconds = places, 60.0 if in_earnest else 10.0
    home, bait, log = shared / "autokern", shared / "bait", shared / "log"
    assert ended(forked(lambda: plant(bait), ATTACKER)) == 0

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
        ends, turns, there = time.monotonic() + seconds, 0, Settings(home=home)
        while time.monotonic() < ends:
            turns += 1
            if PLANTED in (kept(there) or ()):
                return 1
            store._reported.clear()
            store.save(there, profile(8))
            with contextlib.suppress(ProfileError):  # it is another user's, and says so
                store.clear(there)
            shutil.rmtree(home, ignore_errors=True)
        log.write_text(str(turns))
        return 0

    attacker = forked(attack, ATTACKER)
    status = ended(forked(use, VICTIM))
    os.kill(attacker, signal.SIGKILL)
    ended(attacker)
    assert status == 0, "a planted profile was loaded" if status == 1 else "the victim met an exception"
    assert int(log.read_text()) > 50, "turns"
    assert [path.read_bytes() for path in private.iterdir() if path.is_file()] == [b"precious"] * 2
    assert len(list(private.iterdir())) == 2, "something outside was touched"
