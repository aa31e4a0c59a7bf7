"""Floors: numbers of elements below which stock serves every call of an op, so that hooks need no decision.

They derive from the session's choices (`tuning.fitting.floor`), which its first decision loads; until then they are 0.
A hook reads one integer, without a lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from autokern.core.locks import Lock
from autokern.runtime.memo import current

if TYPE_CHECKING:
    from autokern.runtime.session import Session

_traced = torch.compiler.is_dynamo_compiling
_ordered = current.get
_plain = torch.Tensor


class Floor:
    """The floors of one op on the CPU and on CUDA GPUs; 0 while the user's settings affect choices."""

    __slots__ = ("cpu", "cuda")

    def __init__(self) -> None:
        self.cpu = self.cuda = 0

    def covers(self, mat: Any) -> bool:
        """Whether stock serves a call on this matrix; never within a `using` block, which the dispatcher obeys."""
        return (
            not _traced()
            and mat.__class__ is _plain
            and mat.numel() < (self.cpu if mat.is_cpu else self.cuda if mat.is_cuda else 0)
            and _ordered() is None
        )


_floors: dict[str, Floor] = {}
_in_force: Session | None = None
_lock = Lock()


def of(op: str) -> Floor:
    """Return the Floor of an op, always the same object."""
    with _lock.here():
        floor = _floors.setdefault(op, Floor())
        _update()
    return floor


def publish(session: Session, replaces: bool = False) -> None:
    """Update the floors from a session's choices, if the session is in force or replaces the one in force."""
    global _in_force
    with _lock.here():
        _in_force = session if replaces else _in_force
        if session is _in_force:
            _update()


def _update() -> None:
    for op, floor in _floors.items():
        floor.cpu, floor.cuda = (0 if _in_force is None else _in_force.floor(op, device) for device in ("cpu", "cuda"))
