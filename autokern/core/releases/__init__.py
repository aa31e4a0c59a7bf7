"""The versions of autokern and of installed packages, and which packages and files are those of the libraries."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import sysconfig
from typing import Any

__version__ = "0.1.0"  # the only statement of the version; the package's metadata read it here
LIBRARIES = frozenset({"botorch", "gpytorch", "linear_operator"})  # the packages whose calls are dispatched

_SITES = frozenset(("dist-packages", "site-packages"))  # names of folders of packages


def is_of_libraries(module: Any) -> bool:
    """Whether a module of this name belongs to one of the libraries."""
    return str(module).partition(".")[0] in LIBRARIES


@functools.cache
def is_installed(file: str) -> bool:
    """Whether a file is Python's, an installed package's or a library's; code made at run time begins with ``<``."""
    checkouts = [path for name in (*LIBRARIES, "autokern") for path in getattr(sys.modules.get(name), "__path__", ())]
    beside_torch = map(os.path.dirname, getattr(sys.modules.get("torch"), "__path__", ()))
    folders = *_standard(), *beside_torch, *checkouts
    in_folder = file.startswith(tuple(folder + os.sep for folder in folders))
    return in_folder or file.startswith("<") or not _SITES.isdisjoint(file.split(os.sep))


@functools.cache
def _standard() -> tuple[str, str]:
    """Return the folders of the standard library; finding them takes a tenth of a millisecond each time."""
    return sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")


def installed(distribution: str) -> str:
    """Return the version of a distribution, a loaded module's first, without an import; empty if not installed."""
    found = getattr(sys.modules.get(distribution), "__version__", None)
    try:
        return found if isinstance(found, str) else importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
