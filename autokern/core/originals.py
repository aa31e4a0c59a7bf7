"""Originals: the libraries' own functions, also where autokern has taken their place already."""

from __future__ import annotations

from typing import Any

__all__ = ["MARK", "original"]

MARK = "_autokern_replacement"
"""An attribute of every replacement; what it replaces is its ``__wrapped__``."""


def original(owner: Any, name: str) -> Any:
    """Return an attribute of a module or class as it is without autokern.

    Ops are imported when they are first asked for, and the hooks may be installed by then.
    """
    found = vars(owner)[name]
    while getattr(found, MARK, False):
        found = found.__wrapped__
    return found
