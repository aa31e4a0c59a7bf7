"""Start-up: imports with the garbage collector paused, and lazy imports in a process that only prints help.

Importing torch, gpytorch and BoTorch creates some 400,000 objects that live as long as the process. Python's collector
would traverse them four times meanwhile, a quarter of a second in all. A process that only prints help or versions does
not import them, which takes seconds; it runs no program, so nobody else sees a package without its public names.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

_BORN = 1000
"""With fewer frozen objects, `gc.freeze` was not called: Python 3.12 starts with 375, and a call freezes over 4,000."""
_EXECUTED = ("autokern.__main__", "autokern.cli.commands")


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Pause the garbage collector in the block, then move all objects to the oldest generation, where it sees them."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() < _BORN:  # else the program has frozen objects
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def only_helps() -> bool:
    """Whether this process is the command line, and prints only help or versions."""
    return not (sys.flags.inspect or sys.flags.interactive) and is_command_line() and _only_prints(sys.argv[1:])


def is_command_line() -> bool:
    """Whether this process is autokern's command line; ``sys.orig_argv`` tells, since programs set ``sys.argv``."""
    given = list(getattr(sys, "argv", ()))
    first = len(sys.orig_argv) - len(given)
    if not given or first < 1 or sys.orig_argv[first + 1 :] != given[1:]:
        return False
    if given[0] == "-m":  # Python has not found the module yet
        return sys.orig_argv[first - 1 : first + 1] == ["-m", "autokern"]
    return sys.orig_argv[first] == given[0] and _is_our_script(given[0])


def _only_prints(words: list[str]) -> bool:
    if not words or words[0] in ("-h", "--help", "--version"):
        return True
    if words[0] == "profile" and words[1:2] not in ([], ["-h"], ["--help"]):
        words = words[1:]
    return words == ["profile"] or (not words[0].startswith("-") and words[1:2] in (["-h"], ["--help"]))


def _is_our_script(path: str) -> bool:
    """Whether a file is the installed command ``autokern``."""
    if os.path.basename(path) not in ("autokern", "autokern.exe", "autokern-script.py"):
        return False
    import sysconfig

    return os.path.dirname(os.path.realpath(path)) == os.path.realpath(sysconfig.get_path("scripts"))


class _Later:
    """A finder that loads autokern's modules lazily, except the commands, which register when they are executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("autokern.") or name.startswith(_EXECUTED):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def import_later() -> None:
    """Load modules of autokern lazily from now on in this process."""
    sys.meta_path.insert(0, _Later())
