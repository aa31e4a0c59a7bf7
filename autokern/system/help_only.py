"""A process that only prints help or versions: the libraries, which take seconds, are not imported.

It runs no program, so nobody else sees a package without its public names.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_EXECUTED = ("autokern.__main__", "autokern.cli.commands")


def is_asked() -> bool:
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
