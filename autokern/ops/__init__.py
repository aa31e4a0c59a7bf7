"""The Ops, in files named after them, but for two that share one; a file is imported when its op is first used."""

from __future__ import annotations

import pkgutil

from autokern.core import registry

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        registry.declare(_module.name, f"{__name__}.{_module.name}")
for _name in ("dense_log_prob", "task_log_prob"):
    registry.declare(_name, f"{__name__}._shared.of_matrices")
