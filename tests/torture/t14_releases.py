"""T14: releases of the libraries that do not exist yet, and patches of the user's.

Copies of the libraries with one thing changed, hundreds of things, a process each. The same program runs on every copy
as stock and with autokern, which must tell stock's numbers: it knows what it may compute in place of, or it stays out.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

for _library in ("OMP", "MKL", "OPENBLAS"):  # a process has one thread, as it is forked; before torch is imported
    os.environ[f"{_library}_NUM_THREADS"] = "1"

from harness import Findings, Mutation, main


class Size(NamedTuple):
    """How much is done: changes of each kind that count, whether in more ways than by default, and the least of all."""

    each: int
    ways: bool
    least: int


SIZES = {"ci": Size(22, False, 200), "full": Size(400, True, 1000), "fault": Size(2, False, 0)}
_WAYS: tuple[dict[str, str], ...] = ({}, {"AUTOKERN_FORCE": "random:1"}, {"AUTOKERN_FORCE": "random:2"})
_COLUMNS = ("silently wrong", "import crashes", "call crashes", "fine", "no effect", "stock fails")
_COUNT = _COLUMNS[:4]


def _prepared(orders: tuple[dict[str, str], ...]) -> Any:
    """Return what changes are made of, and what the program notes where nothing is changed."""
    os.environ["AUTOKERN_CALIBRATE"] = "never"
    import release_runs as runs
    from release_changes import Known

    runs.preload()

    def trace(auto: bool, orders: dict[str, str]) -> Any:
        found = runs.in_fork(lambda: (list(runs.traces(auto, orders)), runs.hooked() if auto else []))
        assert not isinstance(found, runs.Died), found
        return found

    (steps, _), ways = trace(False, {}), [trace(True, way) for way in orders]
    ran = {part: functions for part, functions, _ in steps}
    relied = {
        one
        for found, _ in ways
        for part, others, _ in found
        for one, how in ran[part].items()
        if one not in others or others[one].calls < how.calls
    }
    known = Known(ran, ways[0][1], relied, {part: seconds for part, _, seconds in steps})
    return known, runs.in_fork(lambda: runs.run_program(tuple(known.program)))


def changes(found: Findings, size: Size) -> None:
    """Make changes of every kind, as many as count, and tell what became of them."""
    _judged(found, size, {})


def _judged(found: Findings, size: Size, orders: dict[str, str]) -> Counter[tuple[str, str]]:
    import release_runs as runs
    from release_changes import KINDS, Change

    began = time.monotonic()
    ways = _WAYS if size.ways else _WAYS[:1]
    known, facts = _prepared(ways)
    ways = tuple({**way, **orders} for way in ways)
    pools: dict[str, Iterator[Change]] = {"nothing": iter([Change("nothing", tuple(known.program), effect=False)])}
    pools |= {kind: make(known) for kind, make in KINDS.items()}
    counted, running = Counter[tuple[str, str]](), Counter[str]()

    with tempfile.TemporaryDirectory() as folder:

        def ready() -> Any:
            so_far = {kind: running[kind] + sum(counted[kind, word] for word in _COUNT) for kind in pools}
            for kind in sorted(pools, key=so_far.__getitem__):
                change = next(pools[kind], None) if so_far[kind] < size.each else None
                if change is not None:
                    running[kind] += 1
                    place = Path(tempfile.mkdtemp(dir=folder))
                    return (kind, change.name), lambda: runs.verdict(change, facts, place, ways)
            return None

        def done(name: Any, answer: Any) -> None:
            kind, what = name
            running[kind] -= 1
            verdict = runs.Verdict("call crashes", str(answer)) if isinstance(answer, runs.Died) else answer
            counted[kind, verdict.word] += 1
            if "T14_LOG" in os.environ:
                with open(os.environ["T14_LOG"], "a", encoding="utf-8") as log:
                    print(kind, what, verdict.word, verdict.told, verdict.warned, sep="\t", file=log)
            if verdict.word in _COUNT[:3]:
                found.broken.append(f"{kind}: {what}: {verdict.word}: {verdict.told}")

        runs.jobs(ready, done, os.cpu_count() or 1)
    for kind in pools:
        found.figures[kind] = ", ".join(f"{word} {counted[kind, word]}" for word in _COLUMNS if counted[kind, word])
    number = sum(counted[kind, word] for kind in KINDS for word in _COUNT)
    found.figures["changes with an effect"] = f"{number} in {time.monotonic() - began:.0f} s"
    found.expect(number >= size.least, f"only {number} changes had an effect")
    return counted


MUTATIONS: list[Mutation] = []
Parts = dict[str, Callable[[Findings, Any], None]]

if __name__ == "__main__":
    sys.setrecursionlimit(5000)
    main({"changes": changes}, SIZES)
