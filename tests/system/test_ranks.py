"""Ranks of one job share products: values, bits, errors that name a rank. With real processes, so all are slow."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import HashStore

from autokern.kernels import partition
from autokern.system.thread_pool import Member
from autokern.system.witness import Witness

PROGRAM = Path(__file__).parents[1] / "support" / "rank_program.py"
LIMIT = 240


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def started(way: str, timeout: float) -> list[subprocess.Popen[str]]:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), way, str(timeout)],
            env=os.environ | common | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip


def told(process: subprocess.Popen[str]) -> dict[str, object]:
    out, err = process.communicate(timeout=LIMIT)
    assert out.strip(), err
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("by", [[0.5, 0.5], [0.2, 0.5, 0.3], [0.25] * 4])
def test_ranks_cover_each_tile_once(by, members):
    n, tile, seen = 1000, 60, set()
    for rank in range(len(by)):
        turns = partition.dealt(n, tile, members, by, rank)
        for number in range(members):
            own = [pairs[number::members] for pairs in turns]
            places = list(partition.tiles_of(own, tile, True, Alone()))
            assert seen.isdisjoint(places)
            seen.update(places)
    covered = sum((b - t) * (r - left) * (2 if t != left else 1) for t, b, left, r in seen)
    assert covered == n * n


class Alone(Member):
    """A member that waits for none."""

    def __init__(self):
        self.number, self.count = 0, 1

    def wait(self):
        pass

    def check(self):
        pass


@pytest.mark.slow
def test_two_ranks_compute_what_one_does():
    found = [told(process) for process in started("usual", 120)]
    for each in found:
        for name in ("same", "long", "wide"):
            assert each[name] < 1e-12
            assert each[f"{name} bits"]
        assert "rank 1 in vectors" in each["vectors"]
        assert "rank 1 in points" in each["points"]
        assert "rank 1 in kernels" in each["kernels"]
        assert "rank 1 asks for gradients" in each["program"]
        assert each["after"] < 1e-12
        assert each["dealt"] < 1e-12
        assert sum(each["shares"]) == pytest.approx(1)
        assert each["shares"][0] < each["shares"][1]
    assert found[1]["memory"] == "MemoryError: no more"
    assert "rank 1 failed MemoryError: no more" in found[0]["memory"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_a_lost_rank_is_named(way):
    first, second = started(way, 6)
    try:
        found = told(first)
    finally:
        second.kill()
        second.communicate()
    assert "rank 1 died or stands still" in found["error"]
    assert found["again"] == found["error"]


def test_a_note_tells_of_its_own_collective_only():
    store = HashStore()
    first, second = (Witness(store, rank, 2, 0.1) for rank in range(2))
    first.call = second.call = 5
    second.note("failed MemoryError: no more")
    assert first.told(None) == "rank 1 failed MemoryError: no more"
    first.call = second.call = 6
    assert first.told(None) == "the connection broke (None)"
    first.call = second.call = 7
    second.close("left")
    assert first.told(None) == "rank 1 ended before the others did"
    first.close("left")
