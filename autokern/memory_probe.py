"""Memory probe: what keeping large buffers gains on this machine, measured in a process of its own.

May import `probes` and the floors below.
"""

from __future__ import annotations

import os
import time

import msgspec

from autokern import host
from autokern.probes import Probe

__all__ = ["Reuse", "measure"]

_LONGEST = 3.0
"""Seconds after which the measurement, of less than half a second, is given up."""
_NEEDED = 2**29
"""Bytes of free memory without which nothing is tried."""


class Reuse(msgspec.Struct, frozen=True):
    """Seconds to get, fill and give back 64 MiB, the median of seven rounds.

    Parameters
    ----------
    fresh : float
        Memory as it comes from the C library.
    huge_pages : float
        The same in huge pages, as `pages.empty` asks for.
    pool : float
        Memory that was used before, as `workspace.borrow` gives it.
    retain : float or None
        Memory from a C library that keeps what is freed, as ``AUTOKERN_ALLOCATOR=retain`` makes it.
    obstacle : str
        Why that could not be tried; empty where it could.
    """

    fresh: float
    huge_pages: float
    pool: float
    retain: float | None
    obstacle: str

    def figures(self) -> dict[str, float]:
        """Return milliseconds, and how many times as fast as fresh memory each other kind is."""
        found = {name: value for name in ("fresh", "huge_pages", "pool", "retain") if (value := getattr(self, name))}
        times = {f"{name}_ms": round(1e3 * seconds, 3) for name, seconds in found.items()}
        return times | {f"{name}_gain": round(self.fresh / s, 2) for name, s in found.items() if name != "fresh"}

    def __str__(self) -> str:
        retain = f"retain not possible, {self.obstacle}"
        if self.retain is not None:
            retain = f"{self._told(self.retain)} with AUTOKERN_ALLOCATOR=retain"
        return (
            f"64 MiB filled in {1e3 * self.fresh:.1f} ms fresh, {self._told(self.huge_pages)} in huge pages, "
            f"{self._told(self.pool)} from the pool, {retain}"
        )

    def _told(self, seconds: float) -> str:
        return f"{1e3 * seconds:.1f} ms ({self.fresh / seconds:.1f}×)"


def measure() -> Reuse | str:
    """Return what was measured, or why nothing was."""
    if os.name != "posix":
        return "not measured on this system"
    if host.available_memory("cpu") < _NEEDED:
        return "not measured: too little memory is free"
    with Probe("memory reuse") as probe:
        began = time.monotonic()
        while (answer := probe.poll(give_up=time.monotonic() - began > _LONGEST)) is None:
            time.sleep(0.02)
    try:
        return msgspec.json.decode(answer.text, type=Reuse) if answer.works else answer.text
    except msgspec.MsgspecError:
        return f"the measurement said {answer.text!r}"
