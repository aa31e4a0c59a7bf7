"""Checks: the review of a decided key at a call that was scheduled for it.

By then, compiling may repay itself, or the op may have taken long enough to be measured. Or lower precision may no
longer suffice: errors depend on the data, and grow while training shrinks a lengthscale. So an approximate candidate is
compared with an exact one at the first, second, fourth, ... call of a problem. If its error exceeds the limit, the
exact one replaces it for the rest of the process.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import msgspec

from autokern.core.errors import AutokernError, AutokernWarning
from autokern.core.op import Candidate, Feasibility, inside
from autokern.core.recovery import caught, recoverable
from autokern.core.settings import Settings
from autokern.core.solved import aside
from autokern.runtime.memo import NEVER, Entry
from autokern.system import host, memory_limit

if TYPE_CHECKING:
    from autokern.runtime.session import Session

_log = logging.getLogger("autokern")


def schedule(entry: Entry) -> None:
    """Schedule an entry's next check, for approximate candidates at the next power of two of its problem's calls."""
    review = entry.decision.review
    if entry.candidate.accuracy == "approximate":
        entry.check_at((1 << (entry.before + entry.count).bit_length()) - entry.before)
    else:
        entry.check_at(review if review > entry.count else NEVER)


def checked(here: Session, entry: Entry, args: tuple[Any, ...], settings: Settings) -> Entry:
    """Check a key whose check is due, and return its entry, a new one if it was decided again."""
    if entry.needs is not None:
        there = memory_limit.current(entry.decision.problem.device, settings.memory)
        fitting = frozenset(name for name, need in entry.needs.items() if need <= there.bytes)
        if entry.candidate.name not in fitting or (entry.fitting and fitting != entry.fitting):
            entry = _again(here, entry, settings)
        entry.fitting = fitting
    due = entry.take_check()
    if due == NEVER:  # not due, or another thread makes the check
        return entry
    if entry.ledger is not None and entry.ledger.seconds >= entry.ledger.enough:
        try:
            table = here.measured(Feasibility(entry.op, entry.decision.problem))
            return here.made(table, here.shared.decision(table, settings), settings, entry.count)
        except AutokernError:
            raise
        except Exception as error:  # the key stays as it is
            if here.settings.strict or not recoverable(error, entry.op):
                raise
            _log.debug("%s could not be decided again: %r", entry.decision.problem, error)
            return entry
    if entry.candidate.accuracy == "approximate":
        key = entry.decision.cell
        here.errors[key] = max(here.errors.get(key, 0.0), check(entry, args, settings))
        return entry
    if due == entry.decision.review:
        return _again(here, entry, settings)
    schedule(entry)
    return entry


def _again(here: Session, entry: Entry, settings: Settings) -> Entry:
    """Decide the exact problem of an entry again, without the candidates that failed."""
    table = Feasibility(entry.op, entry.decision.problem)
    able = msgspec.structs.replace(settings, exclude=settings.exclude | entry.failed)
    made = here.made(table, here.decide(table, able, entry.count), settings, entry.count)
    made.failed, made.solved = entry.failed, entry.solved
    return made


def check(entry: Entry, args: tuple[Any, ...], settings: Settings) -> float:
    """Replace an entry's candidate if it errs too much on these arguments; return the error, 0 if it is unknown."""
    suspect, exact = entry.candidate, _exact(entry)
    error = 0.0 if exact is None else _error(entry, exact, args)
    if entry.candidate is not suspect:  # replaced by another thread meanwhile
        return error
    if exact is None or error <= settings.max_error:
        schedule(entry)
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
    """Return a candidate that does not approximate and fits the memory beside the entry's own, or None."""
    problem = entry.decision.problem
    known, held = [entry.op[name] for name in entry.decision.order], entry.candidate.memory(problem)
    exact = [
        c for c in known if c.accuracy != "approximate" and memory_limit.fits(held + c.memory(problem), problem.device)
    ]
    return min(exact, key=lambda candidate: (candidate.accuracy != "better", candidate.compiles), default=None)


def _error(entry: Entry, exact: Candidate, args: tuple[Any, ...]) -> float:
    """Return the relative error on the arguments of a call, gradients included, 0 where the comparison fails."""
    from autokern.tuning.measuring import relative_error, trial

    op, problem = entry.op, entry.decision.problem
    before, inside.active = inside.active, True
    try:
        with host.random_states_kept(), aside():
            found, truth = (trial(op, candidate.run, problem, args)() for candidate in (entry.candidate, exact))
        return relative_error(op, found, truth)
    except caught(Exception, by=(op, entry.candidate.run, exact.run)):
        _log.debug("could not check the accuracy of %s", problem, exc_info=True)
        return 0.0
    finally:
        inside.active = before
