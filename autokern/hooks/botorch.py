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
    core = sys.modules.get("botorch.optim.closures.core")
    if not _declared and core is not None:
        _declared = True
        importlib.import_module("autokern.hooks.later.closures").declare(core)
        put_declared()


look()
