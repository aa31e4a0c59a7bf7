"""A function or a notebook's cell, run without and with autokern in turn."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch

from autokern.core.errors import SettingsError
from autokern.core.output import duration
from autokern.hooks import install
from autokern.system import load

_SHORT = 10.0  # a cell of fewer seconds first runs once each way uncounted


class Compared(msgspec.Struct, frozen=True):
    """Seconds of runs without and with autokern; prints as a sentence.

    Parameters
    ----------
    off, on : list
        Seconds of each run.
    difference : float or None
        Largest difference of the results, relative to the largest number; None if they have no numbers.
    load : str
        The load by other programs meanwhile, if it disturbed the runs; else empty.
    """

    off: list[float]
    on: list[float]
    difference: float | None
    load: str = ""

    @property
    def ratio(self) -> float:
        """The library's median seconds over autokern's."""
        return statistics.median(self.off) / statistics.median(self.on)

    def __str__(self) -> str:
        off, on = (duration(statistics.median(each)) for each in (self.off, self.on))
        count = f", medians of {len(self.on)} runs in turn" if len(self.on) > 1 else ""
        ratio = f"{self.ratio:.2f} times as fast" if self.ratio > 0.995 else f"{1 / self.ratio:.2f} times as slow"
        told = f"{ratio}: {off} by the library, {on} by autokern{count}"
        if self.difference is not None:
            told += f"; results {f'agree within {self.difference:.0e}' if self.difference else 'are the same'}"
        return told + (f"; meanwhile {self.load}: times are of a busy machine" if self.load else "")

    __repr__ = __str__


def compare(run: Callable[[], Any], rounds: int = 3) -> Compared:
    """Return how long a function takes without and with autokern, in turn, and how far its results differ.

    Parameters
    ----------
    run : callable
        A function without arguments, which does the same each time: it sets its own seed and makes its own model. The
        library's turns run without autokern even where it is enabled.
    rounds : int
        Number of runs of each kind, after one of each that is not counted.

    Returns
    -------
    Compared
        Seconds; ``print`` shows a sentence.

    Raises
    ------
    SettingsError
        If ``AUTOKERN=0`` switches autokern off.

    Examples
    --------
    >>> found = autokern.compare(lambda: torch.linalg.cholesky(torch.eye(50)), rounds=1)
    >>> found.difference
    0.0
    """
    seconds: dict[bool, list[float]] = {False: [], True: []}
    results, watch = dict[bool, Any](), load.Watch()
    with _disabled():
        for number in range(rounds + 1):
            for kind in (False, True) if number % 2 else (True, False):
                results[kind], took = _timed(run, kind)
                seconds[kind] += [took] * bool(number)
    found = watch.reading()
    pairs = list(zip(*map(_numbers, results.values()), strict=False))
    difference = None
    if pairs and all(a.shape == b.shape for a, b in pairs):
        size = max(float(np.abs(b).max(initial=0.0)) for _, b in pairs)
        difference = max(float(np.abs(a - b).max(initial=0.0)) for a, b in pairs) / (size or 1.0)
    return Compared(seconds[False], seconds[True], difference, str(found) if found.crowded() else "")


@contextlib.contextmanager
def _disabled() -> Iterator[None]:
    """Keep autokern off, however often it was enabled, as by `autokern everywhere on`."""
    auto, depth = sys.modules.get("autokern.auto"), 0
    while install.is_enabled():
        install.disable()
        depth += 1
    try:
        yield
    finally:
        for _ in range(depth):
            install.enable()
        if depth and auto is not None:  # the last `disable` has forgotten it
            sys.modules["autokern.auto"] = vars(sys.modules["autokern"])["auto"] = auto


def _timed(run: Callable[[], Any], on: bool) -> tuple[Any, float]:
    with install.enabled() if on else contextlib.nullcontext():
        if on and not install.is_enabled():
            raise SettingsError("nothing to compare: AUTOKERN=0 switches autokern off")
        began = time.perf_counter()
        return run(), time.perf_counter() - began


def _numbers(one: Any) -> Iterator[np.ndarray]:
    if isinstance(one, torch.Tensor):
        yield one.detach().cpu().to(torch.float64).numpy()
    elif isinstance(one, (bool, int, float, np.ndarray, np.generic)):
        yield np.asarray(one, np.float64)
    elif isinstance(one, (list, tuple)):
        for part in one:
            yield from _numbers(part)


def load_ipython_extension(shell: Any) -> None:
    """Add the cell magic ``%%autokern``: run a notebook's cell without and with autokern, and print both times.

    A cell of less than ten seconds first runs once each way uncounted. The variables of the last run stay.
    """

    def autokern(line: str, cell: str) -> None:
        code = compile(cell, "<cell>", "exec")

        def seconds(on: bool, names: dict[str, Any]) -> float:
            return _timed(lambda: exec(code, names), on)[1]

        with _disabled():
            off = seconds(False, dict(shell.user_ns))
            if off < _SHORT:  # the first run also pays for imports and caches
                seconds(True, dict(shell.user_ns))
                off = seconds(False, dict(shell.user_ns))
            on = seconds(True, shell.user_ns)
        print(Compared([off], [on], None))

    shell.register_magic_function(autokern, "cell", "autokern")
