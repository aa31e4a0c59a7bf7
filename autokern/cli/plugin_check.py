"""Plugins for `doctor`: whether each was loaded, which candidates it adds, and what keeps them from serving."""

from __future__ import annotations

from collections import Counter

from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.core.registry import Plugin, plugins, registered
from autokern.system import host

__all__ = ["look"]


def look() -> list[tuple[str, str, str, str]]:
    """Return name, status, finding and advice for each installed plugin."""
    return [(f"plugin {plugin.source}", *_judged(plugin)) for plugin in plugins()]


def _judged(plugin: Plugin) -> tuple[str, str, str]:
    if plugin.failure:
        advice = "update or remove its package; until then its candidates are left out, all else works"
        return "problem", f"could not be loaded: {plugin.failure}", advice
    own = [(op, candidate) for op in registered() for candidate in op.candidates if candidate.source == plugin.source]
    if not own:
        return "note", "adds no candidate", "ask its author"
    words = ", ".join(f"{op.name}.{candidate.name}" for op, candidate in own)
    if obstacle := _obstacle(own):
        return "note", f"{words}: {obstacle}", "it is optional: its candidates are left out until then"
    return "ok", f"{words}: available", ""


def _obstacle(own: list[tuple[Op, Candidate]]) -> str | None:
    """Return the commonest reason why candidates serve no problem of a quick calibration here; None where one does."""
    reasons = Counter(candidate.why_not(problem) for op, candidate in own for problem in _problems(op))
    return None if None in reasons or not reasons else reasons.most_common(1)[0][0]


def _problems(op: Op) -> list[Problem]:
    kinds = [(dtype, device) for device in host.current().devices for dtype in ("float64", "float32")]
    return [problem for dtype, device in kinds for problem in op.grid("quick", dtype, device)]
