"""`autokern compare`: run a program without and with autokern in turn, as whole processes, until the gain is known."""

from __future__ import annotations

import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from autokern.cli.app import Order
from autokern.cli.inherited import with_inherited
from autokern.core.errors import AutokernError
from autokern.core.output import duration, sized
from autokern.system import load

_LEAST, _CLOSE, _PART = 3, 0.03, 0.25
"""Fewest pairs; largest half-width of the gain's confidence interval, in log units, or as a part of the log gain."""
_SHORT, _UNSTEADY = 1.0, 0.1  # seconds below which a program is mostly start-up; a relative spread that is large
_LAUNCH = """
import os, sys, time
began = time.monotonic()
quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet)
_, status, usage = os.wait4(child, 0)
unit = 1 if sys.platform == "darwin" else 1024
print(began, time.monotonic() - began, usage.ru_utime + usage.ru_stime, unit * usage.ru_maxrss)
print(os.waitstatus_to_exitcode(status))
"""
"""Starts a program and prints its figures, from a small process: a child's peak memory begins with its parent's."""


class Run(msgspec.Struct, frozen=True):
    """One run of the program."""

    seconds: float  # wall-clock
    cpu: float  # seconds
    peak: int  # bytes of memory
    start: float | None = None  # seconds until the first call of a library, mostly imports; None without such a call

    @property
    def rest(self) -> float | None:
        """The seconds from the first call to the end."""
        return None if self.start is None else self.seconds - self.start


