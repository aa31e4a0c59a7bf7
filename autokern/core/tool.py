"""Tool: whether something that a host may have (KeOps) works there."""

from __future__ import annotations

import msgspec

__all__ = ["Tool"]


class Tool(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What came of trying a tool on this host (KeOps): a verdict that holds as long as `setting` does.

    Parameters
    ----------
    works : bool
        Whether it did what was asked.
    found : str
        What it said, or why it failed.
    seconds : float
        How long the trial took, compiling included.
    setting : str
        What the verdict rests on (version, compiler).
    """

    works: bool
    found: str = ""
    seconds: float = 0.0
    setting: str = ""
