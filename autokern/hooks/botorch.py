"""Hooks into BoTorch, which may be imported after `enable`, or never.

They are declared when it is there, at the latest by the first likelihood that one of its closures asks for.
"""

from __future__ import annotations

import importlib
import sys

from autokern.hooks.install import put_declared

__all__ = ["look"]

_declared = False


def look() -> None:
    """Declare the hooks if BoTorch has been imported by now, and install them."""
    global _declared
    if not _declared and "botorch.optim.closures.core" in sys.modules:
        _declared = True
        importlib.import_module("autokern.hooks.later.closures")
        put_declared()


look()
