"""Candidate: one way to compute an Op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from autokern.core.problem import Features, Problem

__all__ = ["ACCURACIES", "Candidate", "Run", "nothing"]

ACCURACIES = ("same", "better", "approximate")

Run = Callable[..., Any]
_Asked = TypeVar("_Asked")


def nothing(_: object) -> str | None:
    """Return no reason against a candidate."""
    return None


@dataclass(frozen=True)
class Candidate:
    """One way to compute an Op.

    Parameters
    ----------
    name : str
        Unique within the Op.
    run : callable
        Takes the Op's arguments, returns what the Op returns.
    accuracy : {"same", "better", "approximate"}
        ``same`` agrees with stock within the Op's bound, ``better`` is exact where stock approximates,
        ``approximate`` is never chosen unless asked for.
    unsupported : callable
        Maps a Problem to the reason why this candidate cannot serve it on any machine, or None where it can. Pure: the
        replay of a recorded host asks it on another one.
    unavailable : callable
        Maps a kind of device (``"cpu"``, ``"cuda"``) to what this machine or process lacks to serve a problem there,
        or None where nothing is lacking.
    memory : callable
        Maps a Problem to the bytes it allocates at its peak, results included.
    features : callable
        Maps a Problem to the Features of this candidate, for extrapolation.
    compiles : bool
        Whether the first call in a process compiles, which takes long: measured only by a full calibration, and chosen
        only where the saving repays it.
    threads : int
        Threads that it keeps to, 0 for as many as torch has; of two that are as fast, the one with fewer is taken.
    parts : bool
        Whether it is made of calls that are ops of their own, which then are dispatched inside of it.
    as_stock : bool
        Whether it does what stock does with other products: where stock approximates so does it, and it is not banned
        for that.
    source : str
        The plugin that it comes from; empty for those that stand beside their Op.
    summary : str
        One line for people.
    """

    name: str
    run: Run
    accuracy: str = "same"
    unsupported: Callable[[Problem], str | None] = nothing
    unavailable: Callable[[str], str | None] = nothing
    memory: Callable[[Problem], int] = lambda problem: 0
    features: Callable[[Problem], Features] = lambda problem: Features()
    compiles: bool = False
    threads: int = 0
    parts: bool = False
    as_stock: bool = False
    source: str = ""
    summary: str = ""

    def why_not(self, problem: Problem) -> str | None:
        """Return why this candidate cannot serve a problem in this process, or None where it can."""
        return self.unsupported(problem) or self.unavailable(problem.device)

    def of_plugin(self, source: str) -> Candidate:
        """Return this candidate as a plugin's, which cannot serve where its own answers raise."""

        def guarded(ask: Callable[[_Asked], str | None], name: str) -> Callable[[_Asked], str | None]:
            def answer(asked: _Asked) -> str | None:
                try:
                    return ask(asked)
                except Exception as error:
                    return f"its {name} raised {type(error).__name__}: {error}"

            return answer

        unsupported, unavailable = guarded(self.unsupported, "unsupported"), guarded(self.unavailable, "unavailable")
        return replace(self, source=source, unsupported=unsupported, unavailable=unavailable)
