"""workspace.py and allocator.py: memory that is used again, never twice at once, within bounds, and given back."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise

import msgspec
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autokern
from autokern import allocator, doctor, host, memory_probe, pages, probes, workspace
from autokern.workspace import SMALLEST, borrow

MIB = 2**20
DOUBLE = torch.empty(0, dtype=torch.float64)
SIDE = 600
"""Of a float64 matrix that is large enough to be kept."""
LINUX = sys.platform.startswith("linux")


@pytest.fixture(autouse=True)
def _empty_pools():
    workspace.set_limit(None)
    workspace.free()
    yield
    workspace.set_limit(None)
    workspace.free()


def in_thread(work):
    """What `work` returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def child(script: str) -> str:
    """What a process of its own prints; it must end well and complain of nothing."""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.strip()


# --- used again -------------------------------------------------------------------------------------------------------


def test_memory_is_used_again():
    lease = borrow((SIDE, SIDE), DOUBLE)
    assert (lease.tensor.shape, lease.tensor.dtype, lease.tensor.device.type) == ((SIDE, SIDE), torch.float64, "cpu")
    assert lease.tensor.is_contiguous()
    assert lease.tensor.data_ptr() % 64 == 0
    where = lease.tensor.data_ptr()
    assert workspace.held() == 0
    lease.release()
    assert lease.tensor is None
    assert workspace.held() >= SIDE * SIDE * 8
    again = borrow((SIDE, SIDE), DOUBLE)
    assert again.tensor.data_ptr() == where
    assert workspace.held() == 0
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
    assert workspace.held() == 0


def test_other_devices_are_left_to_torch():
    with borrow((SIDE, SIDE), torch.empty(0, device="meta")) as lease:
        assert lease.tensor.device.type == "meta"
    assert workspace.held() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_a_gpu_is_left_to_torch():
    with borrow((SIDE, SIDE), torch.empty(0, device="cuda")) as lease:
        assert lease.tensor.device.type == "cuda"
    assert workspace.held() == 0


def test_a_default_device_changes_nothing():
    with torch.device("meta"), borrow((SIDE, SIDE), DOUBLE) as lease:
        assert lease.tensor.device.type == "cpu"


def test_fake_tensors_have_no_memory_to_keep():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2, dtype=torch.float64))
        with borrow((SIDE, SIDE), fake) as lease:
            assert type(lease.tensor) is type(fake)
    assert workspace.held() == 0


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
    assert workspace.held() == 0
    with borrow((SIDE, SIDE), DOUBLE) as lease:
        lease.tensor.share_memory_()
    assert workspace.held() == 0


def test_where_torch_does_not_tell_who_refers_to_memory_nothing_is_kept(monkeypatch):
    workspace._alone.cache_clear()
    with monkeypatch.context() as patch:
        patch.delattr(torch._C, "_storage_Use_Count")
        with borrow((SIDE, SIDE), DOUBLE) as lease:
            assert lease.tensor.shape == (SIDE, SIDE)
        assert workspace.held() == 0
    workspace._alone.cache_clear()


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


def test_the_garbage_collector_gives_back():
    lease = borrow((SIDE, SIDE), DOUBLE)
    ring = [lease]
    ring.append(ring)
    del lease, ring
    gc.collect()
    assert workspace.held() > 0


def test_an_error_within_the_block_gives_back():
    with pytest.raises(ValueError, match="no good"), borrow((SIDE, SIDE), DOUBLE):
        raise ValueError("no good")
    assert workspace.held() > 0


def test_leases_alive_at_the_end_of_the_interpreter_say_nothing():
    script = """
import threading, torch
from autokern import workspace
like = torch.empty(0, dtype=torch.float64)
kept = workspace.borrow((600, 600), like)
ring = [workspace.borrow((700, 700), like)]
ring.append(ring)
workspace.borrow((800, 800), like).release()
threading.Thread(target=lambda: ring.append(workspace.borrow((900, 900), like))).start()
"""
    child(script)


# --- threads and forks ------------------------------------------------------------------------------------------------


