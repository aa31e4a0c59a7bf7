"""Watch imports (`autokern_watch`), report the first call of a library, and run the next ``sitecustomize``.

`autokern run` puts the folder of this file in front of ``PYTHONPATH``. The syntax is that of Python 3.6, because a
program may start other versions. autokern is not imported, because `autokern compare` also times programs without it.
"""

import importlib.machinery
import os
import sys

TYPE_CHECKING = False  # not imported from `typing`: every process pays for an import here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_EVERY = 0.01  # seconds between two looks, each of which takes some ten microseconds
_LIBRARIES = ("gpytorch", "linear_operator", "botorch", "autokern")
_HERE = os.path.dirname(os.path.abspath(__file__))
_RUNNER = os.path.dirname(os.path.dirname(__file__)) + os.sep


def watch(tell: "Callable[[float], object]") -> None:
    """Call `tell` with the time of the first call of a library, which a thread sees in the stack of the main thread."""
    import threading
    import time

    main = threading.main_thread()

    def look() -> None:
        while main.is_alive():
            if _is_call(sys._current_frames().get(main.ident or 0)):
                tell(time.monotonic())
                return
            time.sleep(_EVERY)

    threading.Thread(target=look, name="autokern first call", daemon=True).start()


def _is_call(frame: "Any") -> bool:
    """Whether the program calls a library at present, otherwise than by an import."""
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


def _run_the_next() -> None:
    """Run the next ``sitecustomize`` on `sys.path`: that of the program, or of another autokern."""
    paths = [os.path.abspath(path or os.curdir) for path in sys.path]
    behind = sys.path[paths.index(_HERE) + 1 :] if _HERE in paths else sys.path
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        from importlib._bootstrap import module_from_spec  # importing importlib.util is slow

        module = sys.modules[__name__] = module_from_spec(spec)
        spec.loader.exec_module(module)


def _tell_first_call() -> None:
    """Write the time of the first call to the file that the environment names, in this process only."""
    name, _, path = os.environ.pop("_AUTOKERN_FIRST_CALL").partition(os.pathsep)  # and the program's PYTHONPATH
    os.environ["PYTHONPATH"] = path
    if not path:
        del os.environ["PYTHONPATH"]

    def write(when: float) -> None:
        with open(name, "w", encoding="utf-8") as file:
            file.write(str(when))

    watch(write)


if __name__ == "sitecustomize":
    import autokern_watch  # type: ignore[import-not-found]  # noqa: F401

    if "_AUTOKERN_FIRST_CALL" in os.environ:
        _tell_first_call()
    _run_the_next()
