"""Shown: results as HTML for notebooks, data frames and plots; the module that makes them is imported on first use."""

from __future__ import annotations

import importlib
from typing import Any


def shown(form: str, *given: Any) -> Any:
    """Return a result as `autokern.cli.notebook` presents it: ``html``, ``frame`` or ``plot``."""
    return getattr(importlib.import_module("autokern.cli.notebook"), form)(*given)


class Shown:
    """A result that a notebook shows as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(shown("html", self))

    def to_frame(self) -> Any:
        """Return a pandas data frame: a row for each candidate of a decision or of a trial, or for each decision.

        Times are in seconds, memory in bytes. AutokernError if pandas is not installed.
        """
        return shown("frame", self)

    def plot(self, ax: Any = None) -> Any:
        """Draw the predicted times of the candidates of a decision, or the calls by op and candidate.

        Return the matplotlib axes, by default new ones. AutokernError if matplotlib is not installed.
        """
        return shown("plot", self, ax)
