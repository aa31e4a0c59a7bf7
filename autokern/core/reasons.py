"""Why something is left to the library: said once each in the log at level info, and to whoever listens."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

_log = logging.getLogger("autokern")
_said = set[tuple[str, str]]()


class _Here(threading.local):
    listener: list[tuple[str, str]] | None = None


_here = _Here()


def left(what: str, reason: object) -> None:
    """Note why the library computes something."""
    told = what, str(reason) or repr(reason)
    if _here.listener is not None:
        _here.listener.append(told)
    elif told not in _said:
        _said.add(told)
        _log.info("the library computes %s: %s", *told)


@contextlib.contextmanager
def heard() -> Iterator[list[tuple[str, str]]]:
    """Collect what is noted in this thread, and why, while this is entered."""
    before, _here.listener = _here.listener, []
    try:
        yield _here.listener
    finally:
        _here.listener = before
