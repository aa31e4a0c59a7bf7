"""The Ops, one file each, named after the op; a file is imported when its op is first used."""

from __future__ import annotations

import pkgutil

from autokern.core import registry

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        registry.declare(_module.name, f"{__name__}.{_module.name}")
