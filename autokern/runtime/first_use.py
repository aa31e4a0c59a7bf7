"""First use: an op without measurements on this machine is measured once its calls have taken long enough.

Since a program may end soon, measuring takes at most a share of the program's time so far, and of the op's own: an op
that has taken long will probably take as long again. `AUTOKERN_CALIBRATE=first-use` measures at the first call.
Measuring is deferred while other processes use the cores: times would be disturbed and the measurement slow.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import TYPE_CHECKING

from autokern.core.errors import AutokernError, AutokernWarning
from autokern.core.locks import Lock, forked
from autokern.core.op import Feasibility, Op, inside
from autokern.core.problem import Problem
from autokern.core.recovery import recoverable
from autokern.core.units import duration
from autokern.runtime.memo import apart
from autokern.system import host, threads
from autokern.system.load import Load, Watch
from autokern.system.output import display
from autokern.tuning import store
from autokern.tuning.chooser import Chooser, load
from autokern.tuning.profile import Profile, dated, group_key

if TYPE_CHECKING:
    from autokern.runtime.session import Session

Group = tuple[str, str, str]  # op, dtype and kind of device
_PATIENCE = 24 * 3600.0  # seconds until a calibration is repeated that measured nothing within its budget
_SHARE = 0.35  # largest share of the session's budget for one op
_OF_PROGRAM = 0.05  # largest share of the time since the session's first new key for all measuring
_OF_OP = 0.2  # largest share of the time in the op itself
_LEAST = 0.3  # shortest useful measurement, in seconds
_LOOK = 0.1  # seconds for which the machine's load is watched at first
_FITTING = 0.9  # seconds of importing scikit-learn, once, to fit the measurements
_UNTIL_LAST = 0.6  # share of the allowance after which no further problem begins


class Ledger:
    """The time that the calls of an unmeasured op have taken."""

    __slots__ = ("enough", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.enough = _LEAST / _OF_OP  # seconds at which measuring is considered next

    def wait(self) -> None:
        """Consider measuring again when the calls have taken a fifth more."""
        self.enough = max(_LEAST / _OF_OP, 1.2 * self.seconds)

    def credit(self, elapsed: float, spent: float) -> float:
        """Return the seconds that measuring may take: the program ran for `elapsed`, and has `spent` some on it."""
        allowed = min(_OF_PROGRAM * elapsed - spent, _OF_OP * self.seconds)
        return allowed if allowed >= _LEAST else 0.0


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
        """Return the ledger of an op that waits to be measured; None for other ops, and for a single candidate."""
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
        if over or self._is_settled(problem):
            self._waiting.pop(asked, None)
            return False
        if not at_once:
            spent = self._spent + (0.0 if "sklearn.ensemble" in sys.modules else _FITTING)
            left = min(left, _UNTIL_LAST * ledger.credit(time.perf_counter() - self._began, spent))
        measuring, again = self._measuring.here(), self._measuring.entered()
        if left <= 0 or again or self._crowded() or not measuring.acquire(blocking=False):
            ledger.wait()
            return False
        started = time.perf_counter()
        self._tried.add(asked)
        self._waiting.pop(asked, None)
        try:
            with store.calibrating(self._settings, host.current().fingerprint, op.name) as ours:
                if ours and not self._learnt(problem):
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
        found = self._watch.reading()
        if found.others is None and self._load is None:
            time.sleep(_LOOK)
            found = self._watch.reading()
        if found.others is not None or self._load is None:
            self._load = found
            self._watch.begin()
        return self._load.crowded(threads.current())  # the last reading, if there is no new one

    def _is_settled(self, problem: Problem) -> bool:
        """Whether the op must not or need not be measured here: by settings, measured already, forked, or of ranks."""
        settings, chooser = self._settings, self._session.chooser
        ordered = settings.profile is not None or settings.deterministic or settings.calibrate == "never"
        if ordered or chooser.knows(problem) or _tried_lately(chooser.profile, problem):
            return True
        return forked() or host.multi_rank()

    def _learnt(self, problem: Problem) -> bool:
        """Whether another process has measured this op, or tried to, meanwhile; its profile is adopted then."""
        kept = load(self._settings)
        if not _tried_lately(kept, problem) and not Chooser(kept).knows(problem):
            return False
        self._session.adopt(self._session.chooser.profile.merge(kept))
        return True

    def _calibrate(self, op: Op, problem: Problem, budget: float, near: Problem | None) -> None:
        def publish(profile: Profile) -> None:
            store.save(self._settings, profile)
            self._session.adopt(profile)

        from autokern.tuning.calibration import calibrate

        what = f"autokern measures {op.name} ({problem.dtype}, {problem.device}) once, for {duration(budget)} at most"
        with apart(self._settings), display(what) as shown:
            calibrate(
                [op],
                "quick",
                budget,
                [problem.device],
                self._session.chooser.profile,
                dtypes=(problem.dtype,),
                near=near,
                progress=shown,
                publish=publish,
            )
        chooser = self._session.chooser
        if not chooser.knows(problem):  # later processes do not try again for `_PATIENCE`
            publish(chooser.profile.merge(Profile(fruitless={group_key(*problem.group): dated()})))


def _tried_lately(profile: Profile, problem: Problem) -> bool:
    """Whether a recent calibration of the op measured nothing useful."""
    return profile.fruitless.get(group_key(*problem.group), "") > dated(ago=_PATIENCE)
