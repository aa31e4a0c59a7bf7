"""Programs in processes forked from one that has imported the libraries: their time begins after the imports."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import runpy
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from autokern.system import host

IMPORTED = (
    *("torch", "torch._dynamo", "gpytorch", "botorch"),
    *(f"botorch.{part}" for part in ("acquisition", "fit", "models", "optim")),
)
"""What a user's program has imported when its time begins."""
MOST = 100.0
"""Seconds that a program may take."""
SIDES = {"off": "", "on": "off", "graphs": "on"}
"""What is run, and what AUTOKERN_GRAPHS is there."""


def run(script: Path, side: str, device: str) -> dict[str, Any]:
    """Run a script in a process forked from one that has imported the libraries and touched no accelerator.

    Raises
    ------
    RuntimeError
        If it fails, or takes too long.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, __name__])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_here, args=(str(script), side, device, theirs))
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(MOST) else f"it took more than {MOST:g} s"
    except EOFError:
        process.join()
        found = f"its process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()
    if isinstance(found, str):
        raise RuntimeError(f"{script.stem} ({side}): {found}")
    return dict(found)


def _run_here(script: str, side: str, device: str, answer: Any) -> None:
    """Run a script in this process; send seconds and final values, or an error."""
    out = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(out):
            warnings.simplefilter("ignore")
            torch.set_default_device(device)
            began = time.perf_counter()
            if SIDES[side]:
                os.environ["AUTOKERN_GRAPHS"] = SIDES[side]
                __import__("autokern.auto")
            runpy.run_path(script, run_name="__main__")
            host.settle()
            seconds = time.perf_counter() - began
        lines = out.getvalue().strip().splitlines()
        words = lines[-1].split() if lines else []
        if not words[1:]:
            raise RuntimeError("its last line holds no figures")
        answer.send({"seconds": seconds, "final": [float(word) for word in words[1:]]})
    except BaseException as error:
        answer.send(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
