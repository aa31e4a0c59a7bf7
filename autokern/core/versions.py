"""The version of autokern, and of what is installed."""

from __future__ import annotations

import importlib.metadata

__all__ = ["__version__", "installed"]

__version__ = "0.1.0"
"""Where the version is stated; the package's metadata read it here."""


def installed(distribution: str) -> str:
    """Return the version of a distribution, as its metadata say without an import; empty where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
