"""buffers: huge pages where the system has them."""

from __future__ import annotations

import mmap
import os
import platform

import pytest
import torch
from support.programs import BARE, said

from autokern.system import memory


@pytest.fixture
def advised(monkeypatch):
    """What the system is asked for: start and length."""
    asked = []
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(memory, "_madvise", lambda: lambda start, length, advice: asked.append((start, length)))
    return asked


def test_a_large_tensor_is_an_ordinary_one_in_huge_pages(advised):
    like = torch.empty(0, dtype=torch.float64)
    found = memory.huge((1500, 1000), like)
    assert (found.shape, found.dtype, found.is_contiguous()) == ((1500, 1000), like.dtype, True)
    ((start, length),) = advised
    assert start % memory._HUGE == 0
    assert found.data_ptr() <= start <= start + length <= found.data_ptr() + found.nbytes
    found.zero_()


def test_small_tensors_and_other_devices_are_left_to_their_allocators(advised):
    assert memory.huge((100, 100), torch.empty(0)).shape == (100, 100)
    assert memory.huge((5000, 5000), torch.empty(0, device="meta")).is_meta
    assert advised == []


def test_a_system_without_huge_pages(monkeypatch, tmp_path):
    for setting, there in (("always madvise [never]", False), (None, False)):
        path = tmp_path / "enabled"
        if setting is None:
            path.unlink()
        else:
            path.write_text(setting)
        monkeypatch.setattr(memory, "_SETTING", str(path))
        memory._madvise.cache_clear()
        assert memory.has_huge() is there
        assert memory.huge((2000, 2000), torch.empty(0)).shape == (2000, 2000)
    memory._madvise.cache_clear()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc recycles")
def test_arrays_that_a_program_frees_are_recycled():
    code = """
import resource
import numpy as np
from autokern.system import memory
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def program():
    kept = [np.ones((200, 200)) for _ in range(8)]
    del kept
np.empty(2**19, np.uint8)  # as small libraries do at their import
if sys.argv[1] == "recycled": memory.recycle()
program()
before = faults()
for _ in range(20): program()
print(faults() - before)
"""
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    told = {how: int(said(BARE + code, how, env=surroundings)[-1]) for how in ("plain", "recycled")}
    assert told["recycled"] < 100 < 20 * 78 < told["plain"], told  # a fault for each page of at least one array
