"""Reading a call's arguments before dispatch: if any reading fails, stock runs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from autokern.core.errors import AutokernError
from autokern.core.recovery import caught

__all__ = ["trivial", "unless_it_fails"]

_log = logging.getLogger("autokern")


def unless_it_fails(read: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `read` so that a failure returns None, which means that stock runs.

    autokern's own errors (`SettingsError`, `MemoryBudgetError`) and unrecoverable ones still propagate.
    """

    @functools.wraps(read)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return read(*args, **kwargs)
        except AutokernError:
            raise
        except caught(Exception) as error:
            _log.debug("%s could not be read, so stock runs: %r", read.__qualname__, error)
            return None

    return guarded


def trivial(params: Mapping[str, Any]) -> bool:
    """Whether all keyword arguments of a kernel call are None or False (compared by identity: they may be tensors)."""
    return all(value is None or value is False for value in params.values())
