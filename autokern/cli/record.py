"""`autokern record`: as `autokern run`, and what the program asks is added to a file when it ends."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import NamedTuple

from autokern.cli import run
from autokern.core.errors import SettingsError
from autokern.core.settings import WORKLOAD, from_environment
from autokern.runtime import dispatch
from autokern.tuning import workload
from autokern.tuning.workload import Workload

__all__ = ["Order", "execute", "parse", "started"]


class Order(NamedTuple):
    """A program to run, and the file that is added to."""

    program: run.Order
    file: Path


def parse(arguments: list[str]) -> Order | None:
    """Return the order that a command line gives, or None if it asks for help.

    Raises
    ------
    SettingsError
        If there is no program, an option that is not known, or no file after ``-o``.
    """
    rest, others, file = list(arguments), list[str](), os.environ.get("AUTOKERN_RECORD", "").strip() or WORKLOAD
    while rest and rest[0].startswith(("-o", "--output", "--stats", "--explain")):
        flag, equals, value = rest.pop(0).partition("=")
        if flag in ("-o", "--output"):
            if not equals and not rest:
                raise SettingsError(f"{flag} names no file")
            file = value if equals else rest.pop(0)
        elif flag.startswith("-o"):
            file = flag[2:] + equals + value
        else:
            others.append(flag + equals + value)
    program = run.parse([*others, *rest], "record")
    return None if program is None else Order(program, Path(os.path.abspath(file)))


def execute(order: Order) -> int:
    """Run a program to its end in this process, as `autokern run` does.

    Raises
    ------
    SettingsError
        If the file of the program is not there, or an environment variable cannot be obeyed; nothing has run then.
    ProfileError
        If the other file cannot be written.
    """
    run.check(order.program)
    if not from_environment().enabled:
        raise SettingsError("AUTOKERN=0 leaves nothing to record; unset it")
    workload.add(order.file, Workload())
    os.environ["AUTOKERN_RECORD"] = str(order.file)  # also for processes that the program spawns
    dispatch.reset()  # where `autokern run` started this process, a session that records nothing has begun
    atexit.register(_report, order.file, os.getpid())  # runs after what is registered later: what was asked is written
    return run.execute(order.program)


def started(arguments: list[str]) -> int | None:
    """Run the program that a command line names; return its exit status, or None if it asks for help."""
    order = parse(arguments)
    return None if order is None else execute(order)


def _report(file: Path, process: int) -> None:
    recorder = dispatch.session().recorder
    if recorder is None or os.getpid() != process:
        return
    recorder.finish()
    if recorder.written is None:
        print(f"autokern: nothing with a choice was asked; nothing was added to {file}", file=sys.stderr)
        return
    asked, whole = recorder.written.calls, recorder.whole
    ops = ", ".join(sorted({problem.op for problem in asked}))
    print(
        f"autokern: {len(asked)} problems in {sum(asked.values())} calls of {ops} were added to {file}, which now has "
        f"{len(whole.calls)} problems of {whole.recordings} recordings; `autokern calibrate --workload` measures them",
        file=sys.stderr,
    )
