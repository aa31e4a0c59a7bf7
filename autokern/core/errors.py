"""The errors that autokern raises; each message states the request, the finding and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutokernError(Exception):
    """Base of all errors of autokern."""


class SettingsError(AutokernError, ValueError):
    """A setting, an environment variable or an argument has an invalid value."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a question that ends an error message, if a name looks like one of some names; else nothing."""
    near = difflib.get_close_matches(name, sorted(names), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


class MemoryBudgetError(AutokernError, MemoryError):
    """A call needs more memory than allowed or available; nothing was allocated."""


class ProfileError(AutokernError):
    """An explicitly named profile cannot be read, trusted or written."""


class RanksError(AutokernError, RuntimeError):
    """Ranks of one job disagree, or one of them is lost; the message names it."""


class KeOpsError(AutokernError, RuntimeError):
    """KeOps cannot work on this machine, or failed."""


class AutokernWarning(UserWarning):
    """A fault that costs speed, not correctness."""
