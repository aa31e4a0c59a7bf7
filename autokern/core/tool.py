"""Tool: whether an optional tool (KeOps) works on a host."""

from __future__ import annotations

import msgspec

__all__ = ["Tool"]


class Tool(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The result of trying a tool on this host, valid while `setting` is the same.

    Parameters
    ----------
    works : bool
        Whether it works.
    found : str
        Its output, or the reason of its failure.
    seconds : float
        Duration of the trial, compiling included.
    setting : str
        Version and compiler.
    """

    works: bool
    found: str = ""
    seconds: float = 0.0
    setting: str = ""
