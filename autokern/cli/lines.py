"""`autokern run --profile`: seconds by line of the user's files, from samples of the main thread's stack."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import threading
import time
from types import FrameType

from autokern.cli import tables
from autokern.cli.tables import Table
from autokern.core.releases import LIBRARIES, is_installed

_EVERY = 0.01  # seconds between two samples, each of which takes some twenty microseconds
_MOST, _WIDTH = 15, 36  # lines, and characters of one
_WHO = ("autokern", "library", "")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
Line = tuple[str, int]


class Sampler:
    """Samples from its creation until it tells."""

    def __init__(self) -> None:
        self._seconds: dict[Line, dict[str, float]] = {}
        self._end = threading.Event()
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._run, name="autokern profile", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._end.wait(_EVERY):
            frame = sys._current_frames().get(self._main or 0)
            line, who = _told(frame)
            del frame  # it would keep the program's objects alive
            now = time.perf_counter()
            self._seconds.setdefault(line, dict.fromkeys(_WHO, 0.0))[who] += now - last
            last = now

    def tell(self) -> None:
        """Print a table of the lines that took longest, in seconds."""
        self._end.set()
        self._thread.join()
        found = sorted(self._seconds.items(), key=lambda item: -sum(item[1].values()))
        rest = [of for _, of in found[_MOST:]]
        groups = [("all lines", [of for _, of in found]), *((_words(*line), [of]) for line, of in found[:_MOST])]
        rows = []
        for words, several in (*groups, *([(f"{len(rest)} more lines", rest)] if rest else [])):
            by = [sum(of[who] for of in several) for who in _WHO]
            rows.append((*(f"{seconds:.2f}" if seconds >= 0.005 else "" for seconds in (sum(by), *by)), words))
        title = "autokern: seconds of the main thread by line of the program, and who computed"
        tables.show(Table(title, (">seconds", ">autokern", ">library", ">else", "line"), rows), stderr=True)


def _told(frame: FrameType | None) -> tuple[Line, str]:
    """Return the innermost line of the user's files, and who computed below it: autokern or the library."""
    by = ""
    while frame is not None:
        code, owner = frame.f_code, _owner(frame.f_code.co_filename)
        if owner == "user":
            return (code.co_filename, frame.f_lineno), by
        if owner and not by:
            by = "library" if code.co_name == "stock" else owner  # the candidate `stock` of an op is the library's code
        frame = frame.f_back
    return ("", 0), by


@functools.cache
def _owner(file: str) -> str:
    """Return the owner of a file: ``user``, ``autokern``, ``library``, or empty for other packages."""
    if file in ("<string>", "<stdin>") and sys.argv[0] in ("-c", "-"):
        return "user"
    if file.startswith(_OURS + os.sep):
        return "autokern"
    for name in LIBRARIES:
        here = getattr(sys.modules.get(name), "__file__", None)
        if here and file.startswith(os.path.dirname(here) + os.sep):
            return "library"
    return "" if is_installed(file) else "user"


def _words(file: str, number: int) -> str:
    if not file:
        return "in no line of yours"
    words = f"{os.path.basename(file)}:{number} {linecache.getline(file, number).strip()}"
    return words if len(words) <= _WIDTH else f"{words[: _WIDTH - 1]}…"