def test_threads_do_not_share():
    with borrow((SIDE, SIDE), DOUBLE) as lease:
        where = lease.tensor.data_ptr()

    def borrowed():
        with borrow((SIDE, SIDE), DOUBLE) as lease:
            return lease.tensor.data_ptr()

    assert in_thread(borrowed) != where
    assert borrow((SIDE, SIDE), DOUBLE).tensor.data_ptr() == where


def test_a_pool_ends_with_its_thread():
    def work():
        borrow((SIDE, SIDE), DOUBLE).release()
        return workspace.held()

    assert in_thread(work) > 0
    assert workspace.held() == 0


def test_release_in_another_thread_gives_back_to_the_borrower():
    lease = borrow((SIDE, SIDE), DOUBLE)
    where = lease.tensor.data_ptr()
    in_thread(lease.release)
    assert borrow((SIDE, SIDE), DOUBLE).tensor.data_ptr() == where


def test_release_after_the_borrower_ended_keeps_nothing():
    lease = in_thread(lambda: borrow((SIDE, SIDE), DOUBLE))
    lease.tensor.fill_(1.0)
    lease.release()
    assert workspace.held() == 0


def test_many_threads_never_hold_the_same_memory():
    wrong: list[int] = []
    handed: list[workspace.Lease] = []

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
                workspace.free()

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_with_nothing():
    script = """
import os, torch
from autokern import workspace
like = torch.empty(0, dtype=torch.float64)
workspace.borrow((600, 600), like).release()
out = workspace.borrow((700, 700), like)
before = workspace.held()
child = os.fork()
if child == 0:
    assert workspace.held() == 0
    out.tensor.fill_(1.0)
    out.release()  # borrowed by the parent: not kept
    assert workspace.held() == 0
    workspace.borrow((600, 600), like).release()
    assert workspace.held() > 0
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert workspace.held() == before > 0
"""
    child(script)


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_is_let_go_first():
    leases = [borrow((SIDE, SIDE), DOUBLE) for _ in range(workspace._MOST + 2)]
    addresses = [lease.tensor.data_ptr() for lease in leases]
    size = leases[0]._buffer.size
    for lease in leases:
        lease.release()
    assert workspace.held() == workspace._MOST * size
    kept = [borrow((SIDE, SIDE), DOUBLE) for _ in range(workspace._MOST)]
    assert {lease.tensor.data_ptr() for lease in kept} == set(addresses[2:])


def test_bytes_are_bounded_over_all_threads():
    mine = [borrow((SIDE, SIDE), DOUBLE) for _ in range(3)]
    size = mine[0]._buffer.size
    workspace.set_limit(3 * size + 1)
    assert workspace.limit() == 3 * size + 1
    for lease in mine:
        lease.release()
    assert workspace.held() == 3 * size

    def work():
        borrow((SIDE, SIDE), DOUBLE).release()
        return workspace.held()

    assert in_thread(work) == 3 * size
    assert workspace.held() == 2 * size
    workspace.set_limit(size)
    assert workspace.held() == size
    borrow((2 * SIDE, SIDE), DOUBLE).release()  # larger than all that may be kept: what is kept stays
    assert workspace.held() == size


def test_an_order_counts_only_below_the_usual_limit():
    usual = workspace.limit()
    assert 0 < usual <= psutil.virtual_memory().total // workspace._SHARE
    workspace.set_limit(2 * usual)
    assert workspace.limit() == usual


def test_memory_flat_over_1000_borrowings():
    process = psutil.Process()
    generator = torch.Generator().manual_seed(0)
    shapes = torch.randint(200, 900, (1000, 2), generator=generator).tolist()
    workspace.set_limit(32 * MIB)

    def run(some):
        for n, m in some:
            first, second = borrow((n, m), DOUBLE), borrow((m, n), torch.empty(0, dtype=torch.float32))
            first.tensor[0] = 1.0
            second.tensor[0] = 1.0
            second.release()
            assert workspace.held() <= 32 * MIB

    run(shapes[:200])
    before = process.memory_info().rss
    run(shapes[200:])
    assert process.memory_info().rss - before < 48 * MIB
    gc.collect()
    assert not any(type(found) is workspace.Lease for found in gc.get_objects())


