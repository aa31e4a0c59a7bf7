"""T11: long lives. Memory is flat over calls of ever new shapes, and a call costs no more when much is remembered."""

from __future__ import annotations

import gc
import random
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
from harness import Findings, Mutation, main
from toy import believed, op_of

from autokern.runtime import dispatch

KEYS = 10_000
"""Keys that a memo holds at most."""
_GROWTH = 8 * 2**20
"""Bytes by which memory may grow and still be called flat."""


class Size(NamedTuple):
    """How much is done: calls with random shapes, after as many as fill the memo twice."""

    calls: int


SIZES = {"ci": Size(20_000), "full": Size(1_000_000)}


def _itself(a: torch.Tensor) -> torch.Tensor:
    return a


def _resident() -> int:
    gc.collect()
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(text.partition("VmRSS:")[2].split()[0])


def flat(found: Findings, size: Size) -> None:
    """Call with ever new shapes."""
    if not Path("/proc/self/status").exists():
        found.figures["flat"] = "skipped: reads /proc"
        return
    call, draw = believed(op_of("torture.shapes", _itself, lambda a: a)), random.Random(11)
    memory = torch.empty(400 * 400)

    def some(count: int) -> None:
        for _ in range(count):
            m, n = draw.randrange(1, 400), draw.randrange(1, 400)
            call(memory[: m * n].view(m, n))

    some(2 * KEYS)
    before = _resident()
    some(size.calls)
    grown = _resident() - before
    found.expect(grown < _GROWTH, f"memory grew by {grown / 2**20:.1f} MiB over {size.calls} calls")
    kept = sum(len(table) for table in dispatch.session().memo.values())
    found.expect(kept <= KEYS, f"{kept} keys are remembered")
    served = sum(dispatch.stats()["torture.shapes"].values())
    found.expect(served == 2 * KEYS + size.calls, f"{served} calls were counted")
    found.figures["flat"] = f"{grown / 2**20:+.2f} MiB over {size.calls} calls of random shapes, {kept} keys kept"


def overhead(found: Findings, size: Size) -> None:
    """Time calls when few and when many keys are remembered; what they cost is a figure, that it grows a fault."""
    call, stock = believed(op_of("torture.overhead", _itself, lambda a: a)), _itself
    shapes = [(1 + index // 100, 1 + index % 100) for index in range(KEYS - 1)]
    memory = torch.empty(101 * 101)
    many = [memory[: m * n].view(m, n) for m, n in shapes]

    def micros(tensors: list[torch.Tensor], run: object) -> float:
        taken = []
        for _ in range(7):
            start = time.perf_counter()
            for tensor in tensors:
                run(tensor)  # type: ignore[operator]
            taken.append((time.perf_counter() - start) / len(tensors))
        return 1e6 * statistics.median(taken)

    few = many[:10] * 200
    for tensor in few[:10]:
        call(tensor)
    alone = micros(few, call) - micros(few, stock)
    for tensor in many:
        call(tensor)
    some = random.Random(1).sample(many, 2000)
    crowded = micros(some, call) - micros(some, stock)
    found.expect(crowded < 4 * alone + 5, f"{crowded:.2f} us a call with {KEYS} keys, {alone:.2f} us with ten")
    found.figures["overhead"] = f"{alone:.2f} us a call with 10 keys, {crowded:.2f} us with {KEYS}"


MUTATIONS = [
    Mutation("the memo has no bound", "runtime/session.py", "_MOST_KEYS = 10_000", "_MOST_KEYS = 10**9", "flat"),
]

if __name__ == "__main__":
    main({"flat": flat, "overhead": overhead}, SIZES)
