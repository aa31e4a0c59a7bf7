"""Shown: results as HTML for notebooks, as data frames and as plots, by a module that only those who ask import."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["shown"]


def shown(form: str, *given: Any) -> Any:
    """Return what a function of the command line's module of notebooks makes of a result."""
    return getattr(importlib.import_module("autokern.cli.notebook"), form)(*given)
