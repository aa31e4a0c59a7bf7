"""Hooks into BoTorch, which may be imported after `enable` or never, and replays, which training loops use, too.

Hooks into BoTorch are declared once its modules are imported; hooks into gpytorch look for these modules.
"""

from __future__ import annotations

import importlib
import sys

from autokern.core.releases import known
from autokern.core.state import Lock
from autokern.hooks.install import put_declared

_lock = Lock()
_waiting = {
    "botorch.optim.closures.core": "closures.declare",
    "botorch.optim.optimize": "acquisition.on_one_thread",
    "botorch.generation.gen": "acquisition.replayed",
}
"""Modules of BoTorch whose hooks are not declared yet, each with the function here that declares them."""


def look() -> None:
    """Declare and install the hooks of all BoTorch modules that are imported by now."""
    for name in [name for name in list(_waiting) if name in sys.modules]:
        module = sys.modules[name]
        if getattr(module.__spec__, "_initializing", False):  # still being imported
            continue
        with _lock.here():
            if name not in _waiting:  # another thread was faster
                continue
            later, _, declare = f"{__name__}.{_waiting[name]}".rpartition(".")
            try:
                if not getattr(importlib.import_module(later), declare)(module):
                    continue
            except (AttributeError, ImportError, KeyError, TypeError) as error:  # this release lacks a name
                known.leave_out(later, f"cannot be used: {error}")
            del _waiting[name]
            put_declared()


look()
