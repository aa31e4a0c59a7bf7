"""Tool: whether an optional tool (KeOps) works on a host."""

from __future__ import annotations

import msgspec

__all__ = ["Tool"]


class Tool(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The result of trying a tool on this host, valid while `setting` is the same."""

    works: bool
    found: str = ""  # its output, or the reason of its failure
    seconds: float = 0.0  # duration of the trial, compiling included
    setting: str = ""  # version and compiler
