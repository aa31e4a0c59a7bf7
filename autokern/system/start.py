"""The start of a program: a pause of the garbage collector, and no libraries where only help is printed.

torch, gpytorch and BoTorch make some 400,000 objects that live as long as the process. Python's collector walks through
them four times while they are made, a quarter of a second in all. This module is imported before them. A process that
only prints help or versions does not import them, which takes seconds. It runs no program, so nobody else sees a
package without its public names.
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
"""Frozen objects of an interpreter that nobody has told to freeze: 375 in Python 3.12; whoever freezes has 4,000."""
_EXECUTED = ("autokern.__main__", "autokern.cli.commands")


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import the libraries inside the block, without collections; what is alive then counts as old.

    Nothing is kept from the collector: to freeze all objects and to unfreeze them moves them to the oldest generation.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() < _BORN:  # else they are the program's
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def only_helps() -> bool:
    """Whether this process is the command line itself, asked for help or versions.

    What Python was started with is compared too, since programs set ``sys.argv``.
    """
    if sys.flags.inspect or sys.flags.interactive:  # a prompt follows
        return False
    given = list(getattr(sys, "argv", ()))
    first = len(sys.orig_argv) - len(given)
    if not given or first < 1 or sys.orig_argv[first + 1 :] != given[1:] or not _only_prints(given[1:]):
        return False
    if given[0] == "-m":  # until the module to be run is found
        return sys.orig_argv[first - 1 : first + 1] == ["-m", "autokern"]
    return sys.orig_argv[first] == given[0] and _is_our_script(given[0])


def _only_prints(words: list[str]) -> bool:
    if not words or words[0] in ("-h", "--help", "--version"):
        return True
    if words[0] == "profile" and words[1:2] not in ([], ["-h"], ["--help"]):
        words = words[1:]
    return words == ["profile"] or (not words[0].startswith("-") and words[1:2] in (["-h"], ["--help"]))


def _is_our_script(path: str) -> bool:
    """Whether a file is the command that was installed with the package."""
    if os.path.basename(path) not in ("autokern", "autokern.exe", "autokern-script.py"):
        return False
    import sysconfig

    return os.path.dirname(os.path.realpath(path)) == os.path.realpath(sysconfig.get_path("scripts"))


class _Later:
    """A finder of autokern's modules which are executed when they are first used; commands register themselves."""

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
    """Let modules of autokern be executed when they are first used, from now on in this process."""
    sys.meta_path.insert(0, _Later())
