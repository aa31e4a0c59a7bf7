"""Checks: what happens at the call at which a decided key is due to be looked at again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from autokern.core.errors import AutokernError
from autokern.core.feasibility import Feasibility
from autokern.core.recovery import recoverable
from autokern.core.settings import Settings
from autokern.runtime import counting
from autokern.runtime.memo import NEVER, Entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from autokern.runtime.session import Session

__all__ = ["Checks"]

_log = logging.getLogger("autokern")


class Checks:
    """The checks of the keys of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def schedule(self, entry: Entry) -> None:
        """Set the next check of an entry."""
        review = entry.decision.review
        entry.check_at(min(counting.due(entry), review if review > entry.count else NEVER))

    def checked(self, entry: Entry, args: tuple[Any, ...], settings: Settings) -> Entry:
        """Check a key that has reached the call at which a check was due, or passed it, and return its entry.

        The decision may be due for review, since compiling may repay itself by now; or stock may have taken many
        products; or lower precision may no longer suffice for the data.
        """
        from autokern.runtime import spotcheck

        here, due = self._session, entry.take_check()
        if due == NEVER:  # another thread is at it
            return entry
        if entry.ledger is not None and entry.ledger.seconds >= entry.ledger.enough:
            return self._again(entry, self._reconsidered, settings)
        if entry.candidate.accuracy == "approximate":
            key = entry.decision.cell
            here.errors[key] = max(here.errors.get(key, 0.0), spotcheck.check(entry, args, settings))
            return entry
        if due == entry.decision.review:
            table = Feasibility(entry.op, entry.decision.problem)
            return here.made(table, here.decide(table, settings, entry.count), settings, entry.count)
        self.schedule(entry)
        return self._again(entry, self._counted, settings) if counting.is_due(entry, settings) else entry

    def _again(self, entry: Entry, decide: Callable[[Entry, Settings], Entry], settings: Settings) -> Entry:
        """Decide a key again; if that fails, it stays as it is."""
        here = self._session
        try:
            return decide(entry, settings)
        except AutokernError:
            raise
        except Exception as error:
            if here.settings.strict or not recoverable(error, entry.op):
                raise
            _log.debug("%s could not be decided again: %r", entry.decision.problem, error)
            return entry

    def _counted(self, entry: Entry, settings: Settings) -> Entry:
        """Decide a key with the products that were counted; an exact candidate may serve from now on."""
        here = self._session
        here.products.note(entry)
        table = Feasibility(entry.op, entry.decision.problem)
        decision = here.decide(table, settings, entry.count)
        if table.op[decision.candidate].accuracy != "better":
            return entry
        here.shared.drop(table.problem)
        made = here.made(table, decision, settings, entry.count)
        made.check_at(NEVER)
        return made

    def _reconsidered(self, entry: Entry, settings: Settings) -> Entry:
        """Measure the op of an entry whose calls have taken long enough, and decide."""
        here = self._session
        table = here.measured(Feasibility(entry.op, entry.decision.problem), settings.accuracy)
        return here.made(table, here.shared.decision(table, settings), settings, entry.count)
