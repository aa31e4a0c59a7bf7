"""The versions of autokern and of installed packages, and which packages are the libraries."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

__version__ = "0.1.0"  # the only statement of the version; the package's metadata read it here
LIBRARIES = frozenset({"botorch", "gpytorch", "linear_operator"})  # the packages whose calls are dispatched


def is_of_libraries(module: Any) -> bool:
    """Whether a module of this name belongs to one of the libraries."""
    return str(module).partition(".")[0] in LIBRARIES


def installed(distribution: str) -> str:
    """Return the version of a distribution, a loaded module's first, without an import; empty if not installed."""
    found = getattr(sys.modules.get(distribution), "__version__", None)
    try:
        return found if isinstance(found, str) else importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
