"""Ranks: the processes of one job that compute together, the collectives that they share, and how these fail.

A group of its own by gloo, apart from the program's: that may start one, or none. Every collective begins with a small
header of each rank, which says what it asks for and sums up its data. Ranks that ask for other things, or hold other
data, get an error that names them before anything is computed. Where a collective fails, each rank that waited says so
in the job's store; who does not has died, hangs, or runs something else.
"""

from __future__ import annotations

import ctypes
import datetime
import itertools
import math
import os
import pickle
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore

from autokern.core.errors import RanksError
from autokern.core.recovery import suppressed

TIMEOUT = 300.0
"""Seconds after which a rank that does not answer ends the job, by default."""
_NUMBERS = 10
"""Whole numbers in a header: the call, its kind, sizes and sums."""
_GRACE = 3.0
"""Seconds in which ranks that waited in vain say so, from the first of them on."""
_KINDS = ("objects", "product", "gradients", "barrier", "points")
_MARK = "_AUTOKERN_RANK"
"""Variable by which processes that a rank starts know that they are none themselves."""

_joined = 0


class Link(NamedTuple):
    """What an all-reduce takes: seconds of a tiny one, and bytes in a second of a large one."""

    latency: float
    bandwidth: float

    def seconds(self, count: int) -> float:
        """Return the seconds of an all-reduce of so many bytes."""
        return self.latency + count / self.bandwidth


