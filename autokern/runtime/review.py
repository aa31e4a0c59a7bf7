"""Review of decided keys: measurements at first use, and checks at calls that are due.

An op without measurements on this machine is measured once its calls have taken long enough: they will probably take as
long again. A key is checked when compiling may repay itself, when its op may be measured, and where lower precision may
no longer suffice: errors grow while training shrinks a lengthscale, so an approximate candidate is compared with an
exact one at the first, second, fourth, ... call of a problem.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import msgspec

from autokern.core.errors import AutokernError, AutokernWarning, caught, recoverable
from autokern.core.op import Candidate, Op
from autokern.core.output import display, duration
from autokern.core.problem import Feasibility, Problem
from autokern.core.settings import Settings
from autokern.core.state import Lock, forked, inside
from autokern.runtime.memo import NEVER, Entry, apart
from autokern.system import host, memory
from autokern.system.load import Load, Watch
from autokern.tuning import store
from autokern.tuning.chooser import Chooser, load
from autokern.tuning.profile import Profile, dated, group_key

if TYPE_CHECKING:
    from autokern.runtime.session import Session

_log = logging.getLogger("autokern")
Group = tuple[str, str, str]  # op, dtype and kind of device
_PATIENCE = 24 * 3600.0  # seconds until a calibration is repeated that measured nothing within its budget
_SHARE = 0.35  # largest share of the session's budget for one op
_OF_PROGRAM = 0.05  # largest share of the time since the session's first new key for all measuring
_OF_OP = 0.2  # largest share of the time in the op itself
_LEAST = 0.3  # shortest useful measurement, in seconds
_LOOK = 0.1  # seconds for which the machine's load is watched at first
_FITTING = 0.9  # seconds of importing scikit-learn, once, to fit the measurements
_UNTIL_LAST = 0.6  # share of the allowance after which no further problem begins


class Ledger(msgspec.Struct):
    """The time that the calls of an unmeasured op have taken."""

    seconds: float = 0.0
    enough: float = _LEAST / _OF_OP  # seconds at which measuring is considered next


class FirstUse:
    """The measurements at first use of a session, within its budget in seconds."""

    def __init__(self, session: Session) -> None:
        self._session, self._settings = session, session.settings
        self._measuring = Lock()
        self._spent, self._began = 0.0, time.perf_counter()
        self._tried: set[Group] = set()
        self._waiting: dict[Group, Ledger] = {}
        self._watch = Watch()
        self._load: Load | None = None

    def ledger(self, table: Feasibility) -> Ledger | None:
        """Return the ledger of an op that waits to be measured; None for other ops or with a single candidate."""
        found = self._waiting.get(table.problem.group)
        return None if found is None or inside.measuring or len(table.feasible()) < 2 else found

    def measure(self, table: Feasibility) -> bool:
        """Calibrate an unmeasured op if allowed and affordable, and return whether that was tried."""
        if inside.measuring or len(table.feasible()) < 2:
            return False
        op, problem, asked = table.op, table.problem, table.problem.group
        left = min(self._settings.budget - self._spent, _SHARE * self._settings.budget)
        at_once = self._settings.calibrate == "first-use"
        ledger = self._waiting.setdefault(asked, Ledger())
        over = left <= 0 or asked in self._tried
        if not (over or at_once) and ledger.seconds < ledger.enough:
            return False
        settings, chooser = self._settings, self._session.chooser
        ordered = settings.profile is not None or settings.deterministic or settings.calibrate == "never"
        settled = ordered or chooser.knows(problem) or _tried_lately(chooser.profile, problem)
        if over or settled or forked() or host.multi_rank():
            self._waiting.pop(asked, None)
            return False
        if not at_once:
            spent = self._spent + (0.0 if "sklearn.ensemble" in sys.modules else _FITTING)
            allowed = min(_OF_PROGRAM * (time.perf_counter() - self._began) - spent, _OF_OP * ledger.seconds)
            left = min(left, _UNTIL_LAST * allowed) if allowed >= _LEAST else 0.0
        measuring, again = self._measuring.here(), self._measuring.entered()
        if left <= 0 or again or self._crowded() or not measuring.acquire(blocking=False):
            ledger.enough = max(ledger.enough, 1.2 * ledger.seconds)  # when the calls have taken a fifth more
            return False
        started = time.perf_counter()
        self._tried.add(asked)
        self._waiting.pop(asked, None)
        try:
            with store.calibrating(self._settings, host.current().fingerprint, op.name) as ours:
                kept = load(self._settings) if ours else Profile()
                if ours and (_tried_lately(kept, problem) or Chooser(kept).knows(problem)):  # by another process
                    self._session.adopt(self._session.chooser.profile.merge(kept))
                elif ours:
                    self._calibrate(op, problem, left, near=None if at_once else problem)
        except (AutokernError, RuntimeError, OSError) as error:
            if self._settings.strict or not recoverable(error, op):
                raise
            warnings.warn(f"autokern could not measure {op.name}, so stock runs: {error}", AutokernWarning, 2)
        finally:
            self._spent += time.perf_counter() - started
            measuring.release()
        return True

    def _crowded(self) -> bool:
        """Whether other processes have used the cores since the last call."""
        if (found := self._watch.reading()).others is None and self._load is None:
            time.sleep(_LOOK)
            found = self._watch.reading()
        if found.others is not None or self._load is None:
            self._load, self._watch = found, Watch()
        return self._load.crowded()  # the last reading, if there is no new one

    def _calibrate(self, op: Op, problem: Problem, budget: float, near: Problem | None) -> None:
        from autokern.tuning.calibration import calibrate

        def publish(profile: Profile) -> None:
            store.save(self._settings, profile)
            self._session.adopt(profile)

        what = f"autokern measures {op.name} ({problem.dtype}, {problem.device}) once, for {duration(budget)} at most"
        with apart(self._settings), display(what) as shown:
            calibrate(
                [op], "quick", budget, [problem.device], self._session.chooser.profile, dtypes=(problem.dtype,),
                near=near, progress=shown, publish=publish,
            )  # fmt: skip
        chooser = self._session.chooser
        if not chooser.knows(problem):  # later processes do not try again for `_PATIENCE`
            publish(chooser.profile.merge(Profile(fruitless={group_key(*problem.group): dated()})))


def _tried_lately(profile: Profile, problem: Problem) -> bool:
    return profile.fruitless.get(group_key(*problem.group), "") > dated(ago=_PATIENCE)


def checked(here: Session, entry: Entry, args: tuple[Any, ...], settings: Settings) -> Entry:
    """Check a key whose check is due, and return its entry, a new one if it was decided again."""
    if entry.needs is not None:
        there = memory.current(entry.decision.problem.device, settings.memory)
        fitting = frozenset(name for name, need in entry.needs.items() if need <= there.bytes)
        if entry.candidate.name not in fitting or (entry.fitting and fitting != entry.fitting):
            entry = _again(here, entry, settings)
        entry.fitting = fitting
    due = entry.due_at
    if entry.count < due:  # not due, or another thread makes the check
        return entry
    entry.check_at(NEVER)
    if entry.ledger is not None and entry.ledger.seconds >= entry.ledger.enough:
        try:
            table = here.measured(Feasibility(entry.op, entry.decision.problem))
            return here.made(table, here.decide_alike(table, settings), settings, entry)
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
    entry.schedule()
    return entry


def _again(here: Session, entry: Entry, settings: Settings) -> Entry:
    """Decide the exact problem of an entry again, without the candidates that failed."""
    table = Feasibility(entry.op, entry.decision.problem)
    able = msgspec.structs.replace(settings, exclude=settings.exclude | entry.failed)
    return here.made(table, here.decide(table, able, entry.count), settings, entry)


def check(entry: Entry, args: tuple[Any, ...], settings: Settings) -> float:
    """Replace an entry's candidate if it errs too much on these arguments; return the error, 0 if it is unknown."""
    suspect, problem = entry.candidate, entry.decision.problem
    known, held = [entry.op[name] for name in entry.decision.order], suspect.memory(problem)
    able = [c for c in known if c.accuracy != "approximate" and memory.fits(held + c.memory(problem), problem.device)]
    exact = min(able, key=lambda candidate: (candidate.accuracy != "better", candidate.compiles), default=None)
    error = 0.0 if exact is None else _error(entry, exact, args)
    if entry.candidate is not suspect:  # another thread has replaced it
        return error
    if exact is None or error <= settings.max_error:
        entry.schedule()
        return error
    reason = f"{suspect.name} errs by {error:.0e} on these data, and at most {settings.max_error:.0e} is allowed"
    entry.demote(exact, reason, 5, ", using(max_error=...) allows more")
    return error


def _error(entry: Entry, exact: Candidate, args: tuple[Any, ...]) -> float:
    """Return the relative error of result and gradients on the arguments of a call, 0 where the comparison fails."""
    from autokern.tuning.measuring import relative_error, trial

    op, problem = entry.op, entry.decision.problem
    try:
        with inside.having(active=True, solves=None), host.random_states_kept():
            found, truth = (trial(op, candidate.run, problem, args)() for candidate in (entry.candidate, exact))
            return relative_error(op, found, truth)
    except caught(Exception, by=(op, entry.candidate.run, exact.run)):
        _log.debug("could not check the accuracy of %s", problem, exc_info=True)
        return 0.0
