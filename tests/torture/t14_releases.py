"""T14: releases of the libraries that do not exist yet, and patches of the user's.

Copies of the libraries with one thing changed, hundreds of things, a process each. The same program runs on every copy
as stock and with autokern, which must tell stock's numbers: it knows what it may compute in place of, or it stays out.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from harness import Findings, Mutation, main


class Size(NamedTuple):
    """How much is done: changes of each kind, whether in more ways than by default, and the least of all."""

    each: int
    ways: bool
    least: int


SIZES = {"ci": Size(26, False, 190), "full": Size(400, True, 1000), "fault": Size(3, False, 0)}
WAYS: tuple[dict[str, str], ...] = ({}, {"AUTOKERN_FORCE": "random:1"}, {"AUTOKERN_FORCE": "random:2"})
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


def relied(found: Findings, size: Size) -> None:
    """All that stock executes and autokern does not is recorded, so that a change of it is noticed."""
    import release_runs as runs

    prepared, _ = _prepared(WAYS)
    table, missing = runs.in_fork(runs.recorded), set()
    for one in prepared.relied:
        if not one.module.endswith(_BELOW) and one.outer not in table.get(one.module, {}):
            missing.add(f"{one.module}:{one.outer}")
    for name in sorted(missing):
        found.broken.append(f"{name} is computed in place of, and not recorded")
    found.figures["relied on"] = f"{len(prepared.relied)} functions, {len(missing)} not recorded"


_BELOW = (".settings", ".utils.memoize", "botorch.utils.context_managers", "numpy_utils", "transforms.utils")
"""Modules below what autokern takes the place of as a whole: settings, caches, and how vectors are copied."""


def changes(found: Findings, size: Size) -> None:
    """Make changes of every kind, as many as count, and tell what became of them."""
    import release_runs as runs
    from release_changes import KINDS, Change

    began = time.monotonic()
    ways = WAYS if size.ways else WAYS[:1]
    known, facts = _prepared(ways)
    pools: dict[str, Iterator[Change]] = {"nothing": iter([Change("nothing", tuple(known.program), effect=False)])}
    pools |= {kind: make(known) for kind, make in KINDS.items()}
    if only := os.environ.get("T14_ONLY"):  # to look at one by hand
        for kind in pools:
            pools[kind] = filter(lambda one, kind=kind: only in f"{kind}: {one.name}", pools[kind])  # type: ignore[misc]
    counted, running = Counter[tuple[str, str]](), Counter[str]()

    with tempfile.TemporaryDirectory() as folder:

        def ready() -> Any:
            so_far = {kind: running[kind] + sum(counted[kind, word] for word in _COUNT) for kind in pools}
            for kind in sorted(pools, key=so_far.__getitem__):
                change = next(pools[kind], None) if so_far[kind] < size.each else None
                if change is not None:
                    running[kind] += 1
                    place = Path(tempfile.mkdtemp(dir=folder))
                    return (kind, change.name), partial(runs.verdict, change, facts, place, ways)
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
    found.figures |= {"changes with an effect": number, "seconds": round(time.monotonic() - began)}
    found.expect(number >= size.least, f"only {number} changes had an effect")


MUTATIONS = [
    Mutation(
        "readings rely on what is unknown", "core/releases/known.py", "        return not self.unknown",
        "        return True", "changes",
    ),
]  # fmt: skip

if __name__ == "__main__":
    for _library in ("OMP", "MKL", "OPENBLAS"):  # what is forked has one thread; before torch is imported
        os.environ[f"{_library}_NUM_THREADS"] = "1"
    main({"changes": changes, "relied": relied}, SIZES)
