"""Start-up: imports out of the garbage collector's sight, and lazy imports in a process that only prints help.

The collector would traverse the libraries' 280,000 objects during the import, later, and at the end of the process:
three quarters of a second in all. A process that only prints help or versions does not import the libraries.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from traceback import walk_stack
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType, ModuleType

_BORN = 1000  # with fewer frozen objects, `gc.freeze` was not called: Python 3.12 has 375, and a call freezes 4,000
_MANY = 200_000  # with more objects before the import, excepting each from freezing costs more time than it saves
_EXECUTED = ("autokern.__main__", "autokern.cli.commands")


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Pause the garbage collector in the block, then freeze what was created in it, if that includes torch."""
    if not gc.isenabled():
        yield
        return
    theirs = [] if "torch" in sys.modules or gc.get_debug() else gc.get_objects()
    gc.disable()
    try:
        yield
        if gc.get_freeze_count() < _BORN:  # else the program has frozen objects
            few = 0 < len(theirs) < _MANY
            if few and not _ended(theirs):
                gc.collect()  # takes a tenth of a second
            gc.freeze()
            if not few:  # moves all objects to the oldest generation, where the collector sees them
                gc.unfreeze()
                return
            untrack, track = ctypes.pythonapi.PyObject_GC_UnTrack, ctypes.pythonapi.PyObject_GC_Track
            untrack.argtypes = track.argtypes = [ctypes.py_object]
            untrack.restype = track.restype = None
            for one in filter(gc.is_tracked, theirs):  # the collector still frees these
                untrack(one)
                track(one)
            gc.collect(1)  # to the oldest generation; else the next young collections traverse them twice
            atexit.register(_unfreeze_for_finalizers)
    finally:
        gc.enable()


def _ended(theirs: list[object]) -> bool:
    """Clear frames of torch that refer to themselves (torch.fx leaves one); false if others may keep callers alive."""
    before = {id(one) for one in theirs if type(one) is FrameType}
    frames = [one for one in gc.get_objects() if type(one) is FrameType and id(one) not in before]
    of_torch = (frame for frame in frames if str(frame.f_globals.get("__name__")).startswith("torch."))
    own = [frame for frame in of_torch if any(one is frame for one in gc.get_referents(frame))]
    known = {id(caller) for frame in (*own, *sys._current_frames().values()) for caller, _ in walk_stack(frame)}
    alone = all(id(frame) in known for frame in frames)
    frames.clear()
    while own:
        last = own.pop()
        with contextlib.suppress(RuntimeError):  # the frame still runs
            last.clear()
        alone = alone and sys.getrefcount(last) == 2  # no other reference: the frame ends here
    return alone


def _unfreeze_for_finalizers() -> None:
    """Unfreeze if an object has a finalizer, as open files do: held by a frozen object, it would never be finalized."""
    streams = [stream for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__) if stream is not None]
    buffers = [getattr(stream, "buffer", None) for stream in streams]
    standard = {id(one) for one in (*streams, *buffers, *(getattr(buffer, "raw", None) for buffer in buffers))}
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if any("__del__" in vars(base) for base in kind.__mro__)}
    kinds -= {GeneratorType, CoroutineType, AsyncGeneratorType}
    if any(type(one) in kinds and id(one) not in standard for one in objects):
        gc.unfreeze()


def only_helps() -> bool:
    """Whether this process is the command line, and prints only help or versions."""
    if sys.flags.inspect or sys.flags.interactive or not is_command_line():
        return False
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "--version"):
        return True
    if words[0] == "profile" and words[1:2] not in ([], ["-h"], ["--help"]):
        words = words[1:]
    return words == ["profile"] or (not words[0].startswith("-") and words[1:2] in (["-h"], ["--help"]))


def is_command_line() -> bool:
    """Whether this process is autokern's command line; ``sys.orig_argv`` tells, since programs set ``sys.argv``."""
    given: list[str] = list(getattr(sys, "argv", ()))
    first = len(sys.orig_argv) - len(given)
    if not given or first < 1 or sys.orig_argv[first + 1 :] != given[1:]:
        return False
    if given[0] == "-m":  # Python has not found the module yet
        return sys.orig_argv[first - 1 : first + 1] == ["-m", "autokern"]
    named = os.path.basename(given[0]) in ("autokern", "autokern.exe", "autokern-script.py")
    if not named or sys.orig_argv[first] != given[0]:
        return False
    import sysconfig

    return os.path.dirname(os.path.realpath(given[0])) == os.path.realpath(sysconfig.get_path("scripts"))


class Later:
    """A finder that loads autokern's modules lazily, except the commands, which register when they are executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module, with a lazy loader."""
        if not name.startswith("autokern.") or name.startswith(_EXECUTED):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec
