"""Others: the models of hosts that are like this one: those in the home folder, and those that the package ships."""

from __future__ import annotations

from typing import Any

from autokern.core.settings import Settings
from autokern.system import host
from autokern.tuning import kin, layers, recorded
from autokern.tuning.cost_model import CostModel, Kin
from autokern.tuning.prefitted import Prefitted
from autokern.tuning.profile import Profile

__all__ = ["beside", "others", "priors"]

_shipped = recorded.hosts

_MOST = 4
"""Hosts that are asked, the most alike."""
_NEAR_BEST = 0.75
"""Part of the largest likeness that the others must have: each costs some milliseconds of a program's start."""


Known = list[tuple[Profile, float]]


def others(settings: Settings, device: str) -> list[Kin]:
    """Return the hosts that tell something about a kind of device here, the most alike first.

    There are none where the user has pinned one profile, or asked for decisions that never change.
    """
    here = host.current()
    known = [] if _is_alone(settings) else kin.priors(settings, here.fields, here.fingerprint, device)
    return beside(settings, here.fields, known, device)


def priors(settings: Settings) -> tuple[dict[str, Any], Known]:
    """Return the fields of this host, and the profiles in its home folder that tell something about its CPU."""
    here = host.current()
    return here.fields, [] if _is_alone(settings) else list(kin.priors(settings, here.fields, here.fingerprint, "cpu"))


def _is_alone(settings: Settings) -> bool:
    return settings.deterministic or layers.lone_file(settings) is not None


def beside(settings: Settings, fields: dict[str, Any], known: Known, device: str) -> list[Kin]:
    """Return `known` profiles and those that the package ships, as far as they are of hosts like one of some fields."""
    if _is_alone(settings):
        return []
    found = [Kin(CostModel(p), alike) for p, alike in known]
    for shipped in _shipped():
        alike = kin.likeness(fields, shipped.fields, device)
        if alike >= kin.LEAST and any(key.endswith(f"@{device}") for key in shipped.pools):
            found.append(Kin(Prefitted(shipped), alike))
    best = max((one.likeness for one in found), default=0.0)
    near = [one for one in found if one.likeness >= _NEAR_BEST * best]  # a machine that is like this one says it all
    return sorted(near, key=lambda one: -one.likeness)[:_MOST]
