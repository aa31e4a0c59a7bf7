"""Several processes that train at once, for `end_to_end.py`: the steps per second of all of them together.

Workers are real processes, `python processes.py off` and `python processes.py on`, with the environment of this one.
Each reads one job per line, warms up, says that it is ready, waits for the word to go, and counts its steps until the
window closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from measuring import SIDES, Report, Scale, Toggles, compare, turns
from rows import rates
from workloads import Trainer, smooth_trainer

KERNEL = "matern52"
LEAST_STEPS = 3


def trained(trainer: Trainer, seconds: float, least: int) -> tuple[int, float]:
    """Train until `seconds` have passed; return how many steps that were, and the seconds they took."""
    steps, elapsed, start = 0, 0.0, time.perf_counter()
    while elapsed < seconds or steps < least:
        trainer()
        steps += 1
        elapsed = time.perf_counter() - start
    return steps, elapsed


def serve(side: str, jobs: IO[str], answers: IO[str]) -> None:
    """Do jobs, one per line, until there are no more; stock never imports autokern."""

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    with contextlib.ExitStack() as stack:
        trials = 0
        if side == "on":
            import autokern

            stack.enter_context(autokern.enabled())
            trials = len(autokern.profile().trials)
        answer(threads=torch.get_num_threads(), trials=trials)
        while line := jobs.readline():
            job = json.loads(line)
            trainer = smooth_trainer(KERNEL, job["n"], torch.float64)
            trained(trainer, job["settle"], LEAST_STEPS)
            answer(ready=True)
            jobs.readline()
            steps, seconds = trained(trainer, job["seconds"], 1)
            answer(steps=steps, seconds=seconds)


class Pool:
    """Workers of one side, from now until `close`; `greet` and `rate` raise RuntimeError if one of them has ended."""

    def __init__(self, side: str, workers: int) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), side]
        environment = {**os.environ, "AUTOKERN_CALIBRATE": "never"}
        pipes: Mapping[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.workers = [subprocess.Popen(command, env=environment, **pipes) for _ in range(workers)]

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.communicate()

    def greet(self) -> dict[str, Any]:
        """Wait for all workers to be there; return threads and known trials of the first."""
        greetings = [self._answer(worker) for worker in self.workers]
        return greetings[0]

    def _answer(self, worker: subprocess.Popen[str]) -> dict[str, Any]:
        for line in worker.stdout or ():
            if line.startswith("{"):  # KeOps greets on standard output where there is no GPU
                return dict(json.loads(line))
        raise RuntimeError(f"a worker ended with status {worker.wait()} and without an answer")

    def _tell(self, worker: subprocess.Popen[str], line: str) -> None:
        assert worker.stdin is not None
        worker.stdin.write(line + "\n")
        worker.stdin.flush()

    def rate(self, workers: int, n: int, settle: float, seconds: float) -> float:
        """Return the steps per second of some of the workers together, all started when the last is warm."""
        chosen = self.workers[:workers]
        for worker in chosen:
            self._tell(worker, json.dumps({"n": n, "settle": settle, "seconds": seconds}))
        for worker in chosen:
            self._answer(worker)
        for worker in chosen:
            self._tell(worker, "go")
        answers = [self._answer(worker) for worker in chosen]
        return sum(answer["steps"] / answer["seconds"] for answer in answers)


def run_processes(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Train in one and in several processes, stock and autokern in turn; compare steps per second of all together.

    Workers do not calibrate: what was never measured is measured here first.
    """
    with toggles["on"]():
        for n in scale.contended:
            trained(smooth_trainer(KERNEL, n, torch.float64), 0.0, LEAST_STEPS)
    cases = []
    with contextlib.ExitStack() as stack:
        pools = {side: stack.enter_context(contextlib.closing(Pool(side, max(scale.processes)))) for side in SIDES}
        greeting = {side: pool.greet() for side, pool in pools.items()}["on"]
        if not greeting["trials"]:
            report("processes: the workers found no profile of this machine, so autokern has nothing to choose by")
        for processes in scale.processes:
            for n in scale.contended:
                seconds: dict[str, list[float]] = {side: [] for side in SIDES}
                for order in turns(SIDES, scale.windows):
                    for side in order:
                        seconds[side].append(1 / pools[side].rate(processes, n, scale.settle, scale.window))
                figure = {"processes": processes, "n": n, **compare(seconds)}
                figure["rate"] = {side: statistics.median(1 / taken for taken in seconds[side]) for side in SIDES}
                cases.append(figure)
                report(f"processes, {processes} at once, n={n}: {rates(figure)}")
    return {"kernel": KERNEL, "dtype": "float64", **greeting, "window": scale.window, "cases": cases}


if __name__ == "__main__":
    serve(sys.argv[1], sys.stdin, sys.stdout)
