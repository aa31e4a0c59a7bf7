"""Orders: the candidate that the user asks for by force, by chance or by a threshold. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping

from autokern.core.errors import SettingsError
from autokern.core.feasibility import Feasibility
from autokern.core.settings import Settings

__all__ = ["ordered"]


def ordered(table: Feasibility, settings: Settings, excluded: Mapping[str, str], seen: int) -> tuple[str, str] | None:
    """Return the candidate that the user ordered and the reason to give, if there is such an order."""
    op, problem, forced = table.op, table.problem, settings.forced(table.op.name)
    if forced is not None:
        if forced not in op.names():
            raise SettingsError(f"op {op.name} has no candidate {forced!r} to force; it has {', '.join(op.names())}")
        if forced in excluded:
            return "stock", f"{forced} was forced but cannot serve: {excluded[forced]}"
        return forced, "forced by the user"
    if settings.random_seed is not None:
        names = [
            c.name
            for c in table.candidates
            if c.name not in excluded and c.accuracy != "approximate" and not c.compiles
        ] or ["stock"]
        return random.Random(f"{settings.random_seed}:{problem}:{seen}").choice(names), "drawn at random"
    size = settings.cpu_up_to(op.name, problem.device)
    if size is None:
        return None
    wanted = "cpu" if problem.n <= size else "native"
    side = f"{problem.n} columns, threshold {size}"
    if wanted in op.names() and wanted not in excluded:
        return wanted, f"ordered by the user ({side})"
    return "stock", f"ordered by the user ({side}), which is what stock does"
