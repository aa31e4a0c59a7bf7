"""The Ops, each in a file of its name or in one of `_SHARED`; a file is imported when its op is first used."""

from __future__ import annotations

import pkgutil

from autokern.core import registry

_SHARED = {
    "decompositions": ("cholesky", "qr"),
    "exact_models": ("objective", "posterior"),
    "matrix_densities": ("dense_log_prob", "task_log_prob"),
}

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):  # else it serves several ops: candidates, problems and samples, costs, errors
        for _name in _SHARED.get(_module.name, (_module.name,)):
            registry.declare(_name, f"{__name__}.{_module.name}")
