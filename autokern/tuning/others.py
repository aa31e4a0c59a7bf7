"""Others: the models of hosts that are like this one, of those that the package ships."""

from __future__ import annotations

from typing import Any

from autokern.core.settings import Settings
from autokern.system import host
from autokern.tuning import kin, recorded
from autokern.tuning.cost_model import Kin
from autokern.tuning.prefitted import Prefitted

__all__ = ["beside", "others"]

_shipped = recorded.hosts

_MOST = 4
"""Hosts that are asked, the most alike."""
_NEAR_BEST = 0.75
"""Part of the largest likeness that the others must have: each costs some milliseconds of a program's start."""


def others(settings: Settings, device: str) -> list[Kin]:
    """Return the hosts that tell something about a kind of device here, the most alike first.

    There are none where the user has pinned a profile, or asked for decisions that never change.
    """
    return beside(settings, host.current().fields, device)


def beside(settings: Settings, fields: dict[str, Any], device: str) -> list[Kin]:
    """Return the hosts that tell something about a kind of device of a host with some fields."""
    if settings.deterministic or settings.profile is not None:
        return []
    found = []
    for shipped in _shipped():
        alike = kin.likeness(fields, shipped.fields, device)
        if alike >= kin.LEAST and any(key.endswith(f"@{device}") for key in shipped.pools):
            found.append(Kin(Prefitted(shipped), alike))
    best = max((one.likeness for one in found), default=0.0)
    near = [one for one in found if one.likeness >= _NEAR_BEST * best]  # a machine that is like this one says it all
    return sorted(near, key=lambda one: -one.likeness)[:_MOST]
