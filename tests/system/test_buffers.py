"""buffers: memory that is used again, never twice at once, within bounds, and given back."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from itertools import pairwise

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autokern
from autokern.system import buffers, host
from autokern.system.buffers import SMALLEST, borrow

MIB = 2**20
DOUBLE = torch.empty(0, dtype=torch.float64)
SIDE = 600
"""Of a float64 matrix that is large enough to be kept."""


@pytest.fixture(autouse=True)
def _empty_pools():
    buffers.set_limit(None)
    buffers.free()
    yield
    buffers.set_limit(None)
    buffers.free()


def in_thread(work):
    """What `work` returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def child(script: str) -> str:
    """What a process of its own prints; it must end well and complain of nothing."""
    command = [sys.executable, "-W", "ignore::FutureWarning", "-c", script]  # torch's, of what gpytorch calls
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.strip()


# --- used again -------------------------------------------------------------------------------------------------------


def test_memory_is_used_again():
    lease = borrow((SIDE, SIDE), DOUBLE)
    assert (lease.tensor.shape, lease.tensor.dtype, lease.tensor.device.type) == ((SIDE, SIDE), torch.float64, "cpu")
    assert lease.tensor.is_contiguous()
    assert lease.tensor.data_ptr() % 64 == 0
    where = lease.tensor.data_ptr()
    assert buffers.held() == 0
    lease.release()
    assert lease.tensor is None
    assert buffers.held() >= SIDE * SIDE * 8
    again = borrow((SIDE, SIDE), DOUBLE)
    assert again.tensor.data_ptr() == where
    assert buffers.held() == 0
    assert borrow((SIDE, SIDE), DOUBLE).tensor.data_ptr() != where


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128, torch.int32, torch.bool])
def test_one_buffer_serves_every_dtype_and_shape(dtype):
    with borrow((2 * MIB,), torch.empty(0, dtype=torch.uint8)) as lease:
        where = lease.tensor.data_ptr()
    count = 2 * MIB // dtype.itemsize
    with borrow((2, count // 8, 4), torch.empty(0, dtype=dtype)) as lease:
        assert (lease.tensor.data_ptr(), lease.tensor.dtype) == (where, dtype)
        assert lease.tensor.shape == (2, count // 8, 4)
        assert lease.tensor.is_contiguous()
        lease.tensor.fill_(1)
        assert lease.tensor.sum().item() == count


def test_slowly_growing_sizes_mostly_reuse():
    addresses = []
    for n in range(1000, 1100):
        with borrow((n, n), DOUBLE) as lease:
            addresses.append(lease.tensor.data_ptr())
    changes = sum(a != b for a, b in pairwise(addresses))
    assert changes <= 3


def test_a_buffer_far_too_large_does_not_serve():
    with borrow((4 * SIDE, SIDE), DOUBLE) as lease:
        where = lease.tensor.data_ptr()
    assert borrow((SIDE, SIDE), DOUBLE).tensor.data_ptr() != where


def test_the_tightest_buffer_serves():
    leases = [borrow((n, 1024), DOUBLE) for n in (1000, 900, 1100)]
    addresses = [lease.tensor.data_ptr() for lease in leases]
    for lease in leases:
        lease.release()
    assert borrow((900, 1024), DOUBLE).tensor.data_ptr() == addresses[1]


def test_small_ones_are_not_kept():
    with borrow((10, 10), DOUBLE) as lease:
        assert lease.tensor.shape == (10, 10)
    with borrow((SMALLEST - 1,), torch.empty(0, dtype=torch.uint8)):
        pass
    with borrow((0, 10**9), DOUBLE) as lease:
        assert lease.tensor.numel() == 0
    with borrow((), DOUBLE) as lease:
        assert lease.tensor.shape == ()
    assert buffers.held() == 0


def test_other_devices_are_left_to_torch():
    with borrow((SIDE, SIDE), torch.empty(0, device="meta")) as lease:
        assert lease.tensor.device.type == "meta"
    assert buffers.held() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_a_gpu_is_left_to_torch():
    with borrow((SIDE, SIDE), torch.empty(0, device="cuda")) as lease:
        assert lease.tensor.device.type == "cuda"
    assert buffers.held() == 0


def test_a_default_device_changes_nothing():
    with torch.device("meta"), borrow((SIDE, SIDE), DOUBLE) as lease:
        assert lease.tensor.device.type == "cpu"


def test_fake_tensors_have_no_memory_to_keep():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2, dtype=torch.float64))
        with borrow((SIDE, SIDE), fake) as lease:
            assert type(lease.tensor) is type(fake)
    assert buffers.held() == 0


# --- nothing of autograd, nothing of the user's -----------------------------------------------------------------------


def test_autograd_state_does_not_stay():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    lease = borrow((SIDE, SIDE), parameter)
    assert type(lease.tensor) is torch.Tensor
    assert not lease.tensor.requires_grad
    where = lease.tensor.data_ptr()
    lease.tensor.zero_().requires_grad_().sum().backward()
    lease.release()
    again = borrow((SIDE, SIDE), parameter).tensor
    assert (again.data_ptr(), again.requires_grad, again.grad, again.grad_fn) == (where, False, None, None)


def test_inference_tensors_do_not_stay():
    with torch.inference_mode(), borrow((SIDE, SIDE), DOUBLE) as lease:
        where = lease.tensor.data_ptr()
    again = borrow((SIDE, SIDE), DOUBLE).tensor
    assert (again.data_ptr(), again.is_inference()) == (where, False)
    (again.zero_() * torch.ones((), dtype=torch.float64, requires_grad=True)).sum().backward()


def _saved(tensor):
    weight = torch.ones_like(tensor, requires_grad=True)
    return (weight * tensor.fill_(3)).sum()


@pytest.mark.parametrize(
    "keep",
    [lambda t: t, lambda t: t[0], lambda t: t.numpy(), lambda t: t.untyped_storage(), torch.from_dlpack, _saved],
    ids=["tensor", "view", "numpy", "storage", "dlpack", "saved for backward"],
)
def test_what_outlives_its_lease_is_not_overwritten(keep):
    lease = borrow((SIDE, SIDE), DOUBLE)
    where = lease.tensor.data_ptr()
    kept = keep(lease.tensor)
    lease.release()
    assert borrow((SIDE, SIDE), DOUBLE).tensor.data_ptr() != where
    assert kept is not None
    del kept
    workspace_again = [borrow((SIDE, SIDE), DOUBLE) for _ in range(2)]
    assert where in {lease.tensor.data_ptr() for lease in workspace_again}


def test_what_was_resized_or_shared_is_not_kept():
    with borrow((SIDE, SIDE), DOUBLE) as lease:
        lease.tensor.resize_(2 * SIDE, SIDE)
    assert buffers.held() == 0
    with borrow((SIDE, SIDE), DOUBLE) as lease:
        lease.tensor.share_memory_()
    assert buffers.held() == 0


def test_where_torch_does_not_tell_who_refers_to_memory_nothing_is_kept(monkeypatch):
    buffers._alone.cache_clear()
    with monkeypatch.context() as patch:
        patch.delattr(torch._C, "_storage_Use_Count")
        with borrow((SIDE, SIDE), DOUBLE) as lease:
            assert lease.tensor.shape == (SIDE, SIDE)
        assert buffers.held() == 0
    buffers._alone.cache_clear()


# --- giving back ------------------------------------------------------------------------------------------------------


def test_releasing_twice_does_nothing():
    lease = borrow((SIDE, SIDE), DOUBLE)
    lease.release()
    other = borrow((SIDE, SIDE), DOUBLE)
    lease.release()
    assert borrow((SIDE, SIDE), DOUBLE).tensor.data_ptr() != other.tensor.data_ptr()


def test_a_lease_out_of_scope_gives_back():
    lease = borrow((SIDE, SIDE), DOUBLE)
    where = lease.tensor.data_ptr()
    del lease
    assert borrow((SIDE, SIDE), DOUBLE).tensor.data_ptr() == where


def test_no_code_runs_when_a_lease_ends():
    """A Ctrl-C is lost there."""
    lease = borrow((SIDE, SIDE), DOUBLE)
    assert not hasattr(lease, "__del__")
    assert weakref.getweakrefs(lease) == []


def test_the_garbage_collector_gives_back():
    lease = borrow((SIDE, SIDE), DOUBLE)
    ring = [lease]
    ring.append(ring)
    del lease, ring
    gc.collect()
    assert buffers.held() > 0


def test_an_error_within_the_block_gives_back():
    with pytest.raises(ValueError, match="no good"), borrow((SIDE, SIDE), DOUBLE):
        raise ValueError("no good")
    assert buffers.held() > 0


# --- threads and forks ------------------------------------------------------------------------------------------------


def test_what_another_thread_gives_back_serves_again():
    lease = in_thread(lambda: borrow((SIDE, SIDE), DOUBLE))
    where = lease.tensor.data_ptr()
    assert borrow((SIDE, SIDE), DOUBLE).tensor.data_ptr() != where
    in_thread(lease.release)
    both = [borrow((SIDE, SIDE), DOUBLE) for _ in range(2)]
    assert where in {each.tensor.data_ptr() for each in both}


def test_many_threads_never_hold_the_same_memory():
    wrong: list[int] = []
    handed: list[buffers.Lease] = []

    def work(mark: int) -> None:
        for step in range(150):
            lease = borrow((150_000 + 500 * (step % 7),), DOUBLE)
            lease.tensor.fill_(mark)
            if step % 3 == 0:
                handed.append(lease)  # another thread gives it back
            if lease.tensor.amin() != mark or lease.tensor.amax() != mark:
                wrong.append(mark)
            if step % 3 == 1:
                lease.release()
            if step % 20 == 0:
                handed.clear()
            if step % 50 == 49:
                buffers.free()

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.slow
def test_a_forked_child_starts_with_nothing_and_leases_alive_at_the_end_of_the_interpreter_say_nothing():
    script = """
import os, threading, torch
from autokern.system import buffers
like = torch.empty(0, dtype=torch.float64)
buffers.borrow((600, 600), like).release()
out = buffers.borrow((700, 700), like)
before = buffers.held()
child = os.fork() if hasattr(os, "fork") else None
if child == 0:
    assert buffers.held() == 0
    out.tensor.fill_(1.0)
    out.release()  # borrowed by the parent: not kept
    assert buffers.held() == 0
    buffers.borrow((600, 600), like).release()
    assert buffers.held() > 0
    os._exit(0)
assert child is None or os.waitpid(child, 0)[1] == 0
assert buffers.held() == before > 0
ring = [out]
ring.append(ring)
threading.Thread(target=lambda: ring.append(buffers.borrow((900, 900), like))).start()
"""
    child(script)


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_is_let_go_first():
    leases = [borrow((SIDE, SIDE), DOUBLE) for _ in range(buffers._MOST + 2)]
    addresses = [lease.tensor.data_ptr() for lease in leases]
    size = leases[0].tensor.untyped_storage().nbytes()
    for lease in leases:
        lease.release()
    assert buffers.held() == buffers._MOST * size
    kept = [borrow((SIDE, SIDE), DOUBLE) for _ in range(buffers._MOST)]
    assert {lease.tensor.data_ptr() for lease in kept} == set(addresses[2:])


def test_bytes_are_bounded_over_all_threads():
    mine = [borrow((SIDE, SIDE), DOUBLE) for _ in range(3)]
    size = mine[0].tensor.untyped_storage().nbytes()
    buffers.set_limit(3 * size + 1)
    assert buffers.limit() == 3 * size + 1
    for lease in mine:
        lease.release()
    assert buffers.held() == 3 * size

    def work():
        borrow((SIDE, SIDE), DOUBLE).release()
        return buffers.held()

    assert in_thread(work) == buffers.held() == 3 * size
    buffers.set_limit(size)
    assert buffers.held() == size
    borrow((2 * SIDE, SIDE), DOUBLE).release()  # larger than all that may be kept: what is kept stays
    assert buffers.held() == size


def test_an_order_counts_only_below_the_usual_limit():
    usual = buffers.limit()
    assert 0 < usual <= psutil.virtual_memory().total // buffers._SHARE
    buffers.set_limit(2 * usual)
    assert buffers.limit() == usual


def test_memory_flat_over_1000_borrowings():
    process = psutil.Process()
    generator = torch.Generator().manual_seed(0)
    shapes = torch.randint(200, 900, (1000, 2), generator=generator).tolist()
    buffers.set_limit(32 * MIB)

    def run(some):
        for n, m in some:
            first, second = borrow((n, m), DOUBLE), borrow((m, n), torch.empty(0, dtype=torch.float32))
            first.tensor[0] = 1.0
            second.tensor[0] = 1.0
            second.release()
            assert buffers.held() <= 32 * MIB

    run(shapes[:200])
    before = process.memory_info().rss
    run(shapes[200:])
    assert process.memory_info().rss - before < 48 * MIB
    gc.collect()
    assert not any(type(found) is buffers.Lease for found in gc.get_objects())


@given(st.lists(st.tuples(st.integers(1, 6 * MIB), st.booleans()), max_size=12))
@settings(max_examples=30, deadline=None)
def test_leases_out_at_the_same_time_never_overlap(orders):
    out: list[buffers.Lease] = []
    for size, give_back in orders:
        if give_back and out:
            out.pop(size % len(out)).release()
        out.append(borrow((size,), torch.empty(0, dtype=torch.uint8)))
        spans = sorted((lease.tensor.data_ptr(), lease.tensor.numel()) for lease in out)
        assert all(a + length <= b for (a, length), (b, _) in pairwise(spans))
    assert buffers.held() <= buffers.limit()


# --- short memory -----------------------------------------------------------------------------------------------------


def test_short_memory_empties_the_pools(monkeypatch):
    borrow((SIDE, SIDE), DOUBLE).release()
    borrow((9 * MIB,), torch.empty(0, dtype=torch.uint8)).release()
    kept = buffers.held()
    monkeypatch.setattr(host, "available_memory", lambda device: 2**40)
    with borrow((40 * MIB,), torch.empty(0, dtype=torch.uint8)):
        assert buffers.held() == kept
    buffers.free()
    borrow((SIDE, SIDE), DOUBLE).release()
    monkeypatch.setattr(host, "available_memory", lambda device: 64 * MIB)
    with borrow((40 * MIB,), torch.empty(0, dtype=torch.uint8)):
        assert buffers.held() == 0


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), MemoryError()])
def test_failure_to_allocate_empties_the_pools_and_tries_again(monkeypatch, error):
    borrow((SIDE, SIDE), DOUBLE).release()
    asked = []

    def scarce(shape, like, real=buffers.huge):
        asked.append(shape[0])
        if buffers.held():
            raise error
        return real(shape, like)

    monkeypatch.setattr(buffers, "huge", scarce)
    with borrow((2 * SIDE, SIDE), DOUBLE) as lease:
        assert lease.tensor.shape == (2 * SIDE, SIDE)
        assert asked[-1] == 2 * SIDE * SIDE * 8 <= asked[0]


