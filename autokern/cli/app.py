"""The entry point of the command line, and `autokern run`: run a program with autokern enabled, else as `python` would.

The modules of all other commands (`commands`) are imported only on request, since the program does not need them.
"""

from __future__ import annotations

import atexit
import builtins
import io
import os
import runpy
import sys
import time
import traceback
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from autokern.cli import inherited
from autokern.core.errors import AutokernError, SettingsError
from autokern.core.settings import from_environment
from autokern.hooks import install
from autokern.runtime import api, dispatch, ranks
from autokern.system import ranks as system
from autokern.system.files import write_whole

_FRAMES = (__file__, runpy.__file__, "<frozen runpy>")
_begun = False  # whether the program has started: later exceptions are the program's own


def main() -> int:
    """Run the command line of this process; return its exit status (`cli.commands` lists them)."""
    try:
        if sys.argv[1:2] == ["run"] and (status := started(sys.argv[2:])) is not None:
            return status
        from autokern.cli.commands import app  # imported here, since programs under `run` need neither typer nor rich

        app(prog_name="autokern")
    except (AutokernError, KeyboardInterrupt) as error:
        if _begun:  # raised by the program, which ends as under python
            raise
        if isinstance(error, KeyboardInterrupt):
            return 130
        print(f"autokern: {error}", file=sys.stderr)
        return 2
    return 0


class Order(NamedTuple):
    """A program to run (a file, ``-`` for standard input, ``-c``, a module), its arguments, and the reports."""

    target: str
    arguments: list[str]
    module: bool = False
    decisions: bool = False
    lines: bool = False
    report: Path | None = None


def parse(arguments: list[str], command: str = "run") -> Order | None:
    """Parse a command line, which ends with the program and its arguments; None if it asks for help."""
    flags, rest, report = dict.fromkeys(("--explain", "--profile"), False), list(arguments), None
    while command == "run" and rest and (rest[0] in flags or rest[0].partition("=")[0] == "--report"):
        flag, equals, value = rest.pop(0).partition("=")
        if flag != "--report":
            flags[flag] = True
        elif not (value := value if equals else rest.pop(0) if rest else ""):
            raise SettingsError("--report names no file; expected --report FILE SCRIPT [ARGS]")
        else:
            report = Path(os.path.abspath(value))  # the program may change its working directory
    if not rest:
        raise SettingsError(f"nothing to run was named; expected {command} SCRIPT [ARGS] or {command} -m MODULE [ARGS]")
    target, *others = rest
    if target in ("--help", "-h"):
        return None
    module = target.startswith("-m")
    if target in ("--", "-m") and others:
        target, *others = others
    elif module and target != "-m":
        target = target.removeprefix("-m")
    elif target.startswith("-") and not (command == "run" and target == "-") and not (target == "-c" and others):
        before = f"; before them only {', '.join(flags)} and --report FILE" if command == "run" else ""
        raise SettingsError(f"{command} has no option {target}: expected a script, or -m and a module{before}")
    return Order(target, others, module, flags["--explain"], flags["--profile"], report)


def check(order: Order) -> None:
    """Raise SettingsError if the script of an order does not exist."""
    if not order.module and order.target not in ("-", "-c") and not os.path.exists(order.target):
        raise SettingsError(f"can't open file {order.target!r}: there is none. Name a script, or -m and a module")


def execute(order: Order) -> int:
    """Run a program to its end in this process; its exceptions and exits pass through as under python."""
    global _begun
    check(order)
    file = None if system.is_job() and os.environ.get("RANK") != "0" else order.report  # only the first rank writes
    if file is not None:
        write_whole(file, None)
    if from_environment().workers:
        os.environ["PYTHONPATH"] = inherited.with_inherited()
    install.enable()
    settings = dispatch.session().settings
    if settings.enabled and settings.ranks not in ("off", "on") and system.is_job():  # "on": `enable` has joined
        ranks.begin(shy=not isinstance(settings.ranks, float))
        atexit.register(ranks.end)
    if order.decisions:
        atexit.register(lambda: print(api.explain(), file=sys.stderr))
    if order.lines:
        from autokern.cli import lines

        _at_end(lines.Sampler().tell)
    if file is not None:
        from autokern.cli.inherited import sitecustomize

        began, called = time.monotonic(), list[float]()
        sitecustomize.watch(called.append)
        _at_end(lambda: _report(file, order.target, began, called))
    code, text = order.target == "-c", order.target in ("-c", "-")
    sys.argv = [order.target, *order.arguments[code:]]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if order.module else "" if text else str(Path(order.target).resolve().parent)
    _begun = True
    try:
        if order.module:
            runpy.run_module(order.target, run_name="__main__", alter_sys=True)
        elif text:
            _run_text(order.arguments[0] if code else sys.stdin.read(), "<string>" if code else "<stdin>")
        elif os.path.isdir(order.target) or zipfile.is_zipfile(order.target):
            runpy.run_path(order.target, run_name="__main__")
        else:
            path = os.path.abspath(order.target)
            with io.open_code(path) as script:
                _run_text(script.read(), path, __file__=path)
    except BaseException as error:
        last, _ = [*traceback.walk_tb(error.__traceback__)][-1]
        if isinstance(error, ImportError) and last.f_code.co_filename in _FRAMES:  # the target is missing
            print(f"{sys.executable}: {error}", file=sys.stderr)
            return 1
        _hide_our_frames()
        raise
    return 0


def started(arguments: list[str]) -> int | None:
    """Run the program that a command line names; return its exit status, or None if it asks for help."""
    order = parse(arguments)
    return None if order is None else execute(order)


def _run_text(text: str | bytes, name: str, **variables: str) -> None:
    """Run source text in a new ``__main__`` module, which lives until the process ends."""
    main = types.ModuleType("__main__")
    main.__dict__.update(variables, __builtins__=builtins)
    code = compile(text, name, "exec")
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _at_end(tell: Callable[[], object]) -> None:
    """Call `tell` at the end of this process, but not of a forked child."""
    process = os.getpid()
    atexit.register(lambda: tell() if os.getpid() == process else None)


def _report(file: Path, program: str, began: float, called: list[float]) -> None:
    from autokern.cli import report

    try:
        report.write(file, report.of_program(program, time.monotonic() - began, *(when - began for when in called)))
        print(f"autokern: the report is in {file}", file=sys.stderr)
    except Exception as error:  # must not change the program's exit status
        print(f"autokern: no report was written: {error}", file=sys.stderr)


def _hide_our_frames() -> None:
    """Remove autokern's frames from the traceback that Python prints at the end."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        theirs = trace
        while theirs is not None and theirs.tb_frame.f_code.co_filename != __file__:
            theirs = theirs.tb_next
        while theirs is not None and theirs.tb_frame.f_code.co_filename in _FRAMES:
            theirs = theirs.tb_next
        shown(kind, error.with_traceback(theirs), theirs)

    sys.excepthook = hook