_FIGURES: list[tuple[str, str, Callable[[float], str]]] = [
    ("from start to end", "seconds", duration),
    ("until the first call of a model", "start", duration),
    ("after it", "rest", duration),
    ("CPU time", "cpu", duration),
    ("peak of memory", "peak", lambda count: sized(int(count))),
]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `compare`."""

    program: str
    off: list[Run]  # runs without autokern, paired with `on`
    on: list[Run]
    speedup: float  # geometric mean of off over on
    low: float  # 95 % confidence interval of the speedup
    high: float
    known: bool  # whether the interval is narrow enough
    warnings: list[str]  # reasons to doubt the result

    def __str__(self) -> str:
        off, on = (statistics.median(run.seconds for run in runs) for runs in (self.off, self.on))
        counted = f"{self.low:.2f} to {self.high:.2f} with 95 % confidence, {len(self.off)} runs each in turn"
        counted = counted if len(self.off) > 1 else "one run each"
        start, rest, apart = self._medians("start"), self._medians("rest"), ""
        if start is not None and rest is not None:
            start_up = f"{duration(start[0])} instead of {duration(start[1])}"
            apart = f" Start-up takes {start_up}, the rest {duration(rest[0])} instead of {duration(rest[1])}."
        if self.low <= 1.0 <= self.high:
            took = f"{duration(off)} without autokern and {duration(on)} with it"
            ratio = f"{self.speedup:.2f} times as fast; {counted}"
            head = "No difference is known" if len(self.off) > 1 else "One run each tells no difference from noise"
            return f"{head}: {self.program} takes {took} ({ratio}).{apart}"
        verb = "saves" if self.speedup > 1 else "costs"
        cpu = statistics.median(b.cpu / max(a.cpu, 1e-9) for a, b in zip(self.off, self.on, strict=True)) - 1.0
        more = statistics.median(a.peak - b.peak for a, b in zip(self.on, self.off, strict=True))
        memory = f"{sized(int(abs(more)))} {'more' if more > 0 else 'less'} memory"
        taken = f"{100 * abs(cpu):.0f} % {'more' if cpu > 0 else 'less'} CPU time"
        taken = "as much CPU time" if abs(cpu) < 0.005 else f"{cpu + 1:.1f} times the CPU time" if cpu >= 1 else taken
        return (
            f"autokern {verb} {duration(abs(off - on))} of {duration(off)}: {self.program} runs {self.speedup:.2f} "
            f"times as fast ({counted}), with {memory} and {taken}.{apart}"
        )

    def _medians(self, field: str) -> tuple[float, float] | None:
        """Return the medians of a figure with and without autokern, None if a run lacks it."""
        found = [[getattr(run, field) for run in runs] for runs in (self.on, self.off)]
        return None if None in itertools.chain(*found) else (statistics.median(found[0]), statistics.median(found[1]))

    def markdown(self) -> str:
        """Return the medians as a table of Markdown, and the sentence."""
        lines = ["|  | without autokern | with autokern |", "|---|---:|---:|"]
        for name, field, words in _FIGURES:
            if (found := self._medians(field)) is not None:
                lines.append(f"| {name} | {words(found[1])} | {words(found[0])} |")
        return "\n".join([*lines, "", str(self)])


FORMS: dict[str, Callable[[Comparison], str]] = {"text": str, "markdown": Comparison.markdown}


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios and its 95 % confidence interval, by Student's t."""
    from scipy.special import stdtrit  # imported here, since help imports no library

    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(middle), 0.0, math.inf
    half = float(stdtrit(len(logs) - 1, 0.975)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def compare(order: Order, pairs: int, budget: float, say: Callable[[str], object]) -> Comparison:
    """Run a program without and with autokern in turn; no further pair begins after `budget` seconds."""
    if not hasattr(os, "wait4"):  # Windows
        raise AutokernError("compare needs a system with wait4 and posix_spawn; run the program by `autokern run`")
    began, watch = time.perf_counter(), load.Watch()
    first, told = _run(order, on=True, explain=True)  # uncounted: it compiles files and measures at first use
    say(f"first run, with autokern, uncounted: {duration(first.seconds)}")
    runs: dict[bool, list[Run]] = {False: [], True: []}
    known = False
    while len(runs[True]) < pairs and not known:
        if runs[True] and time.perf_counter() - began + sum(of[-1].seconds for of in runs.values()) > budget:
            break
        for kind in (False, True) if len(runs[True]) % 2 == 0 else (True, False):
            runs[kind].append(_run(order, kind)[0])
        took = [duration(of[-1].seconds) for of in runs.values()]
        say(f"pair {len(runs[True])}: {took[0]} without autokern, {took[1]} with it")
        speedup, low, high = interval([a.seconds / b.seconds for a, b in zip(*runs.values(), strict=True)])
        half = 0.5 * math.log(high / low) if low else math.inf
        known = len(runs[True]) >= _LEAST and half <= max(_CLOSE, _PART * abs(math.log(speedup)))
    found = watch.reading()
    off, on = ([run.seconds for run in runs[kind]] for kind in (False, True))
    spread = max((statistics.stdev(of) / statistics.fmean(of) for of in (off, on) if len(of) > 1), default=0.0)
    doubts = {
        "autokern served no call in the program's own process; calls in its workers are not counted":
            "autokern has taken no decision" in told,
        "the difference is not known to 3 %: allow more with --pairs and --budget, or quiet the machine": not known,
        f"times vary by {100 * spread:.0f} % from run to run": spread > _UNSTEADY,
        "the program takes less than a second, most of which is start-up": statistics.median(off) < _SHORT,
        f"meanwhile {found}; times are of a busy machine": found.crowded(),
    }  # fmt: skip
    return Comparison(
        program=order.target, off=runs[False], on=runs[True], speedup=speedup, low=low, high=high, known=known,
        warnings=[doubt for doubt, holds in doubts.items() if holds],
    )  # fmt: skip


def _run(order: Order, on: bool, explain: bool = False) -> tuple[Run, str]:
    """Run the program to its end; return its figures and its standard error."""
    ours = ["-m", "autokern", "run", *["--explain"] * explain] if on else []
    command = [sys.executable, *ours, *["-m"] * order.module, order.target, *order.arguments]
    launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, *command]
    with tempfile.TemporaryFile("w+") as errors, tempfile.NamedTemporaryFile("w+") as call:
        environment = {**os.environ, "AUTOKERN": "1" if on else "0", "PYTHONPATH": with_inherited()}
        environment["_AUTOKERN_FIRST_CALL"] = call.name + os.pathsep + os.environ.get("PYTHONPATH", "")
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors}
        with subprocess.Popen(launch, **pipes, env=environment, start_new_session=True) as child:
            try:
                figures = child.communicate()[0].split()
            except BaseException:
                os.killpg(child.pid, signal.SIGKILL)  # the whole session: the program's own processes, too
                raise
        errors.seek(0)
        told, called = errors.read(), call.read()
    if status := int(figures[4]) if child.returncode == 0 else child.returncode:
        last = "\n".join(told.strip().splitlines()[-5:])
        raise AutokernError(f"{order.target} ended with status {status} with{'' if on else 'out'} autokern:\n{last}")
    began, seconds, cpu, peak = map(float, figures[:4])
    return Run(seconds, cpu, int(peak), float(called) - began if called else None), told
