"""The version of autokern, and of what is installed."""

from __future__ import annotations

import importlib.metadata
import sys

__version__ = "0.1.0"
"""Where the version is stated; the package's metadata read it here."""


def installed(distribution: str) -> str:
    """Return the version of a distribution without an import; empty where it is not installed.

    A module that is loaded says it itself: the metadata may be those of another copy.
    """
    found = getattr(sys.modules.get(distribution), "__version__", None)
    try:
        return found if isinstance(found, str) else importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
