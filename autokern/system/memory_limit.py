"""The memory limit: how many bytes a call may take, whether it fits, and the error where it does not.

The limit is the least of the user's order (``AUTOKERN_MEMORY``, ``using(memory=...)``) and the available memory: the
control group's limit, free RAM, free memory of the GPU. Reading it costs 0.3 ms, so it is not read for calls below
`LARGE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch

from autokern.core.errors import MemoryBudgetError
from autokern.core.units import sized
from autokern.system import buffers, host

__all__ = [
    "LARGE",
    "Room",
    "available",
    "claim",
    "fits",
    "least",
    "named",
    "orders_from",
    "refusal",
    "refuse",
    "room",
    "ways_out",
]

LARGE = 64 * 2**20
"""Calls that take fewer bytes than this are served without asking how much memory is there."""
ORDER = "AUTOKERN_MEMORY or using(memory=...)"

Device = torch.device | str


class Room(NamedTuple):
    """What a call may take.

    Parameters
    ----------
    bytes : int
        The most that it may take at its peak.
    source : str
        What sets this limit.
    kept : int
        Bytes of it that the pools of `workspace` keep, and give back where they are wanted.
    """

    bytes: int
    source: str
    kept: int = 0


def _no_order() -> int | None:
    return None


_ordered: Callable[[], int | None] = _no_order


def orders_from(read: Callable[[], int | None]) -> None:
    """Say what returns the bytes that the user allows a call in this thread, or None: `dispatch` knows."""
    global _ordered
    _ordered = read


def least(ordered: int | None, there: Room | None) -> Room | None:
    """Return the narrower of the user's order and what is there; None means that memory is no concern."""
    if ordered is not None and (there is None or ordered < there.bytes):
        return Room(ordered, ORDER)
    return there


def room(device: Device, ordered: int | None = None) -> Room:
    """Return what a call may take on a device now.

    Parameters
    ----------
    device : device or str
        Where its tensors lie.
    ordered : int, optional
        What the user allows.
    """
    kept = buffers.held() if torch.device(device).type == "cpu" else 0
    there = Room(host.available_memory(str(device)) + kept, "", kept)
    found = least(ordered, there)
    assert found is not None
    return found


def available(device: Device) -> int:
    """Return the bytes that a call in this thread may take on a device: the least of order and what is there.

    What the pools of `workspace` keep counts as free.
    """
    return room(device, _ordered()).bytes


def claim(need: int, found: Room) -> None:
    """Let the pools give back what they keep, if `need` bytes do not fit beside it."""
    if found.kept and found.bytes - found.kept < need <= found.bytes:
        buffers.free()


def fits(need: int, device: Device) -> bool:
    """Whether `need` bytes may be taken on a device by a call in this thread; below `LARGE` nobody looks.

    Where they fit only without what pools keep, the pools are emptied.
    """
    if need < LARGE:
        return True
    found = room(device, _ordered())
    if need > found.bytes:
        return False
    claim(need, found)
    return True


def refuse(asked: str, need: int, device: Device, ways: Sequence[str] = ()) -> NoReturn:
    """Raise the error of a call that does not fit, before it allocates anything.

    Parameters
    ----------
    asked : str
        What was asked for, with shapes and dtype.
    need : int
        Bytes that it takes at its peak, beyond what is there already.
    device : device or str
        Where.
    ways : sequence of str
        What would work instead.

    Raises
    ------
    MemoryBudgetError
        Always.
    """
    raise refusal(asked, need, named(room(device, _ordered()), device), ways)


def named(found: Room, device: Device) -> Room:
    """Return a room with the name of what limits it, which takes a second look at the machine."""
    return found if found.source else found._replace(source=host.memory_limited_by(str(device)))


def refusal(asked: str, need: int, found: Room, ways: Sequence[str] = ()) -> MemoryBudgetError:
    """Return the error of a call that does not fit: what was asked, what is there and whence, what would work."""
    there = f"{sized(found.bytes)} may be taken ({found.source or 'what is free'})"
    instead = "; ".join((*ways, "fewer points at once, or more memory"))
    return MemoryBudgetError(f"{asked} needs {sized(need)} at its peak, and {there}. What would work: {instead}")


def ways_out(dtype: str, of_kernel: bool, tiles: bool = True) -> list[str]:
    """Return what would work in place of a matrix that does not fit; not `tiles` where they do not either."""
    ways = []
    if of_kernel and tiles:
        ways.append("products with tiles of the kernel matrix that is never formed (kernel_matmul)")
    if dtype.removeprefix("torch.") == "float64":
        ways.append("float32, which takes half of it")
    if of_kernel:
        ways.append("inducing points (SGPR, SVGP)")
    return ways
