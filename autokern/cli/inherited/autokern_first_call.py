"""Tell when the program first calls GPyTorch, linear_operator or BoTorch: what comes before is its start-up.

A thread looks at the stack of the main thread until then, so that no function is replaced. The program without autokern
runs it too (`autokern compare`), which is why it imports nothing of autokern.
"""

import os
import sys
import threading
import time

TYPE_CHECKING = False  # not imported from `typing`: every process pays for an import here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_EVERY = 0.01
"""Seconds between two looks, each of which takes some ten microseconds."""
_LIBRARIES = ("gpytorch", "linear_operator", "botorch", "autokern")
_RUNNER = os.path.dirname(os.path.dirname(__file__)) + os.sep


def watch(tell: "Callable[[float], object]") -> None:
    """Call a function with `time.monotonic` of the first call of a library, from another thread."""
    main = threading.main_thread()

    def look() -> None:
        while main.is_alive():
            if _is_call(sys._current_frames().get(main.ident or 0)):
                tell(time.monotonic())
                return
            time.sleep(_EVERY)

    threading.Thread(target=look, name="autokern first call", daemon=True).start()


def _is_call(frame: "Any") -> bool:
    """Whether a module of the program, in the course of no import, calls a library."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    folders = tuple(os.path.dirname(file) + os.sep for file in files if file)
    called = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(("<frozen importlib", _RUNNER)):  # `autokern run` has not begun the program yet
            return False
        library = file.startswith(folders)
        if not library and frame.f_code.co_name == "<module>":
            return called
        called, frame = called or library, frame.f_back
    return False


_FILE, _, _PATH = os.environ.pop("_AUTOKERN_FIRST_CALL", "").partition(os.pathsep)  # and the program's PYTHONPATH
if _FILE:  # only in this process, in none that it starts
    os.environ["PYTHONPATH"] = _PATH
    if not _PATH:
        del os.environ["PYTHONPATH"]

    def _write(when: float) -> None:
        with open(_FILE, "w", encoding="utf-8") as file:
            file.write(str(when))

    watch(_write)
