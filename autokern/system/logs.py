"""Logs: ``AUTOKERN_LOG`` sets the level of the logger `autokern` and shows its records, while it is set.

Without it the logger stays as the user has set it. Records go to standard error only where the program has no handler
of its own.
"""

from __future__ import annotations

import logging
import sys

from autokern.core.recovery import uninterrupted

_log = logging.getLogger("autokern")


class _Handler(logging.Handler):
    """Writes to what is standard error now, unless another handler gets the records."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        others = [handler for handler in _log.handlers if handler is not self]
        if _log.propagate:
            others += logging.getLogger().handlers
        if not others and sys.stderr is not None:
            try:
                print(f"autokern: {record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)
            except uninterrupted(Exception):  # as every handler of logging
                self.handleError(record)


_handler = _Handler()
_levels: tuple[int, int] | None = None
"""The level before autokern set one, and that one."""


def apply(level: str | None) -> None:
    """Set the level of the logger and show its records; None puts the level back that was there before."""
    global _levels
    before, ours = _levels or (_log.level, -1)
    if level is None:
        if _log.level == ours:  # else the program has set another since
            _log.setLevel(before)
        _levels = None
        _log.removeHandler(_handler)
        return
    _log.setLevel(level.upper())
    _levels = before, _log.level
    _log.addHandler(_handler)
