"""Logs: ``AUTOKERN_LOG`` sets the level of the logger `autokern` and shows its records.

Without the variable the logger stays as the user has set it. Records go to standard error only if the program has no
handler of its own.
"""

from __future__ import annotations

import logging
import sys

from autokern.core.recovery import uninterrupted

_log = logging.getLogger("autokern")


class _Handler(logging.Handler):
    """Writes to the present `sys.stderr`, unless another handler gets the records."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        others = [handler for handler in _log.handlers if handler is not self]
        if _log.propagate:
            others += logging.getLogger().handlers
        if not others and sys.stderr is not None:
            try:
                print(f"autokern: {record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)
            except uninterrupted(Exception):  # as the handlers of logging do
                self.handleError(record)


_handler = _Handler()


def apply(level: str | None) -> None:
    """Set the logger's level and show its records, if a level is given."""
    if level is not None:
        _log.setLevel(level.upper())
        _log.addHandler(_handler)
