"""Obstacles: why candidates cannot serve a problem, by what they are, what the user allows and the memory. Pure."""

from __future__ import annotations

from autokern.core.feasibility import Feasibility
from autokern.core.op import ACCURACIES
from autokern.core.settings import Settings
from autokern.core.units import sized
from autokern.system.memory_limit import Limit, least
from autokern.tuning.chooser import Chooser

__all__ = ["ROUGH", "obstacles"]

ROUGH = "its error was measured to be"
"""How the reason begins of a candidate whose error is larger than the user allows."""


def obstacles(table: Feasibility, chooser: Chooser, settings: Settings, there: Limit | None = None) -> dict[str, str]:
    """Return the reasons why candidates cannot serve a problem, by name; stock is refused for want of memory only.

    Where a recorded host is replayed, the candidates are available that were measured there.
    """
    op, problem = table.op, table.problem
    accuracies = ACCURACIES if settings.accuracy == "approximate" else ACCURACIES[:2]
    banned = {
        ban.candidate: ban.reason
        for ban in chooser.profile.banned
        if (ban.op, ban.dtype, ban.device) == (problem.op, problem.dtype, problem.device)
    }
    limit = least(settings.memory, there)
    found = {}
    for candidate in table.candidates:
        why = None
        if candidate is not op.stock:
            why = table.why_not(candidate)
            if why is None and settings.excludes(op.name, candidate.name):
                why = "excluded by the user"
            if why is None and candidate.accuracy not in accuracies:
                why = f"its accuracy is {candidate.accuracy}, which is not allowed"
            if why is None and candidate.accuracy == "approximate" and settings.forced(op.name) != candidate.name:
                why = _too_rough(chooser.relative_error(op, candidate.name, problem), settings.max_error)
            if why is None and candidate.name in banned:
                why = f"banned on this host: {banned[candidate.name]}"
            if why is None and table.recorded and not chooser.measured(candidate.name, problem):
                why = "it was not measured on the recorded host"
        if why is None and limit is not None and table.memory[candidate.name] > limit.bytes:
            why = f"needs {sized(table.memory[candidate.name])}, and {sized(limit.bytes)} may be taken"
        if why is not None:
            found[candidate.name] = why
    return found


def _too_rough(error: float | None, most: float) -> str | None:
    """Return why a candidate that approximates is not admitted with the error that was measured of it, or None."""
    if error is None:
        return "its error was not measured on this machine: autokern calibrate --accuracy approximate"
    return None if error <= most else f"{ROUGH} {error:.0e}, and at most {most:.0e} is allowed"
