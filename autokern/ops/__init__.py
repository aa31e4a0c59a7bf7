"""The Ops, one file each, named as the op; each is imported when its op is first asked for.

Files that begin with an underscore hold what several ops share.
"""

from __future__ import annotations

import pkgutil

from autokern.core import registry

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        registry.declare(_module.name, f"{__name__}.{_module.name}")
