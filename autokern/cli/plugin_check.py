"""Plugins: tries the candidates of other packages."""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

import msgspec
import torch

from autokern.core import plugins
from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.core.registry import registered
from autokern.system import host
from autokern.system.subprocess_probe import Answer
from autokern.tuning.accuracy import relative_error, truth
from autokern.tuning.trial import trial

_MOST_ERROR = 0.1
"""Relative error above which lower precision is wrong, not only inexact."""


class Backend(NamedTuple):
    """A plugin and its candidates."""

    source: str
    candidates: list[str]  # its candidates, as ``op.candidate``
    failure: str  # why it could not be loaded
    obstacle: str  # why none of its candidates serves here; empty where one does

    @property
    def may_work(self) -> bool:
        """Whether there is anything to try."""
        return bool(self.candidates) and not (self.failure or self.obstacle)


def backends() -> list[Backend]:
    """Return all installed plugins."""
    found = []
    for plugin in plugins.loaded():
        own = _of(plugin.source)
        reasons = Counter(candidate.why_not(problem) for op, candidate in own for problem in _problems(op))
        obstacle = "" if None in reasons or not own else reasons.most_common(1)[0][0]
        names = [f"{op.name}.{candidate.name}" for op, candidate in own]
        found.append(Backend(plugin.source, names, plugin.failure, obstacle or ""))
    return found


def _of(source: str) -> list[tuple[Op, Candidate]]:
    return [(op, candidate) for op in registered() for candidate in op.candidates if candidate.source == source]


def _problems(op: Op) -> list[Problem]:
    """Return the problems of a quick calibration here, the smallest first."""
    kinds = [(dtype, device) for device in host.current().devices for dtype in ("float64", "float32")]
    found = [problem for dtype, device in kinds for problem in op.grid("quick", dtype, device)]
    return sorted(found, key=lambda p: p.batch * p.m * p.n)


def tried() -> dict[str, tuple[float, str]]:
    """Run the candidates of each plugin once; return by plugin the seconds taken and the fault, if any."""
    outcomes = {}
    for plugin in plugins.loaded():
        began, wrong = time.perf_counter(), []
        for op, candidate in _of(plugin.source):
            problem = next((p for p in _problems(op) if candidate.why_not(p) is None), None)
            if problem is not None and (failure := _failure(op, candidate, problem)):
                wrong.append(f"{op.name}.{candidate.name} {failure}")
        outcomes[plugin.source] = time.perf_counter() - began, "; ".join(wrong)
    return outcomes


def _failure(op: Op, candidate: Candidate, problem: Problem) -> str:
    args = op.sample(problem, torch.Generator().manual_seed(7))
    try:
        found = trial(op, candidate.run, problem, args)()
        if candidate.accuracy == "approximate":
            error = relative_error(op, found, truth(op, problem, args)) / _MOST_ERROR
        else:
            error = op.check(problem, found.out, args)
    except Exception as failure:
        return f"raised {type(failure).__name__} on {problem}: {' '.join(str(failure).split())}"
    return "" if error <= 1 else f"misses the contract by a factor of {error:.3g} on {problem}"


def judged(backend: Backend, answer: Answer | None) -> tuple[str, str, str]:
    """Return status, finding and advice for `doctor`.

    The answer is that of `tried` in a process of its own, as JSON; None where it was not tried.
    """
    words = ", ".join(backend.candidates)
    excluded = words.replace(".", "=").replace(", ", ",")
    without = f"AUTOKERN_EXCLUDE={excluded} leaves it out; all else works"
    if backend.failure:
        advice = "update or remove its package; until then its candidates are left out, all else works"
        return "problem", f"could not be loaded: {backend.failure}", advice
    if not backend.candidates:
        return "note", "adds no candidate", "ask its author"
    if backend.obstacle:
        return "note", f"{words}: {backend.obstacle}", "it is optional: its candidates are left out until then"
    if answer is None:
        return "ok", f"{words}: available, not tried", ""
    if answer.timed_out:
        return "note", f"{words}: {answer.text}", "try again when the machine is idle"
    if not answer.works:
        return "problem", f"{words}: {answer.text}", without
    try:
        seconds, wrong = msgspec.json.decode(answer.text, type=dict[str, tuple[float, str]])[backend.source]
    except (msgspec.MsgspecError, KeyError):
        return "problem", f"{words}: trying it ended with {answer.text!r}", without
    if wrong:
        return "problem", wrong, without
    return "ok", f"{words}: works ({seconds:.1f} s for the first calls)", ""
