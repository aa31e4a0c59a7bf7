"""The errors that autokern raises; each message says what was asked, what was found and what to do."""

from __future__ import annotations

__all__ = ["AutokernError", "AutokernWarning", "KeOpsError", "MemoryBudgetError", "ProfileError", "SettingsError"]


class AutokernError(Exception):
    """Base of every error that autokern raises on its own account."""


class SettingsError(AutokernError, ValueError):
    """A setting, an environment variable or an argument has a value that cannot be obeyed."""


class MemoryBudgetError(AutokernError, MemoryError):
    """A call would take more memory than the user allows or than is there; nothing was allocated."""


class ProfileError(AutokernError):
    """A profile that was named explicitly cannot be read, trusted or written."""


class KeOpsError(AutokernError, RuntimeError):
    """KeOps was to compute something and cannot work here, or failed."""


class AutokernWarning(UserWarning):
    """Something went wrong that cost speed but not correctness."""
