"""T1: many processes at once on a cold cache. One of them calibrates each op, nobody waits, and no key is lost.

The processes are forked from one that has imported everything and started nothing, which saves minutes of imports.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import Findings, Mutation, ended, forked, main

from autokern.core import locks
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.core.settings import Settings, from_environment
from autokern.runtime import dispatch
from autokern.runtime.first_use import FirstUse
from autokern.system import host
from autokern.tuning import store
from autokern.tuning.profile import Profile, Timing, Trial

OPS = ("cholesky", "matmul", "qr")
"""Ops with more than one candidate on a machine without accelerator, for a QR of few columns."""
MARK = 100_000
"""Sizes from here on belong to trials that are not measured but only kept."""


class Size(NamedTuple):
    """How much is done: processes."""

    processes: int


SIZES = {"ci": Size(40), "full": Size(200)}


def stampede(found: Findings, size: Size) -> None:
    """Let all of them call the same ops at the same time and publish a key of their own each."""
    with tempfile.TemporaryDirectory() as folder:
        home, results = Path(folder, "home"), Path(folder, "results")
        results.mkdir()
        os.environ.update(AUTOKERN_HOME=str(home), AUTOKERN_BUDGET="10", AUTOKERN_CALIBRATE="first-use")
        gate = os.pipe()
        start = time.monotonic()

        def take_part(number: int) -> int:
            os.close(gate[1])
            os.read(gate[0], 1)
            (results / f"{number}.json").write_text(json.dumps(_run(number)))
            return 0

        children = [forked(functools.partial(take_part, number)) for number in range(size.processes)]
        os.close(gate[0])
        os.close(gate[1])  # and they are off
        statuses = Counter(map(ended, children))
        seconds = time.monotonic() - start
        found.expect(set(statuses) == {0}, f"processes ended with {dict(statuses)}")
        told = [json.loads(path.read_text()) for path in results.glob("*.json")]
        calibrations = Counter(op for one in told for op in one["calibrated"])
        for op in OPS:
            found.expect(calibrations[op] == 1, f"{op} was calibrated {calibrations[op]} times")
        profile = store.load(from_environment(), host.current().fingerprint)
        kept = set() if profile is None else {(t.problem.op, t.problem.m) for t in profile.trials}
        marks = {("qr", MARK + number) for number in range(size.processes)}
        found.expect(marks <= kept, f"{len(marks - kept)} of {len(marks)} keys are lost")
        measured = {tuple(key) for one in told for key in one["measured"]}
        found.expect(measured <= kept, f"{len(measured - kept)} of {len(measured)} measured keys are lost")
        values = {round(one["value"], 9) for one in told}
        found.expect(len(values) == 1, f"results differ: {sorted(values)[:3]}")
        waited = max((one["seconds"] for one in told if not one["calibrated"]), default=0.0)
        found.figures["stampede"] = (
            f"{size.processes} processes in {seconds:.1f} s, calibrations {dict(calibrations)}, {len(kept)} keys kept, "
            f"longest call of those that did not calibrate {waited:.2f} s"
        )


def _run(number: int) -> dict[str, Any]:
    locks._process = 0  # nothing had been started before the fork
    calibrated: list[str] = []
    measure = FirstUse._calibrate

    def counted(self: FirstUse, op: Any, *rest: Any, **more: Any) -> None:
        calibrated.append(op.name)
        measure(self, op, *rest, **more)

    FirstUse._calibrate = counted  # type: ignore[method-assign]
    FirstUse._crowded = lambda self: False  # type: ignore[method-assign]  # the others would put it off
    session = dispatch.reset()
    _ = session.profile  # read now, so that it lacks what others measure meanwhile
    a = (torch.eye(30, dtype=torch.float64) + 0.01).expand(2, 30, 30).contiguous()
    value, longest = 0.0, 0.0
    for name in OPS:
        if number % 4 == 3:  # comes late, with the profile of before
            _await(name, session.settings)
        start = time.monotonic()
        args = {"cholesky": (a,), "matmul": (a, a), "qr": (a[..., :5].contiguous(),)}[name]
        out = dispatch.route(get(name))(*args)
        longest = max(longest, time.monotonic() - start)
        parts = out if isinstance(out, tuple) else (out,)
        value += float(sum(part.abs().sum() for part in parts))
    here = host.current()
    mark = Trial(Problem(op="qr", m=MARK + number, n=2), {"stock": Timing(1.0)})
    store.save(session.settings, Profile(host=here.fields, fingerprint=here.fingerprint, trials=[mark]))
    mine = {(t.problem.op, t.problem.m) for t in session.profile.trials} if calibrated else set()
    return {"calibrated": calibrated, "measured": sorted(mine), "value": value, "seconds": longest}


def _await(name: str, settings: Settings) -> None:
    """Wait until somebody has measured an op."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        kept = store.load(settings, host.current().fingerprint)
        if kept is not None and any(trial.problem.op == name and trial.problem.m < MARK for trial in kept.trials):
            return
        time.sleep(0.05)


MUTATIONS = [
    Mutation(
        "the right to calibrate is everybody's",
        "tuning/store.py",
        "        yield granted",
        "        yield True",
        "stampede",
    ),
    Mutation(
        "what others measured meanwhile is not looked at",
        "runtime/first_use.py",
        "if ours and not self._learnt(problem):",
        "if ours:",
        "stampede",
    ),
    Mutation(
        "a publish forgets what is kept",
        "tuning/store.py",
        "return _kept(folder, profile.fingerprint).merge(profile)",
        "return profile",
        "stampede",
    ),
]

if __name__ == "__main__":
    main({"stampede": stampede}, SIZES)
