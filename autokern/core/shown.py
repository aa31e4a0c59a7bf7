"""Shown: results as HTML for notebooks and as data frames; the module that makes them is imported on first use."""

from __future__ import annotations

import importlib
from typing import Any


class Shown:
    """A result that a notebook shows as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(importlib.import_module("autokern.cli.notebook").html(self))

    def to_frame(self) -> Any:
        """Return a pandas data frame: a row for each candidate of a decision or of a trial, or for each decision.

        Times are in seconds, memory in bytes. AutokernError if pandas is not installed.
        """
        return importlib.import_module("autokern.cli.notebook").frame(self)
