"""What `autokern doctor` finds under torchrun: the ranks of the job, their devices, and the links between them."""

from __future__ import annotations

from collections import Counter

from autokern.core.errors import RanksError
from autokern.core.settings import Settings
from autokern.core.units import sized
from autokern.runtime.ranks import facts, timeout_of, unlike
from autokern.system import ranks

__all__ = ["is_first", "look"]

_SLOW = 1e8
"""Bytes in a second below which a link is slow."""
_met = True


def is_first() -> bool:
    """Whether this process prints: it is alone, or rank 0, or did not find the others."""
    return _met


def look(settings: Settings) -> list[tuple[str, str, str, str]]:
    """Return name, status, text and advice of each finding; none where this process is one alone."""
    global _met
    if not ranks.is_job() or settings.ranks == "off":
        return []
    try:
        here = ranks.join(min(timeout_of(settings), 60.0))
        everyone = here.objects(facts())
    except (RanksError, RuntimeError) as error:
        return [("ranks", "problem", str(error), "look at the ranks that are named, and at the network between them")]
    _met, link = here.rank == 0, here.link
    here.barrier()
    here.leave()
    devices = Counter(f"{one['cpu']}, threads: {one['common']['threads']}" for one in everyone)
    text = "; ".join(f"{count} on {device}" for device, count in devices.items())
    text += f"; least memory {sized(min(one['memory'] for one in everyone))}"
    differ = unlike(everyone)
    told = f"all-reduce takes {link.latency * 1e3:.2g} ms; {link.bandwidth / 1e9:.2g} GB/s for 4 MiB"
    slow = "ranks share only products that take much longer than their results need on the way"
    return [
        ("ranks", "problem" if differ else "ok", f"{text}; {differ}" if differ else text,
         "give all ranks the same libraries and OMP_NUM_THREADS" if differ else ""),
        ("links", "note" if link.bandwidth < _SLOW else "ok", told, slow if link.bandwidth < _SLOW else ""),
    ]  # fmt: skip
