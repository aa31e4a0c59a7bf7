"""load.py: readings of counters that a test writes, and of this machine."""

import os
import sys

import pytest
import torch

from autokern.system import load
from autokern.system.load import Load, Snapshot, Waited, Watch, busy_seconds

STAT = """cpu  900 0 300 5000 60 0 40 0 0 0
cpu0 400 100 100 2500 30 10 20 70 9 9
cpu1 500 0 200 2500 30 0 20 0 0 0
intr 1 2 3
"""


@pytest.mark.parametrize(
    ("begin", "end", "found"),
    [
        (Snapshot(10.0, 2, 100.0, 5.0), Snapshot(12.0, 2, 103.0, 6.0), Load(2, others=1.0)),
        (Snapshot(0.0, 2, 0.0, 0.0), Snapshot(1.0, 2, 0.5, 0.9), Load(2, others=0.0)),
        (Snapshot(0.0, 2, 0.0, 0.0), Snapshot(0.01, 2, 0.01, 0.0), Load(2)),  # a short interval tells nothing
        (Snapshot(0.0, 4, None, 0.0), Snapshot(1.0, 4, None, 0.0), Load(4)),  # what the system does not count
    ],
)
def test_others_use_what_this_process_does_not(monkeypatch, begin, end, found):
    monkeypatch.setattr(load, "snapshot", iter([begin, end]).__next__)
    assert Watch().reading() == found


@pytest.mark.parametrize(
    ("found", "threads", "crowded"),
    [
        (Load(2, others=0.1), 2, False),
        (Load(2, others=1.0), 2, True),
        (Load(2, others=1.0), 1, False),
        (Load(64, others=30.0), 8, False),
        (Load(2, others=0.0), 8, False),  # more threads than cores is no one else's doing
        (Load(4), 4, False),
    ],
)
def test_crowded(monkeypatch, found, threads, crowded):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert found.crowded() is crowded


def test_load_in_words():
    assert str(Load(2, others=1.93)) == "others use 1.9 of 2 cores"
    assert str(Load(2, others=2.04)) == "others use 2.0 of 2 cores"


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="ticks are those of POSIX")
def test_busy_seconds_of_the_cores_that_may_be_used():
    tick = os.sysconf("SC_CLK_TCK")
    assert busy_seconds(STAT, {0}) == (400 + 100 + 100 + 10 + 20 + 70) / tick  # what a hypervisor took included
    assert busy_seconds(STAT, {1}) == 720 / tick
    assert busy_seconds(STAT, None) == 1420 / tick


def test_busy_seconds_without_proc_are_psutils(monkeypatch):
    assert busy_seconds("", {0}) > 0
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert busy_seconds("", {0}) is None


def test_threads_that_wait(tmp_path):
    for number, waited in ((1, 2_000_000_000), (2, 500_000_000)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "schedstat").write_text(f"77 {waited} 3\n")
    (tmp_path / "3").mkdir()  # it has ended
    with Waited(tmp_path) as waited:
        assert waited() == 2.5
        (tmp_path / "2" / "schedstat").write_text("99 1500000000 4\n")
        assert waited() == 3.5
        open_files = list(waited._files)
    for file in open_files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


def test_waiting_that_is_not_counted(tmp_path):
    with Waited(tmp_path / "none") as waited:
        assert waited() == 0.0
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "schedstat").write_text("")
    with Waited(tmp_path) as waited:
        assert waited() == 0.0
