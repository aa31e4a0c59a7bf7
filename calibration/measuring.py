"""How every workload of `end_to_end.py` is measured: how much one run does, sides taking turns, pairs compared.

Nothing here knows a model.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

SIDES = ("off", "on")
DTYPES = (torch.float32, torch.float64)

Toggles = Mapping[str, Callable[[], AbstractContextManager[Any]]]
Report = Callable[[str], None]


@dataclass(frozen=True)
class Scale:
    """How much one run does, workload by workload; `warmup` steps are not counted."""

    # diabetes: training steps
    steps: int = 40
    warmup: int = 4
    # co2: last week of the stream
    last: int = 2200
    # cg: sizes and solves
    sizes: tuple[int, ...] = (1000, 2000, 4000, 8000)
    solves: int = 6
    # training: sizes, the one at which the floor is measured, and rounds: as many as fit into `seconds` for each model
    training: tuple[int, ...] = (20, 50, 100, 300, 500, 1000, 2000, 4000)
    floor: int = 4000
    seconds: float = 2.5
    rounds: tuple[int, int] = (4, 200)
    # jump: sizes on both sides of stock's limit for Cholesky, and steps
    edge: tuple[int, ...] = (799, 800, 801, 802)
    edge_steps: int = 11
    # processes: sizes, processes at once, seconds of warming up, and windows of so many seconds
    contended: tuple[int, ...] = (20, 50, 100, 300)
    processes: tuple[int, ...] = (1, 2, 4)
    settle: float = 1.0
    window: float = 4.0
    windows: int = 2
    # posterior: sizes, and predictions of each side
    posterior: tuple[int, ...] = (100, 400, 1000, 2000)
    predictions: int = 11
    # points: numbers of test points, and processes for each
    points: tuple[int, ...] = (8000, 65536)
    repeats: int = 3
    # fantasies: sizes, updates of each side, and updates one after another
    fantasies: tuple[int, ...] = (100, 400, 800, 1600, 3200)
    updates: int = 21
    successive: int = 500
    # stream: last point, and updates of one model that are dropped
    streamed: int = 5000
    dropped_updates: int = 2000
    # acquisition: points in the model, restarts that are evaluated together, and evaluations
    acquired: int = 200
    restarts: tuple[int, ...] = (1, 5, 20)
    evaluations: int = 15
    # matrixfree: training points, points with a mean and with a variance, steps, what autokern may take; size compared
    free: tuple[int, int, int] = (60_000, 1000, 50)
    free_steps: int = 2
    free_memory: str = "2GiB"
    free_compared: int = 5000
    # refusal: points
    refused: int = 400_000
    # elevation: training points, steps, what autokern may take; points and steps of the exact model on a part
    terrain: int = 20_000
    terrain_steps: int = 10
    terrain_memory: str = "1GiB"
    terrain_part: tuple[int, int] = (2000, 60)
    # memory: models fitted and dropped, and how many of them before memory is looked at
    dropped: int = 1000
    settling: int = 100


FULL = Scale()
QUICK = Scale(
    steps=12,
    warmup=2,
    last=500,
    sizes=(1000, 2000),
    training=(20, 100, 500, 1000),
    floor=1000,
    seconds=0.4,
    rounds=(3, 50),
    edge_steps=3,
    contended=(100,),
    processes=(1, 2),
    window=1.0,
    windows=1,
    posterior=(100, 1000),
    predictions=5,
    points=(4000,),
    repeats=1,
    fantasies=(100, 400),
    updates=7,
    successive=50,
    streamed=400,
    dropped_updates=200,
    restarts=(1,),
    evaluations=5,
    free=(8000, 200, 10),
    free_memory="256MiB",
    free_compared=2500,
    terrain=6000,
    terrain_steps=3,
    terrain_memory="128MiB",
    terrain_part=(600, 40),
    dropped=100,
    settling=20,
)


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """Keep the garbage collector out of timed sections, and make collecting between them cheap."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def turns(sides: Iterable[str], rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield the order of the sides for each round: all possible orders one after another, then again."""
    return itertools.islice(itertools.cycle(itertools.permutations(sides)), rounds)


def nothing() -> None:
    """Undo nothing: a step may be repeated without harm."""


def interleave(
    toggles: Toggles,
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 0,
    after: Callable[[], object] = nothing,
    seconds: float = math.inf,
    least: int = 1,
    settle: Callable[[], object] | None = None,
    times: int = 1,
) -> dict[str, list[float]]:
    """Return the seconds of `rounds` steps of each side, taken in turn, in changing order.

    Fewer rounds, but not fewer than `least`, are taken once the counted steps have lasted `seconds` together.
    Entering a toggle is not timed: users enable once. To enter or leave one empties the interpreter's caches of what
    the patched classes have, and the kept buffers: the first step after it is not like others. With `settle`, one is
    taken before that is not timed, and undone by calling `settle`. Short steps are taken `times` times in a row, and
    their mean is what counts. Between rounds `after` is called and garbage is
    collected, because a model replaced by its fantasy model is a reference cycle that holds its matrices until then.
    """
    taken: dict[str, list[float]] = {side: [] for side in steps}
    with quiet_collector():
        for turn, order in enumerate(turns(steps, warmup + rounds)):
            if turn - warmup >= least and sum(map(sum, taken.values())) > seconds:
                break
            for side in order:
                with toggles[side]():
                    if settle is not None:
                        steps[side]()
                        settle()
                    start = time.perf_counter()
                    for _ in range(times):
                        steps[side]()
                    elapsed = (time.perf_counter() - start) / times
                if turn >= warmup:
                    taken[side].append(elapsed)
            after()
            gc.collect()
    return taken


def compare(seconds: Mapping[str, Sequence[float]], off: str = "off", on: str = "on") -> dict[str, Any]:
    """Return the median seconds of two sides, and median and quartiles of the paired ratios off / on."""
    ratios = np.divide(seconds[off], seconds[on])
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    medians = {"off": statistics.median(seconds[off]), "on": statistics.median(seconds[on])}
    return {**medians, "ratio": middle, "quartiles": [low, high], "pairs": len(ratios)}


def geomean(ratios: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def largest(values: Tensor) -> float:
    return values.abs().max().item()


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
