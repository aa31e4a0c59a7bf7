"""Findings of `doctor`, and its checks of plugins."""

from __future__ import annotations

from collections import Counter

import msgspec

from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.core.registry import Plugin, plugins, registered
from autokern.system import host


class Finding(msgspec.Struct, frozen=True):
    """Result of one check."""

    name: str
    status: str  # "ok", "note" (costs speed at most) or "problem"
    found: str  # the result, in words
    advice: str = ""  # the remedy; empty if everything works


def seen(name: str, found: str, advice: str = "", status: str = "note") -> Finding:
    """Return a finding of status "ok" without advice, else of the given status."""
    return Finding(name, status if advice else "ok", found, advice)


def of_plugins() -> list[Finding]:
    """Report on each installed plugin: whether it is loaded, its candidates, and why these cannot serve."""
    return [_of_plugin(f"plugin {plugin.source}", plugin) for plugin in plugins()]


def _of_plugin(name: str, plugin: Plugin) -> Finding:
    if plugin.failure:
        advice = "update or remove its package; until then its candidates are left out, all else works"
        return Finding(name, "problem", f"could not be loaded: {plugin.failure}", advice)
    own = [(op, candidate) for op in registered() for candidate in op.candidates if candidate.source == plugin.source]
    if not own:
        return Finding(name, "note", "adds no candidate", "ask its author")
    words = ", ".join(f"{op.name}.{candidate.name}" for op, candidate in own)
    if obstacle := _obstacle(own):
        return Finding(name, "note", f"{words}: {obstacle}", "it is optional: its candidates are left out until then")
    return Finding(name, "ok", f"{words}: available")


def _obstacle(own: list[tuple[Op, Candidate]]) -> str | None:
    """Return the commonest reason why candidates serve no problem of the quick grids, or None if one serves."""
    reasons = Counter(candidate.why_not(problem) for op, candidate in own for problem in _problems(op))
    return None if None in reasons or not reasons else reasons.most_common(1)[0][0]


def _problems(op: Op) -> list[Problem]:
    kinds = [(dtype, device) for device in host.current().devices for dtype in ("float64", "float32")]
    return [problem for dtype, device in kinds for problem in op.grid("quick", dtype, device)]
