"""The kernel table: the ways to a kernel matrix that are often recommended, timed against stock on this machine.

An unevaluated function or an unsynchronized device gives timings that are too good. So every result is compared with
stock's before it is timed, devices are synchronized, and on a CUDA device events and the profiler time the same calls
once more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from autokern.core.op import Candidate, Op, inside
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.system import host
from autokern.system.progress import Progress, silent
from autokern.tuning import timer
from autokern.tuning.accuracy import gap
from autokern.tuning.trial import Trialled, trial

FAMILIES = ("rbf", "matern52")
_D = 8
_DETOURS = ("cpu", "accelerator")
_TOLERANCE = {"float32": 2e-3, "float64": 1e-7}
"""Largest relative gap to stock's values and gradients: far above rounding, far below any result not computed."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate on one problem."""

    problem: Problem
    candidate: str
    # Median seconds of one call by wall clock, all work waited for; nan where it was not timed.
    seconds: float = math.nan
    ratio: float = math.nan  # stock's time over that of the candidate, median over pairs
    agreement: float = 0.0  # largest relative gap to stock's values and gradients
    agrees: bool = True  # whether rounding explains that gap
    refused: str = ""  # why the dispatcher would not use the candidate here; empty where it would
    failed: str = ""  # why there is no timing; empty where there is one
    setup_seconds: float = 0.0  # seconds of the first call, which compiles; 0 where nothing is compiled
    disturbed: float = 0.0  # share of the timing in which threads waited for a core that other programs used
    # Seconds of one call by CUDA events, and of its kernels by the torch profiler; 0 without CUDA.
    event_seconds: float = 0.0
    profiler_seconds: float = 0.0


def kernel_matrices(
    sizes: Sequence[int],
    deadline: float,
    *,
    families: Sequence[str] = FAMILIES,
    dtypes: Sequence[str] = ("float32", "float64"),
    devices: Sequence[str] = ("cpu",),
    seconds: float = 2.0,
    progress: Progress = silent,
) -> list[Cell]:
    """Time every candidate of `kernel_matrix`, forward and forward with backward (lengthscales and outputscale).

    Points have 8 dimensions, each with its own lengthscale. No measurement begins after the deadline; candidates that
    compile come last.
    """
    op = get("kernel_matrix")
    problems = [
        Problem(op=op.name, m=n, n=n, d=_D, dtype=dtype, device=device, grad=grad, variant=f"{family}/same/ard")
        for device in devices
        for family in families
        for dtype in dtypes
        for n in sizes
        for grad in ("", "theta")
    ]
    plain = [c for c in op.candidates if not c.compiles]
    compiling = [op.stock, *(c for c in op.candidates if c.compiles)]
    cells: dict[tuple[Problem, str], Cell] = {}
    # Compiled functions serve every size, so problems that share one are neighbours; those with gradients come first.
    later = sorted(problems, key=lambda p: (p.device, not p.grad, p.dtype, p.variant))
    plan = [(p, plain) for p in problems] + [(p, compiling) for p in later if len(compiling) > 1]
    began = time.perf_counter()
    inside.active = True
    try:
        for index, (problem, candidates) in enumerate(plan):
            now = time.perf_counter()
            share = (now - began) / max(deadline - began, 1e-9) if math.isfinite(deadline) else 0.0
            progress(max(index / len(plan), min(share, 1.0)), str(problem))
            for cell in _cells(op, problem, candidates, seconds if now < deadline else 0.0):
                cells.setdefault((problem, cell.candidate), cell)
    finally:
        inside.active = False
    progress(1.0, "done")
    return [cells[p, c.name] for p in problems for c in op.candidates if (p, c.name) in cells]


def _cells(op: Op, problem: Problem, candidates: Sequence[Candidate], seconds: float) -> list[Cell]:
    """Return a cell for each candidate; without seconds, cells that were not timed."""
    cells = {c.name: Cell(problem=problem, candidate=c.name, refused=c.why_not(problem) or "") for c in candidates}

    def update(name: str, **changes: Any) -> None:
        cells[name] = msgspec.structs.replace(cells[name], **changes)

    if seconds <= 0:
        return [msgspec.structs.replace(cell, failed="no time was left") for cell in cells.values()]
    args = op.sample(problem, torch.Generator().manual_seed(77))
    calls: dict[str, Callable[[], Trialled]] = {}
    warm: dict[str, float] = {}
    truth: Trialled | None = None
    for candidate in candidates:
        name = candidate.name
        if why := _impossible(candidate, problem):
            update(name, failed=why)
            continue
        call = trial(op, candidate.run, problem, args)
        try:
            first = timer.once(call, host.settle) if candidate.compiles else 0.0
            found = call()
            warm[name] = timer.once(call, host.settle)
        except Exception as error:
            update(name, failed=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:120])
            continue
        truth = truth or found
        difference = gap((found.out, *found.grads), (truth.out, *truth.grads))
        agrees = difference <= _TOLERANCE[problem.dtype]
        update(name, agreement=difference, agrees=agrees, setup_seconds=first)
        calls[name] = call
    if "stock" not in calls:
        return list(cells.values())
    timings = timer.compare(calls, synchronize=host.settle, seconds=seconds, rounds=(5, 15), warm=warm)
    for name, timing in timings.items():
        update(name, seconds=timing.seconds, ratio=1 / timing.ratio, disturbed=timing.disturbed)
        if problem.device == "cuda":
            repeats = max(1, min(50, math.ceil(0.01 / timing.seconds)))
            update(name, event_seconds=_by_events(calls[name], repeats))
            update(name, profiler_seconds=_by_profiler(calls[name], repeats))
    return list(cells.values())


def _impossible(candidate: Candidate, problem: Problem) -> str:
    """Return why a candidate cannot be tried at all, unlike one that the dispatcher only refuses."""
    if candidate.name in _DETOURS and candidate.why_not(problem):
        return "there is no other device to move to"
    need, free = candidate.memory(problem), host.available_memory(problem.device)
    return f"needs {need / 2**30:.1f} GiB of {free / 2**30:.1f}" if need > 0.5 * free else ""


def _by_events(call: Callable[[], Any], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    host.settle()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


def _by_profiler(call: Callable[[], Any], repeats: int) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        host.settle()
    microseconds = sum(float(event.self_device_time_total) for event in profile.key_averages())
    return microseconds / 1e6 / repeats
