"""Candidate: one way to compute an Op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from autokern.core.problem import Problem
from autokern.core.recovery import interrupted

ACCURACIES = ("same", "better", "approximate")

Run = Callable[..., Any]
Obeys = Callable[[str, float, Problem], "bool | None"]


def nothing(*_: object) -> None:
    """Return None, the default of `unsupported`, `unavailable`, `error` and `obeys`."""
    return None


def obedient(unsupported: Callable[[Problem], str | None], obeys: Obeys) -> Callable[[Problem], str | None]:
    """Extend `unsupported` by the library settings that the user changed and the candidate does not obey."""

    def why(problem: Problem) -> str | None:
        orders = problem.orders.items() if "order:" in problem.variant else ()
        ignored = [f"{name}({value:g})" for name, value in orders if not obeys(name, value, problem)]
        return f"it does not obey {', '.join(ignored)}, which you set" if ignored else unsupported(problem)

    return why


class Error(msgspec.Struct, frozen=True):
    """The error to expect of a candidate that may exceed its Op's bound, or checks the bound itself."""

    word: str  # for a table
    words: str  # a sentence
    gradients: float = 0.0  # of a gradient, relative to its largest entry, that the candidate's own check accepts


WITHIN = Error("in bound", "")
"""The error of results within their Op's bound."""

UNKNOWN = Error("unknown", "")


class Candidate(msgspec.Struct, frozen=True):
    """One way to compute an Op.

    Parameters
    ----------
    name : str
        Unique within the Op.
    run : callable
        Takes the Op's arguments, returns the Op's result.
    accuracy : {"same", "better", "approximate"}
        ``same`` agrees with stock within the Op's bound, ``better`` is exact where stock approximates,
        ``approximate`` runs only under ``accuracy="approximate"``.
    unsupported : callable
        Maps a Problem to the reason why this candidate cannot serve it on any machine, or None if it can. Must be pure,
        because recorded hosts are replayed on other machines.
    unavailable : callable
        Maps a kind of device (``"cpu"``, ``"cuda"``) to the reason why this machine or process cannot run the candidate
        there, or None if it can.
    memory : callable
        Maps a Problem to the bytes allocated at the peak, results included.
    compiles : bool
        Whether the first call in a process compiles. Only a full calibration measures such a candidate, and it runs
        only where the saving repays compiling.
    threads : int
        Its number of threads, 0 for torch's; of two equally fast candidates, the one with a single thread runs.
    parts : bool
        Whether it calls other ops, which are then dispatched.
    as_stock : bool
        Whether it is an iterative solver as stock is; calibration does not ban it for exceeding the Op's bound.
    error : callable
        Maps a Problem to the Error to expect, or None where results are within the Op's bound.
    source : str
        Name of its plugin; empty for candidates registered beside their Op.
    summary : str
        One line for people.
    """

    name: str
    run: Run
    accuracy: str = "same"
    unsupported: Callable[[Problem], str | None] = nothing
    unavailable: Callable[[str], str | None] = nothing
    memory: Callable[[Problem], int] = lambda problem: 0
    compiles: bool = False
    threads: int = 0
    parts: bool = False
    as_stock: bool = False
    error: Callable[[Problem], Error | None] = nothing
    source: str = ""
    summary: str = ""

    @property
    def loose(self) -> bool:
        """Whether it is as inaccurate as stock where stock iterates."""
        return self.as_stock and self.accuracy == "same"

    @property
    def tight(self) -> bool:
        """Whether it iterates to a smaller residual than stock: its time on samples does not predict other systems."""
        return self.as_stock and self.accuracy == "better"

    def why_not(self, problem: Problem) -> str | None:
        """Return why this candidate cannot serve a problem in this process, or None if it can."""
        return self.unsupported(problem) or self.unavailable(problem.device)

    def of_plugin(self, source: str) -> Candidate:
        """Return this candidate as a plugin's: an exception of `unsupported` or `unavailable` is a reason against it.

        An exception of `error` counts as None, within the bound.
        """

        def guarded(field: str) -> Callable[[Any], Any]:
            ask = getattr(self, field)

            def answer(about: Any) -> Any:
                try:
                    return ask(about)
                except Exception as error:
                    if interrupted(error):
                        raise
                    return None if field == "error" else f"its {field} raised {type(error).__name__}: {error}"

            return answer

        guards = {field: guarded(field) for field in ("unsupported", "unavailable", "error")}
        return msgspec.structs.replace(self, source=source, **guards)
