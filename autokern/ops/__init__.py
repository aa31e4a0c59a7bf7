"""The Ops, one file each; importing the package registers them all.

Files that begin with an underscore hold what several ops share.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")