class Ranks:
    """The ranks of a job, seen by one of them.

    `timeout` is the seconds to wait for another rank. If `shy`, the ranks stand back once the program has a process
    group of its own.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float, shy: bool = False) -> None:
        self.rank, self.size, self.timeout, self.shy = rank, size, timeout, shy
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._broken: RanksError | None = None
        limit = datetime.timedelta(seconds=timeout)
        self._group: Any = distributed.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, limit)
        self._signs, self.calls = PrefixStore("signs", store), 0  # collectives until now
        self.barrier()
        self.link = self._measured()

    def mine(self) -> bool:
        """Whether the present thread may share its work: the one that joined, and not in a forked child."""
        ours = os.getpid() == self._pid and threading.get_ident() == self._thread
        return ours and not (self.shy and distributed.is_initialized())

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._met("barrier", (), {})

    def objects(self, own: Any) -> list[Any]:
        """Return what each rank gives, in the order of the ranks; only between processes that trust each other."""
        data = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        lengths = [int(row[2]) for row in self._met("objects", (len(data),), {}, alike=False)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = data
        found = [torch.empty_like(padded) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([found], [padded]))
        return [pickle.loads(bytes(f[:n].tolist())) for f, n in zip(found, lengths, strict=True)]

    def summed(
        self, kind: str, sizes: Sequence[int], data: Mapping[str, Sequence[torch.Tensor | str]], like: torch.Tensor,
        count: int, work: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:  # fmt: skip
        """Return the sum over the ranks of what each one's work writes.

        Of what is asked for, `kind` and `sizes` (at most four) must be the same on all ranks, and `data` (at most four
        tensors or words, by what they are called in errors) bit by bit. `work` writes the part of this rank into
        `count` zeros with the dtype of `like`. RanksError on all ranks, if one asks for something else, holds other
        data, fails or does not come.
        """
        flat = like.new_zeros(count + 1)
        self._met(kind, sizes, data)
        failed: BaseException | None = None
        try:
            work(flat[:-1])
        except BaseException as error:  # the others must not wait for this rank
            failed = error
            self._say(f"failed {type(error).__name__}: {str(error)[:200]}")
            flat.zero_()[-1] = 1
        self._wait(lambda: self._group.allreduce([flat]))
        if failed is not None:
            raise failed
        if flat[-1] > 0:
            raise self._lost(None)
        return flat[:-1]

    def leave(self) -> None:
        """Take no part any more; the group is closed. A forked child has no threads that could close it."""
        if os.getpid() != self._pid:
            return
        if self._broken is None:
            self._say("left", -1)
        self._broken = self._broken or RanksError("autokern: this process has left its ranks")
        self._group = None

    def _measured(self) -> Link:
        latency, bandwidth = math.inf, 0.0
        for numbers, repeats in ((1, 20), (2**19, 4)):
            own = torch.zeros(numbers, dtype=torch.float64, device="cpu")
            for _ in range(repeats):
                self.barrier()
                began = time.perf_counter()
                self._wait(lambda own=own: self._group.allreduce([own]))  # type: ignore[misc]
                seconds = time.perf_counter() - began
                if numbers == 1:
                    latency = min(latency, seconds)
                else:
                    bandwidth = max(bandwidth, 8 * numbers / max(seconds, 1e-9))
        found = self.objects((latency, bandwidth))
        return Link(max(one[0] for one in found), min(one[1] for one in found))

    def _met(
        self, kind: str, sizes: Sequence[int], data: Mapping[str, Sequence[torch.Tensor | str]], alike: bool = True
    ) -> list[list[int]]:
        """Let the headers of all ranks meet, and return them; raise an error where they differ."""
        if self._broken is not None:
            raise self._broken
        self.calls += 1
        sums = [_sum(tensors) for tensors in data.values()]
        own = [self.calls, _KINDS.index(kind), *sizes, *[0] * (4 - len(sizes)), *sums]
        own += [0] * (_NUMBERS - len(own))
        mine = torch.tensor(own, dtype=torch.int64, device="cpu")
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([found], [mine]))
        rows: list[list[int]] = [row.tolist() for row in found]
        self._compare(rows, list(data), alike)
        return rows

    def _compare(self, rows: list[list[int]], names: list[str], alike: bool) -> None:
        first = rows[0]
        for rank, row in enumerate(rows):
            if row[:2] != first[:2] or (alike and row[2:6] != first[2:6]):
                asked = [f"{_KINDS[r[1]]} number {r[0]} of sizes {r[2:6]}" for r in (row, first)]
                raise RanksError(
                    f"autokern: rank {rank} asks for {asked[0]}, rank 0 for {asked[1]}. All ranks must run the same "
                    "program on the same data, or AUTOKERN_RANKS=off"
                )
        differ = [(rank, [n for n, a, b in zip(names, row[6:], first[6:], strict=False) if a != b])
                  for rank, row in enumerate(rows)]  # fmt: skip
        told = [f"rank {rank} in {' and '.join(unlike)}" for rank, unlike in differ if unlike]
        if told:
            raise RanksError(
                f"autokern: ranks hold different data: {'; '.join(told)} is not what rank 0 has. Give all ranks the "
                "same data, seeds, CPUs, libraries and numbers of threads, or AUTOKERN_RANKS=off"
            )

    def _wait(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            self._group = None  # closed, so that ranks which wait for this one fail too
            self._broken = self._lost(error)
            raise self._broken from None

    def _lost(self, error: BaseException | None) -> RanksError:
        """Return the error that names the ranks that a collective waits for in vain, and tell them to the others."""
        found: dict[int, str] = {}
        asking = threading.Thread(target=self._ask, args=(found,), daemon=True)  # a stopped store answers no one
        asking.start()
        asking.join(2 * _GRACE)
        told = "rank 0, or the process that keeps the job's store, does not answer"
        if self.rank in found and not asking.is_alive():
            told = _in_words(found, self.size, error)
            self._say(f"lost {told}")
        end = f"in collective {self.calls}; it was waited for at most {self.timeout:g} s"
        return RanksError(f"autokern: {told} {end}")

    def _say(self, text: str, call: int | None = None) -> None:
        with suppressed(RuntimeError):  # the store is gone: whoever asks gets no answer
            self._signs.set(f"{self.calls if call is None else call}/{self.rank}", text)

    def _ask(self, found: dict[int, str]) -> None:
        """Say that this rank waits in vain, and read what each rank says of the present collective."""
        self._say("waits")
        until = time.monotonic() + _GRACE
        with suppressed(RuntimeError):
            while len(found) < self.size and time.monotonic() < until and not any(map(_tells, found.values())):
                for rank, call in itertools.product(range(self.size), (self.calls, -1)):
                    if rank not in found and self._signs.check([f"{call}/{rank}"]):
                        found[rank] = self._signs.get(f"{call}/{rank}").decode()
                time.sleep(0.02)


def _tells(said: str) -> bool:
    return said.startswith(("failed", "lost"))


def _in_words(said: Mapping[int, str], size: int, error: BaseException | None) -> str:
    """Return what became of the ranks by what they say themselves."""
    if failed := [f"rank {rank} {text}" for rank, text in said.items() if text.startswith("failed")]:
        return "; ".join(failed)
    for text in said.values():
        if text.startswith("lost"):
            return text.removeprefix("lost ")
    if left := [rank for rank, text in said.items() if text == "left"]:
        return f"{_named(left)} ended before the others did"
    if silent := [rank for rank in range(size) if rank not in said]:
        return f"{_named(silent)} did not come: dead, standing still, or running something else"
    return f"the connection broke ({error})"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _sum(tensors: Sequence[torch.Tensor | str]) -> int:
    """Return a checksum of the bits of tensors, and of words."""
    found = 0
    for t in tensors:
        found = zlib.crc32(t.encode() if isinstance(t, str) else t.detach().contiguous().numpy().data, found)
    return found


_active: Ranks | None = None


def use(ranks: Ranks | None) -> None:
    """Let these ranks share the work of this process, or none."""
    global _active
    _active = ranks


def held() -> Ranks | None:
    """Return the ranks of this process, whether or not the present thread may share its work with them."""
    return _active


def active() -> Ranks | None:
    """Return the ranks that the present thread shares its work with, or None."""
    return _active if _active is not None and _active.mine() else None


def is_job() -> bool:
    """Whether torchrun, or what sets its variables, started this process as one of several; no rank did."""
    size = os.environ.get("WORLD_SIZE", "")
    named = all(os.environ.get(name) for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    pid, _, address = os.environ.get(_MARK, "").partition(" ")
    if address == _address() and pid != str(os.getpid()):
        return False
    return named and size.isdigit() and int(size) > 1 and distributed.is_available()


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _keep() -> None:
    """Let a forked child never close what its parent uses: it would wait for threads that it has not."""
    if _active is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_active))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep)


def join(timeout: float, shy: bool = False) -> Ranks:
    """Meet the other ranks of the job: by the program's own process group, or by torchrun's variables."""
    global _joined
    _joined += 1
    if distributed.is_initialized():
        store = distributed.distributed_c10d._get_default_store()
        rank, size = distributed.get_rank(), distributed.get_world_size()
    else:
        from torch.distributed.rendezvous import rendezvous

        limit = datetime.timedelta(seconds=timeout)
        store, rank, size = next(iter(rendezvous("env://", timeout=limit)))
    os.environ[_MARK] = f"{os.getpid()} {_address()}"
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Ranks(PrefixStore(f"autokern/{again}/{_joined}", store), rank, size, timeout, shy)