@given(st.lists(st.tuples(st.integers(1, 6 * MIB), st.booleans()), max_size=12))
@settings(max_examples=30, deadline=None)
def test_leases_out_at_the_same_time_never_overlap(orders):
    out: list[workspace.Lease] = []
    for size, give_back in orders:
        if give_back and out:
            out.pop(size % len(out)).release()
        out.append(borrow((size,), torch.empty(0, dtype=torch.uint8)))
        spans = sorted((lease.tensor.data_ptr(), lease.tensor.numel()) for lease in out)
        assert all(a + length <= b for (a, length), (b, _) in pairwise(spans))
    assert workspace.held() <= workspace.limit()


# --- short memory -----------------------------------------------------------------------------------------------------


def test_short_memory_empties_the_pools(monkeypatch):
    borrow((SIDE, SIDE), DOUBLE).release()
    borrow((9 * MIB,), torch.empty(0, dtype=torch.uint8)).release()
    kept = workspace.held()
    monkeypatch.setattr(host, "available_memory", lambda device: 2**40)
    with borrow((40 * MIB,), torch.empty(0, dtype=torch.uint8)):
        assert workspace.held() == kept
    workspace.free()
    borrow((SIDE, SIDE), DOUBLE).release()
    monkeypatch.setattr(host, "available_memory", lambda device: 64 * MIB)
    with borrow((40 * MIB,), torch.empty(0, dtype=torch.uint8)):
        assert workspace.held() == 0


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), MemoryError()])
def test_failure_to_allocate_empties_the_pools_and_tries_again(monkeypatch, error):
    borrow((SIDE, SIDE), DOUBLE).release()
    asked = []

    def scarce(shape, like, real=pages.empty):
        asked.append(shape[0])
        if workspace.held():
            raise error
        return real(shape, like)

    monkeypatch.setattr(pages, "empty", scarce)
    with borrow((2 * SIDE, SIDE), DOUBLE) as lease:
        assert lease.tensor.shape == (2 * SIDE, SIDE)
        assert asked[-1] == 2 * SIDE * SIDE * 8 <= asked[0]


def test_what_cannot_be_allocated_at_all_is_the_callers_error():
    with pytest.raises(RuntimeError, match="memory"):
        borrow((2**58,), DOUBLE)


def test_free_empties_and_what_is_out_is_not_kept():
    lease = borrow((SIDE, SIDE), DOUBLE)
    borrow((SIDE, SIDE), DOUBLE).release()
    workspace.free()
    assert workspace.held() == 0
    lease.tensor.fill_(1.0)
    lease.release()
    assert workspace.held() == 0
    borrow((SIDE, SIDE), DOUBLE).release()
    assert workspace.held() > 0


def test_free_counts_in_every_thread():
    ready, go = threading.Event(), threading.Event()
    found = []

    def work():
        lease = borrow((SIDE, SIDE), DOUBLE)
        borrow((SIDE, SIDE), DOUBLE).release()
        ready.set()
        go.wait(20)
        lease.release()
        found.append(workspace.held())
        borrow((SIDE, SIDE), DOUBLE).release()
        found.append(workspace.held())

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(20)
    workspace.free()
    go.set()
    thread.join()
    assert found[0] == 0
    assert found[1] > 0


def test_the_last_disable_frees(monkeypatch):
    monkeypatch.setenv("AUTOKERN_MEMORY", "6MiB")
    with autokern.enabled():
        assert workspace.limit() == 6 * MIB
        with autokern.enabled():
            borrow((SIDE, SIDE), DOUBLE).release()
        assert workspace.held() > 0
    assert workspace.held() == 0
    assert workspace.limit() > 6 * MIB


# --- the allocator ----------------------------------------------------------------------------------------------------

needs_glibc = pytest.mark.skipif(not LINUX or allocator.why_not() is not None, reason="needs glibc's own allocator")


@needs_glibc
def test_freed_memory_is_kept_until_restored():
    script = """
import psutil, torch
from autokern import allocator
resident = lambda: psutil.Process().memory_info().rss // 2**20
fill = lambda: float(torch.ones(25_000_000, dtype=torch.float64)[0])
before = resident()
fill()
assert resident() - before < 100, "stock glibc keeps a large block"
assert allocator.retain() is None and allocator.retained()
fill()
assert resident() - before > 150, "glibc was told to keep it and did not"
allocator.restore()
assert not allocator.retained()
assert resident() - before < 100, "what was kept was not given back"
fill()
assert resident() - before < 100, "glibc still keeps large blocks"
print("fine")
"""
    assert child(script) == "fine"


