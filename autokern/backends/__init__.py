"""Candidates that some machines cannot run: KeOps, CUDA graphs.

Each file is loaded by an entry point of the group `autokern.candidates`, like the candidates of any other package
(`core.registry`). The first call of a candidate imports its backend.
"""

from __future__ import annotations

import functools
import importlib.util


@functools.cache
def installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None
