"""T14: releases of the libraries that do not exist yet, and patches of the user's; `test_releases.py` runs it.

Copies of the libraries with one thing changed, hundreds of things, a process each. The same program runs on every copy
as stock and with autokern, which must tell stock's numbers: it knows what it may compute in place of, or it stays out.
"""

import json
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import release_runs as runs
from release_changes import KINDS, Change, Known

WAYS: tuple[dict[str, str], ...] = ({}, {"AUTOKERN_FORCE": "random:1"}, {"AUTOKERN_FORCE": "random:2"})
_COLUMNS = ("silently wrong", "import crashes", "call crashes", "fine", "no effect", "stock fails")
_COUNT = _COLUMNS[:4]
_BELOW = (".settings", ".utils.memoize", "botorch.utils.context_managers", "numpy_utils", "transforms.utils")
"""Modules below what autokern takes the place of as a whole: settings, caches, and how vectors are copied."""


def prepared() -> Known:
    """Return what changes are made of."""

    def trace(auto: bool, orders: dict[str, str]) -> Any:
        found = runs.in_fork(lambda: (list(runs.traces(auto, orders)), runs.hooked() if auto else []))
        assert not isinstance(found, runs.Died), found
        return found

    (steps, _), ways = trace(False, {}), [trace(True, way) for way in WAYS]
    ran = {part: functions for part, functions, _ in steps}
    relied = {
        one
        for found, _ in ways
        for part, others, _ in found
        for one, how in ran[part].items()
        if one not in others or others[one].calls < how.calls
    }
    return Known(ran, ways[0][1], relied, {part: seconds for part, _, seconds in steps})


def unrecorded(known: Known) -> list[str]:
    """Return what stock executes and autokern does not that is not recorded, so that no change of it is noticed."""
    table = runs.in_fork(runs.recorded)
    above = {(one.module, one.outer) for one in known.relied if not one.module.endswith(_BELOW)}
    return [f"{module}:{name}" for module, name in sorted(above) if name not in table.get(module, {})]


def tried(known: Known, each: int, ways: tuple[dict[str, str], ...]) -> tuple[list[str], Counter[tuple[str, str]]]:
    """Make changes of every kind, as many as count; return what goes wrong, and what became of how many."""
    facts = runs.in_fork(lambda: runs.run_program(tuple(known.program)))
    pools: dict[str, Iterator[Change]] = {"nothing": iter([Change("nothing", tuple(known.program), effect=False)])}
    pools |= {kind: make(known) for kind, make in KINDS.items()}
    if only := os.environ.get("T14_ONLY"):  # to look at one by hand
        for kind in pools:
            pools[kind] = filter(lambda one, kind=kind: only in f"{kind}: {one.name}", pools[kind])  # type: ignore[misc]
    counted, running, wrong = Counter[tuple[str, str]](), Counter[str](), list[str]()

    with tempfile.TemporaryDirectory() as folder:

        def ready() -> Any:
            so_far = {kind: running[kind] + sum(counted[kind, word] for word in _COUNT) for kind in pools}
            for kind in sorted(pools, key=so_far.__getitem__):
                change = next(pools[kind], None) if so_far[kind] < each else None
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
                wrong.append(f"{kind}: {what}: {verdict.word}: {verdict.told}")

        runs.jobs(iter(ready, None), done, os.cpu_count() or 1)
    return wrong, counted


if __name__ == "__main__":
    logging.getLogger("autokern").disabled = True  # it has much to tell
    runs.preload()
    found, in_earnest = prepared(), sys.argv[1] == "full"
    wrong, counted = tried(found, *((400, WAYS) if in_earnest else (26, WAYS[:1])))
    told = {kind: {word: counted[kind, word] for word in _COLUMNS if counted[kind, word]} for kind in KINDS}
    print(json.dumps({"unrecorded": unrecorded(found), "wrong": wrong, "told": told}))
