"""T6: another user of the machine, who may write next to us, plants profiles, links and folders, and races us.

Nothing that he made is ever loaded, and nothing outside of our folder is touched. Needs root, to be two users.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bare import HOST, at, profile, saved, sizes, store
from harness import Findings, Mutation, ended, forked, main

from autokern.core.errors import ProfileError

VICTIM, ATTACKER = 54322, 54321
PLANTED = 666
"""The size in profiles of the attacker's; no other profile has it."""


class Size(NamedTuple):
    """How much is done: seconds of each race."""

    seconds: float


SIZES = {"ci": Size(3.0), "full": Size(60.0)}


def _may_drop() -> bool:
    return hasattr(os, "setuid") and os.geteuid() == 0


def _plant(home: Path, mode: int = 0o700) -> None:
    """Make a folder with a valid profile in it that is not ours."""
    store._reported.clear()
    saved(home, profile(PLANTED))
    for path in home.iterdir():
        path.chmod(0o644)
    home.chmod(mode)


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


def planted(found: Findings, size: Size) -> None:
    """Let the victim use homes that the attacker has prepared."""
    if not _may_drop():
        found.figures["planted"] = "skipped: needs root"
        return

    def ready_made(home: Path, private: Path) -> None:
        _plant(home, 0o755)

    def open_to_all(home: Path, private: Path) -> None:
        _plant(home, 0o777)

    def link_to_own(home: Path, private: Path) -> None:
        elsewhere = home.with_name("elsewhere")
        _plant(elsewhere, 0o755)
        home.symlink_to(elsewhere)

    def link_to_the_victims(home: Path, private: Path) -> None:
        home.symlink_to(private)

    def link_to_nothing(home: Path, private: Path) -> None:
        home.symlink_to(private / "made-by-the-victim")

    def link_on_the_way(home: Path, private: Path) -> None:
        home.parent.symlink_to(private)

    traps = [ready_made, open_to_all, link_to_own, link_to_the_victims, link_to_nothing, link_on_the_way]
    for trap in traps:
        _caught(found, trap)
    found.figures["planted"] = f"{len(traps)} traps"


def _caught(found: Findings, trap: Callable[[Path, Path], None]) -> None:
    """Let the victim use a home in which the attacker has set a trap."""
    with _shared() as (shared, private):
        home = shared / "way" / "autokern" if trap.__name__ == "link_on_the_way" else shared / "autokern"
        assert ended(forked(lambda: trap(home, private) or 0, ATTACKER)) == 0
        before = _listing(shared)

        def use() -> int:
            loaded = PLANTED in sizes(store.load(at(home), HOST))
            written = saved(home, profile(8)) is not None
            again = PLANTED in sizes(store.load(at(home), HOST))
            return loaded + 2 * written + 4 * again

        status = ended(forked(use, VICTIM))
        name = trap.__name__.replace("_", " ")
        found.expect(not status & 5, f"{name}: the planted profile was loaded")
        found.expect(not status & 2, f"{name}: a profile was written there")
        found.expect(status < 8, f"{name}: the victim ended with {status}")
        found.expect(_precious(private), f"{name}: something outside was touched")
        found.expect(_listing(shared) == before, f"{name}: the attacker's folder has changed")


def _listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path.relative_to(folder)), path.lstat().st_size) for path in folder.rglob("*"))


def own_home_left_open(found: Findings, size: Size) -> None:
    """A victim's own home that others may write to is not used, whoever put a profile into it."""
    if not _may_drop():
        found.figures["own home left open"] = "skipped: needs root"
        return
    with _shared() as (shared, _):
        home = shared / "autokern"

        def careless() -> int:
            saved(home, profile(8))
            home.chmod(0o777)
            return 0

        def replace() -> int:
            (home / f"{HOST}.json").unlink()
            _plant(home.with_name("bait"), 0o755)
            shutil.copy(home.with_name("bait") / f"{HOST}.json", home / f"{HOST}.json")
            return 0

        def use() -> int:
            return int(PLANTED in sizes(store.load(at(home), HOST)))

        assert ended(forked(careless, VICTIM)) == 0
        ended(forked(replace, ATTACKER))
        found.expect(ended(forked(use, VICTIM)) == 0, "a profile planted in an open home was loaded")

        def tidy() -> int:
            home.chmod(0o700)
            return use()

        found.expect(ended(forked(tidy, VICTIM)) == 0, "another user's file in a private home was loaded")

    with _shared() as (shared, _):
        home = shared / "autokern"

        def careless_file() -> int:
            path = saved(home, profile(8))
            home.chmod(0o755)
            return 0 if path is None else path.chmod(0o666) or 0

        def overwrite() -> int:
            _plant(home.with_name("bait"), 0o755)
            (home / f"{HOST}.json").write_bytes((home.with_name("bait") / f"{HOST}.json").read_bytes())
            return 0

        def use_again() -> int:
            return int(PLANTED in sizes(store.load(at(home), HOST)))

        assert ended(forked(careless_file, VICTIM)) == 0
        assert ended(forked(overwrite, ATTACKER)) == 0
        found.expect(ended(forked(use_again, VICTIM)) == 0, "a file that others may write to was loaded")
        found.figures["own home left open"] = "3 tries"


def race(found: Findings, size: Size) -> None:
    """Let the attacker exchange folder, link and file under the victim's hands while he loads and saves."""
    if not _may_drop():
        found.figures["race"] = "skipped: needs root"
        return
    with _shared() as (shared, private):
        home, bait = shared / "autokern", shared / "bait"
        assert ended(forked(lambda: _plant(bait, 0o777) or 0, ATTACKER)) == 0

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
                    wrong += PLANTED in sizes(store.load(at(home), HOST))
                    saved(home, profile(8))
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


def modes(found: Findings, size: Size) -> None:
    """What is written can be read by its owner alone, whatever the umask."""
    with tempfile.TemporaryDirectory() as folder:
        home, before = Path(folder, "home"), os.umask(0)
        try:
            path = saved(home, profile(8))
        finally:
            os.umask(before)
        found.expect(path is not None, "what was written is not believed by its own writer")
        for each, wanted in ((home, 0o700), (home / f"{HOST}.json", 0o600)):
            mode = stat.S_IMODE(each.stat().st_mode)
            found.expect(mode == wanted, f"{each.name} has mode {mode:o}")
        found.figures["modes"] = "umask 0"


MUTATIONS = [
    Mutation("owners are not looked at", "system/files.py", "if info.st_uid != os.geteuid():", "if False:", "planted"),
    Mutation(
        "modes are not looked at",
        "system/files.py",
        "if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):",
        "if False:",
        "own_home_left_open",
    ),
    Mutation(
        "links of others are followed",
        "system/files.py",
        "if info.st_uid not in (0, os.geteuid()):",
        "if False:",
        "planted",
    ),
    Mutation(
        "a folder is opened as a whole",
        "system/files.py",
        "self.fd = _reached(path, create) if private else os.open(path, _FOLDER)",
        "create and path.mkdir(mode=0o700, parents=True, exist_ok=True)\n        self.fd = os.open(path, _FOLDER)",
        "race",
    ),
    Mutation(
        "a new file is open to all",
        "system/files.py",
        "bytes, mode: int = 0o600",
        "bytes, mode: int = 0o666",
        "modes",
    ),
]

if __name__ == "__main__":
    main({"planted": planted, "own_home_left_open": own_home_left_open, "race": race, "modes": modes}, SIZES)
