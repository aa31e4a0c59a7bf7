"""Ranks: the processes of one distributed job, their collectives, and errors that name the rank at fault.

Autokern has its own gloo process group. In every collective the ranks first exchange a header: the kind of call, its
sizes, and checksums of its data. If headers differ, every rank raises an error before anything is computed. If a
collective fails, each waiting rank notes in the job's store that it waits; one without a note has died or hangs.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import itertools
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

from autokern.core.errors import RanksError, suppressed

TIMEOUT = 300.0  # default seconds to wait for another rank before the job fails
_NUMBERS = 10  # integers in a header: the number of the call, its kind, four sizes and four checksums
_GRACE = 3.0  # seconds in which the other waiting ranks must note that they wait, after the first one
_KINDS = ("objects", "product", "gradients", "barrier", "points")
_MARK = "_AUTOKERN_RANK"  # environment variable by which child processes of a rank know that they are not ranks

_joins = itertools.count()


class Link(NamedTuple):
    """Cost of an all-reduce: latency in seconds, and bandwidth in bytes a second."""

    latency: float
    bandwidth: float

    def seconds(self, count: int) -> float:
        """Return the seconds of an all-reduce of so many bytes."""
        return self.latency + count / self.bandwidth


class Ranks:
    """The ranks of a job, as one of them sees it; `shy` ranks stop sharing once the program has a process group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float, shy: bool = False) -> None:
        self.rank, self.size, self.timeout, self.shy = rank, size, timeout, shy
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._broken: RanksError | None = None
        limit = datetime.timedelta(seconds=timeout)
        self._group: Any = distributed.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, limit)
        self._signs, self.calls = PrefixStore("signs", store), 0  # collectives until now
        self.barrier()

        def seconds(numbers: torch.Tensor) -> float:
            self.barrier()
            began = time.perf_counter()
            self._wait(lambda: self._group.allreduce([numbers]))
            return max(time.perf_counter() - began, 1e-9)

        one, many = (torch.zeros(count, dtype=torch.float64, device="cpu") for count in (1, 2**19))
        own = min(seconds(one) for _ in range(20)), many.nbytes / min(seconds(many) for _ in range(4))
        latencies, bandwidths = zip(*self.objects(own), strict=True)
        self.link = Link(max(latencies), min(bandwidths))

    def mine(self) -> bool:
        """Whether the present thread may share its work: only the thread that joined, and not in a forked child."""
        ours = os.getpid() == self._pid and threading.get_ident() == self._thread
        return ours and not (self.shy and distributed.is_initialized())

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._met("barrier", (), {})

    def objects(self, own: Any) -> list[Any]:
        """Return the object of each rank, by rank; they are pickled, so all processes must trust each other."""
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
        """Sum over all ranks the `count` numbers that `work` of each rank writes into zeros of `like`'s dtype.

        RanksError on all ranks, if `kind`, `sizes` (at most four) or a bit of `data` (at most four lists of tensors or
        words, by their names in errors) differs on one rank, or if it fails or does not answer.
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
        """Close the group and refuse further collectives; not in a forked child, which lacks the group's threads."""
        if os.getpid() != self._pid:
            return
        if self._broken is None:
            self._say("left", -1)
            self._broken = RanksError("autokern: this process has left its ranks")
        self._group = None

    def _met(
        self, kind: str, sizes: Sequence[int], data: Mapping[str, Sequence[torch.Tensor | str]], alike: bool = True
    ) -> list[list[int]]:
        """Exchange headers with all ranks, and return them; RanksError where they differ."""
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
        first = rows[0]
        for rank, row in enumerate(rows):
            if row[:2] != first[:2] or (alike and row[2:6] != first[2:6]):
                asked = [f"{_KINDS[r[1]]} number {r[0]} of sizes {r[2:6]}" for r in (row, first)]
                raise RanksError(
                    f"autokern: rank {rank} asks for {asked[0]}, rank 0 for {asked[1]}. All ranks must run the same "
                    "program on the same data; else set AUTOKERN_RANKS=off"
                )
        differ = [(rank, [n for n, a, b in zip(data, row[6:], first[6:], strict=False) if a != b])
                  for rank, row in enumerate(rows)]  # fmt: skip
        told = [f"rank {rank} in {' and '.join(unlike)}" for rank, unlike in differ if unlike]
        if told:
            raise RanksError(
                f"autokern: ranks hold different data than rank 0: {'; '.join(told)}. Give all ranks the "
                "same data, seeds, CPUs, libraries and numbers of threads; else set AUTOKERN_RANKS=off"
            )
        return rows

    def _wait(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            self._group = None  # closed, so that ranks which wait for this one fail, too
            self._broken = self._lost(error)
            raise self._broken from None

    def _lost(self, error: BaseException | None) -> RanksError:
        """Return an error that names the missing ranks, and publish its text in the store."""
        found: dict[int, str] = {}
        asking = threading.Thread(target=self._ask, args=(found,), daemon=True)  # a stopped store never answers
        asking.start()
        asking.join(2 * _GRACE)
        told = "rank 0, or the process that keeps the job's store, does not answer"
        if self.rank in found and not asking.is_alive():
            told = _in_words(found, self.size, error)
            self._say(f"lost {told}")
        return RanksError(f"autokern: {told} in collective {self.calls}; the timeout is {self.timeout:g} s")

    def _say(self, text: str, call: int | None = None) -> None:
        with suppressed(RuntimeError):  # the store has ended
            self._signs.set(f"{self.calls if call is None else call}/{self.rank}", text)

    def _ask(self, found: dict[int, str]) -> None:
        """Publish that this rank waits, and read each rank's state in the present collective into `found`."""
        self._say("waits")
        until = time.monotonic() + _GRACE
        with suppressed(RuntimeError):
            while len(found) < self.size and time.monotonic() < until:
                if any(said.startswith(("failed", "lost")) for said in found.values()):
                    break
                for rank, call in itertools.product(range(self.size), (self.calls, -1)):
                    if rank not in found and self._signs.check([f"{call}/{rank}"]):
                        found[rank] = self._signs.get(f"{call}/{rank}").decode()
                time.sleep(0.02)


def _in_words(said: Mapping[int, str], size: int, error: BaseException | None) -> str:
    """Return the cause of a failed collective, from the states that the ranks have published."""
    if failed := [f"rank {rank} {text}" for rank, text in said.items() if text.startswith("failed")]:
        return "; ".join(failed)
    if lost := [text.removeprefix("lost ") for text in said.values() if text.startswith("lost")]:
        return lost[0]
    if left := [rank for rank, text in said.items() if text == "left"]:
        return f"{_named(left)} ended before the others did"
    if silent := [rank for rank in range(size) if rank not in said]:
        return f"{_named(silent)} did not come: dead, standing still, or running something else"
    return f"the connection broke ({error})"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _sum(tensors: Sequence[torch.Tensor | str]) -> int:
    """Return a checksum of the bits of tensors and words."""
    bits = (t.encode() if isinstance(t, str) else t.detach().contiguous().numpy().data for t in tensors)
    return functools.reduce(lambda found, data: zlib.crc32(data, found), bits, 0)


held: Ranks | None = None  # those of this process, whether or not the present thread may share its work


def active() -> Ranks | None:
    """Return the ranks with which the present thread shares its work, or None."""
    return held if held is not None and held.mine() else None


def is_job() -> bool:
    """Whether this process is one of several ranks by torchrun's variables, and not a child process of a rank."""
    size = os.environ.get("WORLD_SIZE", "")
    named = all(os.environ.get(name) for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    pid, _, address = os.environ.get(_MARK, "").partition(" ")
    child = address == _address() and pid != str(os.getpid())
    return not child and named and size.isdigit() and int(size) > 1 and distributed.is_available()


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _keep() -> None:
    """Keep the group alive in a forked child: closing it would wait for threads that the child lacks."""
    if held is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep)


def join(timeout: float, shy: bool = False) -> Ranks:
    """Join the ranks of the job by the store of the program's process group, or by torchrun's variables."""
    number = next(_joins)
    if distributed.is_initialized():
        store = distributed.distributed_c10d._get_default_store()
        rank, size = distributed.get_rank(), distributed.get_world_size()
    else:
        from torch.distributed.rendezvous import rendezvous

        store, rank, size = next(iter(rendezvous("env://", timeout=datetime.timedelta(seconds=timeout))))
    os.environ[_MARK] = f"{os.getpid()} {_address()}"
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Ranks(PrefixStore(f"autokern/{again}/{number}", store), rank, size, timeout, shy)
