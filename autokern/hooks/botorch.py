"""Hooks into BoTorch, which may be imported after `enable`, or never.

They are declared when its modules are there, at the latest by the first likelihood that one of its closures asks for or
by the first prediction in one piece.
"""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any

from autokern.core import known
from autokern.hooks.install import put_declared

__all__ = ["look"]

_lock = threading.RLock()
_waiting = {"botorch.optim.closures.core": "closures", "botorch.optim.optimize": "acquisition"}
"""Modules of BoTorch, each with the module in `later` that has its hooks."""


def look() -> None:
    """Declare the hooks of those modules that have been imported by now, and install them."""
    for name in [name for name in list(_waiting) if name in sys.modules]:
        module = sys.modules[name]
        if getattr(module.__spec__, "_initializing", False):  # half of it is there
            continue
        with _lock:
            later = _waiting.get(name)  # another thread may have been here
            if later and _declared(f"autokern.hooks.later.{later}", module):
                del _waiting[name]
                put_declared()


def _declared(later: str, module: Any) -> bool:
    try:
        return bool(importlib.import_module(later).declare(module))
    except (AttributeError, ImportError, KeyError, TypeError) as error:  # a name of BoTorch's is gone
        known.leave_out(later, f"cannot be used: {error}")
        return True


look()
