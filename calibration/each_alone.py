"""A pytest plugin for `peers.py`: every test begins alike, whichever process runs it and whatever ran there before.

The generators of Python, NumPy and torch start from the test's name. Where candidates are drawn at random, so do the
draws, by the seed in `AUTOKERN_FORCE` and the name. At the end the calls of all processes are told together.
"""

from __future__ import annotations

import os
import random
import zlib
from collections import Counter
from typing import Any

import numpy
import pytest
import torch

from autokern.runtime import dispatch

ORDER = os.environ.get("AUTOKERN_FORCE", "")
calls: Counter[tuple[str, str]] = Counter()


def count() -> None:
    """Add the calls of this session to those of the sessions before."""
    calls.update({(op, name): n for op, counts in dispatch.stats().items() for name, n in counts.items()})


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    seed = zlib.crc32(f"{ORDER} {item.nodeid}".encode())
    if ORDER.startswith("random:"):
        count()
        os.environ["AUTOKERN_FORCE"] = f"random:{seed}"
        dispatch.reset()
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def pytest_sessionfinish(session: pytest.Session) -> None:
    count()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["calls"] = [[*key, n] for key, n in calls.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    calls.update({(op, name): n for op, name, n in getattr(node, "workeroutput", {}).get("calls", [])})


def pytest_terminal_summary() -> None:
    for (op, name), n in sorted(calls.items()):
        print(f"{op} by {name}: {n:,} calls")
