"""Spot checks: whether lower precision is as accurate on the caller's own data as it was measured to be.

An error depends on the numbers: a lengthscale that shrinks while a model is trained lets it grow. A candidate that
approximates is therefore run beside one that does not at the first call of a problem, the second, the fourth and so
on, and gives way to it for the rest of the process where its error is larger than allowed.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

from autokern.core.errors import AutokernWarning
from autokern.core.op import Candidate, inside
from autokern.core.recovery import recoverable
from autokern.core.settings import Settings
from autokern.core.solved import aside
from autokern.runtime.memo import Entry
from autokern.system import memory_limit, randomness
from autokern.tuning import accuracy
from autokern.tuning.trial import trial

__all__ = ["check", "due"]

_log = logging.getLogger("autokern")


def due(seen: int) -> int:
    """Return the call at which a candidate that approximates is checked next, after so many: the next power of two."""
    return 1 << seen.bit_length()


def check(entry: Entry, args: tuple[Any, ...], settings: Settings) -> float:
    """Compare the candidate of an entry with one that does not approximate, on the arguments of a call.

    Return the relative error, 0 where the comparison fails.
    """
    suspect, exact = entry.candidate, _exact(entry)
    error = 0.0 if exact is None else _error(entry, exact, args)
    if entry.candidate is not suspect:  # another check was faster
        return error
    if exact is None or error <= settings.max_error:
        entry.check_at(due(entry.before + entry.count) - entry.before)
        return error
    op, problem = entry.op.name, entry.decision.problem
    reason = f"{suspect.name} errs by {error:.0e} on these data, and at most {settings.max_error:.0e} is allowed"
    entry.demote(exact, reason)
    warnings.warn(
        f"autokern: {op}.{reason} on {problem}; {exact.name} runs from now on. "
        f"AUTOKERN_EXCLUDE={op}={suspect.name} avoids it, using(max_error=...) allows more",
        AutokernWarning,
        stacklevel=4,
    )
    return error


def _exact(entry: Entry) -> Candidate | None:
    """Return a candidate that does not approximate and fits beside the other: one that is exact where stock is not.

    Of those the best, one without set-up time if possible.
    """
    problem = entry.decision.problem
    known, held = [entry.op[name] for name in entry.decision.order], entry.candidate.memory(problem)
    exact = [
        c for c in known if c.accuracy != "approximate" and memory_limit.fits(held + c.memory(problem), problem.device)
    ]
    return min(exact, key=lambda candidate: (candidate.accuracy != "better", candidate.compiles), default=None)


def _error(entry: Entry, exact: Candidate, args: tuple[Any, ...]) -> float:
    """Return the relative error on the arguments of a call, gradients included; 0 where the comparison fails."""
    op, problem = entry.op, entry.decision.problem
    before, inside.active = inside.active, True
    try:
        with randomness.untouched(), aside():
            found, truth = (trial(op, candidate.run, problem, args)() for candidate in (entry.candidate, exact))
        return accuracy.relative_error(op, found, truth)
    except Exception as failure:
        if not recoverable(failure, op, entry.candidate.run, exact.run):
            raise
        _log.debug("could not check the accuracy of %s", problem, exc_info=True)
        return 0.0
    finally:
        inside.active = before