def test_what_cannot_be_allocated_at_all_is_the_callers_error():
    with pytest.raises(RuntimeError, match="memory"):
        borrow((2**58,), DOUBLE)


def test_free_empties_and_what_is_out_is_not_kept():
    lease = borrow((SIDE, SIDE), DOUBLE)
    borrow((SIDE, SIDE), DOUBLE).release()
    buffers.free()
    assert buffers.held() == 0
    lease.tensor.fill_(1.0)
    lease.release()
    assert buffers.held() == 0
    borrow((SIDE, SIDE), DOUBLE).release()
    assert buffers.held() > 0


def test_free_counts_in_every_thread():
    ready, go = threading.Event(), threading.Event()
    found = []

    def work():
        lease = borrow((SIDE, SIDE), DOUBLE)
        borrow((SIDE, SIDE), DOUBLE).release()
        ready.set()
        go.wait(20)
        lease.release()
        found.append(buffers.held())
        borrow((SIDE, SIDE), DOUBLE).release()
        found.append(buffers.held())

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(20)
    buffers.free()
    go.set()
    thread.join()
    assert found[0] == 0
    assert found[1] > 0


def test_the_last_disable_frees(monkeypatch):
    monkeypatch.setenv("AUTOKERN_MEMORY", "6MiB")
    with autokern.enabled():
        assert buffers.limit() == 6 * MIB
        with autokern.enabled():
            borrow((SIDE, SIDE), DOUBLE).release()
        assert buffers.held() > 0
    assert buffers.held() == 0
    assert buffers.limit() > 6 * MIB