@pytest.mark.parametrize(("order", "expected"), [("retain", ["retain", "restore"]), ("default", ["restore"])])
def test_it_is_told_from_enable_to_the_last_disable(monkeypatch, order, expected):
    told = []
    monkeypatch.setattr(allocator, "retain", lambda: told.append("retain"))
    monkeypatch.setattr(allocator, "restore", lambda: told.append("restore"))
    monkeypatch.setenv("AUTOKERN_ALLOCATOR", order)
    with autokern.enabled():
        with autokern.enabled():
            pass
        assert told == expected[:-1]
    assert told == expected


@needs_glibc
@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "1000000"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=3")]
)
def test_orders_to_glibc_prevail_and_a_warning_says_so(monkeypatch, caplog, name, value):
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("AUTOKERN_ALLOCATOR", "retain")
    with autokern.enabled():
        assert not allocator.retained()
    assert [r.getMessage() for r in caplog.records] == [
        f"AUTOKERN_ALLOCATOR=retain has no effect: {name} orders otherwise"
    ]


def test_elsewhere_nothing_is_done_and_the_reason_told(monkeypatch):
    monkeypatch.setattr(allocator, "_set", lambda **sizes: pytest.fail("glibc was told something"))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert allocator.why_not() == allocator.retain() == "the C library is not glibc"
    assert not allocator.retained()
    allocator.restore()


@needs_glibc
def test_retaining_is_idempotent_and_a_refusal_is_told(monkeypatch):
    told = []
    monkeypatch.setattr(allocator, "_set", lambda **sizes: told.append(sizes) or True)
    monkeypatch.setattr(allocator, "_retained", False)
    assert allocator.retain() is None
    assert allocator.retain() is None
    allocator.restore()
    allocator.restore()
    assert told == [{"mmap": 2**30, "trim": -1}, {"mmap": 32 * MIB, "trim": 64 * MIB}]
    monkeypatch.setattr(allocator, "_set", lambda **sizes: False)
    assert allocator.retain() == "glibc refused"
    assert not allocator.retained()


# --- doctor -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="measured on POSIX systems only")
def test_doctor_measures_what_reuse_gains():
    began = time.monotonic()
    reuse = memory_probe.measure()
    assert time.monotonic() - began < 2 * memory_probe._LONGEST
    assert isinstance(reuse, memory_probe.Reuse), reuse
    assert min(reuse.fresh, reuse.huge_pages, reuse.pool) > 0
    assert (reuse.retain is None) == bool(reuse.obstacle) == (allocator.why_not() is not None)
    figures = reuse.figures()
    assert figures["pool_gain"] == pytest.approx(reuse.fresh / reuse.pool, abs=0.01)
    assert figures["fresh_ms"] == pytest.approx(1e3 * reuse.fresh, abs=0.001)


def test_doctor_tells_figures(monkeypatch):
    found = memory_probe.Reuse(fresh=0.030, huge_pages=0.011, pool=0.006, retain=None, obstacle="no glibc")
    monkeypatch.setattr(memory_probe, "measure", lambda: found)
    finding = doctor._reuse()
    assert finding.status == "ok"
    assert "30.0 ms fresh" in finding.found
    assert "6.0 ms (5.0×) from the pool" in finding.found
    assert "retain not possible, no glibc" in finding.found
    assert finding.figures["pool_gain"] == 5.0
    assert "retain_ms" not in finding.figures
    assert msgspec.to_builtins(finding)["figures"] == finding.figures


@pytest.mark.parametrize("program", ["print('works')", "raise OSError('no')", "import time; time.sleep(99)"])
def test_a_measurement_that_fails_is_a_note(monkeypatch, program):
    monkeypatch.setitem(probes.PROGRAMS, "memory reuse", program)
    monkeypatch.setattr(memory_probe, "_LONGEST", 0.5)
    assert doctor._reuse().status == "note"


def test_nothing_is_measured_where_memory_is_short(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda device: 100 * MIB)
    assert "too little memory" in doctor._reuse().found
