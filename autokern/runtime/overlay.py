"""Overlays: settings and a memo of their own for the calls of one thread or task, as `using` blocks have them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from autokern.core import solved
from autokern.core.settings import Settings
from autokern.runtime.memo import Memo


class Overlay:
    """The settings of one block, with a memo of its own, inside of another block or of none."""

    def __init__(self, settings: Settings, outer: Overlay | None) -> None:
        self.settings = settings
        self.outer = outer
        self.memo: Memo = {}


current: ContextVar[Overlay | None] = ContextVar("autokern_using", default=None)


@contextlib.contextmanager
def apart(settings: Settings) -> Iterator[None]:
    """Keep calls out of the memo of the program: measurements call what the program calls, and are not the user's.

    What they decide is forgotten.
    """
    token = current.set(Overlay(settings, current.get()))
    try:
        with solved.aside():
            yield
    finally:
        current.reset(token)
