"""Recording: the problems that a process asks, and how often, are written to a file when it ends.

The memo counts calls anyway, so a recorded call costs nothing. A process that ends by `os._exit`, `exec` or a signal
writes nothing; forked children write what they have asked themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import warnings
from collections import Counter
from multiprocessing import util
from pathlib import Path

from autokern.core.errors import AutokernWarning, ProfileError
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.core.settings import Settings
from autokern.runtime.memo import Memo, asked
from autokern.tuning import workload
from autokern.tuning.workload import Workload

__all__ = ["Recorder", "begun"]


def begun(settings: Settings, memo: Memo, lock: threading.RLock) -> Recorder | None:
    """Return the recorder of a session; None, with a warning, where its file cannot be written.

    Raises
    ------
    ProfileError
        If the file cannot be written, and `settings.strict` is set.
    """
    if settings.record is None or not settings.enabled:
        return None
    path = Path(os.path.abspath(settings.record))  # the program may change its working directory
    try:
        workload.add(path, Workload())  # now: at the end of a long program it is too late
    except ProfileError as error:
        if settings.strict:
            raise
        warnings.warn(f"nothing is recorded: {error}", AutokernWarning, stacklevel=2)
        return None
    return Recorder(path, memo, lock)


class Recorder:
    """Writes what a memo has served when the process ends; `finish` may be called before and again.

    Parameters
    ----------
    path : Path
        The file that it is added to.
    memo : dict
        The memo of a session.
    lock : RLock
        Held while the memo is emptied.

    Attributes
    ----------
    written : Workload or None
        What this process has added to the file; None before, or where that failed or nothing was asked.
    whole : Workload
        What the file held then.
    """

    def __init__(self, path: Path, memo: Memo, lock: threading.RLock) -> None:
        self.path, self._memo, self._lock = path, memo, lock
        self._kept: Counter[Problem] = Counter()
        self._told: Counter[Problem] = Counter()
        self.written: Workload | None = None
        self.whole = Workload()
        atexit.register(self.finish)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)
        self._finish_with_worker()
        util.register_after_fork(self, Recorder._finish_with_worker)

    def _finish_with_worker(self) -> None:
        """Let workers of `multiprocessing`, which end without `atexit`, write too."""
        util.Finalize(None, self.finish, exitpriority=0)

    def _forked(self) -> None:
        """Leave to the parent what it has asked."""
        self._told, self.written = self._asked(), None

    def keep(self, memo: Memo) -> None:
        """Keep what a memo has served, before its counts are lost."""
        self._kept.update(asked(memo))
        if len(self._kept) > 2 * workload.MOST:
            self._kept = Counter(workload.bounded(self._kept))

    def _asked(self) -> Counter[Problem]:
        return self._kept + asked(self._memo)

    def finish(self) -> None:
        """Add what was asked since the last time to the file; a failure is told on standard error and harms nothing."""
        held = self._lock.acquire(timeout=1.0)  # a thread that is not here since a fork may hold it for ever
        try:
            found = self._asked()
            calls = {problem: count for problem, count in (found - self._told).items() if _has_choice(problem)}
            self._told = found
            if calls:
                more = Workload(calls, recordings=int(self.written is None))
                self.whole = workload.add(self.path, more)
                self.written = more if self.written is None else self.written.merge(more)
        except Exception as error:
            with contextlib.suppress(Exception):
                print(f"autokern: nothing was recorded: {error}", file=sys.stderr)
        finally:
            if held:
                self._lock.release()


def _has_choice(problem: Problem) -> bool:
    """Whether a candidate other than stock serves a problem on any machine."""
    return any(c.name != "stock" and c.unsupported(problem) is None for c in get(problem.op).candidates)
