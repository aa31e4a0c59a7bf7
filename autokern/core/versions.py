"""Versions of what is installed."""

from __future__ import annotations

import importlib.metadata

__all__ = ["installed"]


def installed(distribution: str) -> str:
    """Return the version of a distribution, as its metadata say without an import; empty where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
