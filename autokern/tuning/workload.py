"""Workloads: the problems that programs asked, and how often, in a small file that holds on every host.

A file is JSON: one line for all problems of an op that differ in sizes only. Recordings add up in it. It is replaced
as a whole, under a lock on the file that is replaced; without locks, unless it has changed since it was read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from autokern.core.errors import ProfileError
from autokern.core.op import Op
from autokern.core.problem import SIZES, Problem
from autokern.core.registry import get, registered
from autokern.system.files import FLAGS, Folder, contents, opened
from autokern.tuning.checksum import NewerError
from autokern.tuning.plans import contenders
from autokern.tuning.profile import Profile

__all__ = ["MOST", "SCHEMA", "Workload", "add", "bounded", "decode", "encode", "read", "served", "unmeasured"]

SCHEMA = 1
MOST = 20_000
"""Problems of a workload; of more, those that are decided alike become one."""
_RATE = 4e9
"""Flops and bytes a second, to compare the time of problems."""
_REPEATED = 1e-3
"""Part of its weight that a problem keeps if one that is decided alike is measured."""
_PATIENCE = 10.0
"""Seconds to wait for other processes that write to the same file."""
_TRIES = 64
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_Calls = Annotated[int, msgspec.Meta(ge=1, le=2**60)]


class Workload(msgspec.Struct, frozen=True):
    """What programs asked: it does not depend on the host, and holds no name, path or argument of a program.

    Parameters
    ----------
    calls : dict
        Number of calls by Problem.
    recordings : int
        Number of processes that have asked.
    """

    calls: dict[Problem, int] = {}
    recordings: int = 0

    def merge(self, other: Workload) -> Workload:
        """Return the sum of two workloads."""
        calls = Counter(self.calls)
        calls.update(other.calls)
        return Workload(bounded(calls), self.recordings + other.recordings)

    def weights(self, op: Op, dtypes: Sequence[str], device: str) -> dict[Problem, float]:
        """Return the problems of an op on a device, the weightiest first: calls times the seconds expected of stock.

        Of problems that are decided alike, the one with the most calls stands for all.
        """
        mine = {
            p: calls for p, calls in self.calls.items() if (p.op, p.device) == (op.name, device) and p.dtype in dtypes
        }
        alike = Counter[Problem]()
        for problem, calls in mine.items():
            alike[problem.coarse] += calls
        weights: dict[Problem, float] = {}
        for problem, calls in sorted(mine.items(), key=lambda item: -item[1]):
            total = alike.pop(problem.coarse, 0)
            work = op.stock.features(problem)
            seconds = 1e-5 * work.calls + (work.flops + work.bytes) / _RATE
            weights[problem] = seconds * (total or _REPEATED * calls)
        return dict(sorted(weights.items(), key=lambda item: -item[1]))


def bounded(calls: Counter[Problem]) -> dict[Problem, int]:
    """Return calls by problem; if there are very many, those that are decided alike are added, and rare ones left out.

    Random sizes must leak neither memory nor space on a disk.
    """
    if len(calls) > MOST:
        alike = Counter[Problem]()
        for problem, count in calls.items():
            alike[problem.coarse] += count
        calls = Counter(dict(alike.most_common(MOST // 2)))
    return dict(calls)


def served(workload: Workload, devices: Iterable[str]) -> tuple[Workload, str]:
    """Return the part of a workload that can be measured on some kinds of devices, and words about the rest, if any."""
    ops, there = {op.name: op for op in registered()}, set(devices)
    calls, left_out = dict(workload.calls), Counter[str]()
    for problem in workload.calls:
        if problem.op not in ops:
            left_out[f"of {problem.op}, an op unknown here"] += 1
        elif problem.device not in there:
            left_out[f"on {problem.device}, which is not measured here"] += 1
        elif not _is_known(ops[problem.op], problem):
            left_out[f"that {problem.op} does not know"] += 1
        else:
            continue
        calls.pop(problem)
    words = ", ".join(f"{count} {why}" for why, count in sorted(left_out.items()))
    told = f"problems of the workload are left out: {words}" if words else ""
    return Workload(calls, workload.recordings), told


def unmeasured(workload: Workload, profile: Profile, level: str, accuracy: str) -> int:
    """Return the number of problems with a choice on this machine of which a profile has none that is decided alike."""
    alike = {trial.problem.coarse for trial in profile.trials}
    return sum(p.coarse not in alike and len(contenders(get(p.op), p, level, accuracy)) > 1 for p in workload.calls)


def _is_known(op: Op, problem: Problem) -> bool:
    try:
        op.coordinates(problem)
        return problem.dtype in ("float32", "float64") and all(c.features(problem) for c in op.feasible(problem))
    except Exception:  # a newer autokern, or a plugin, has further words
        return False


class _Line(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Problems that differ in sizes only: m, n, d, rhs, batch, and calls."""

    op: str
    sizes: list[tuple[_Size, _Size, _Size, _Size, _Size, _Calls]]
    dtype: str = "float64"
    device: str = "cpu"
    grad: str = ""
    variant: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    autokern: str
    schema: int
    recordings: Annotated[int, msgspec.Meta(ge=0)]
    asked: list[_Line]


class _Head(msgspec.Struct, frozen=True):
    autokern: str = ""
    schema: int = 0


def encode(workload: Workload) -> bytes:
    """Return a workload as JSON text, the same for the same workload."""
    lines: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for p, calls in workload.calls.items():
        sizes = (*(getattr(p, size) for size in SIZES), calls)
        lines.setdefault((p.op, p.dtype, p.device, p.grad, p.variant), []).append(sizes)
    asked = [
        msgspec.json.encode(_Line(op, sorted(sizes), *map(sys.intern, kind)))  # type: ignore[arg-type]
        for (op, *kind), sizes in sorted(lines.items())
    ]
    head = f'{{"autokern":"workload","schema":{SCHEMA},"recordings":{workload.recordings},"asked":[\n'
    return head.encode() + b",\n".join(asked) + b"\n]}\n"


def decode(data: bytes) -> Workload:
    """Return the workload that JSON text holds; an empty text holds none.

    Raises
    ------
    NewerError
        If a newer autokern wrote it.
    ProfileError
        If it is no workload.
    """
    if not data.strip():
        return Workload()
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.autokern == "workload" and head.schema > SCHEMA:
            found = f"a newer autokern wrote it (schema {head.schema}, this one reads {SCHEMA}); upgrade autokern"
            raise NewerError(found)
        if head.autokern != "workload":
            raise ProfileError("it is no file that `autokern record` wrote")
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProfileError(f"it is no workload of schema {SCHEMA}: {error}") from None
    calls = Counter[Problem]()
    for line in file.asked:
        kind = {"op": line.op, "dtype": line.dtype, "device": line.device, "grad": line.grad, "variant": line.variant}
        for *sizes, count in line.sizes:
            problem = Problem(**kind, **dict(zip(SIZES, sizes, strict=True)))  # type: ignore[arg-type]
            if min(problem.m, problem.n, problem.batch) < 1:
                raise ProfileError(f"it names an impossible size: {problem}")
            calls[problem] += count
    return Workload(dict(calls), file.recordings)


def read(path: Path) -> Workload:
    """Return the workload in a file.

    Raises
    ------
    ProfileError
        If the file cannot be read or holds none.
    """
    try:
        with opened(os.open(path, os.O_RDONLY | FLAGS)) as fd:
            return decode(contents(fd, path, private=False))
    except (OSError, ProfileError) as error:
        advice = "Name a file that `autokern record -o FILE script.py` wrote"
        raise ProfileError(f"asked for the workload in {path}; found: {error}. {advice}") from error


def add(path: Path, more: Workload, patience: float = _PATIENCE) -> Workload:
    """Add a workload to that in a file, which is made if it is missing; return their sum.

    Raises
    ------
    ProfileError
        If the file cannot be read or written, or holds something else; it is as before then.
    """
    target = Path(os.path.realpath(path))  # a link stays: its target is replaced
    try:
        with contextlib.closing(Folder(target.parent, private=False)) as folder:
            for _ in range(_TRIES):
                if (found := _added(folder, target.name, more, patience)) is not None:
                    return found
        raise ProfileError(f"it was replaced by other processes {_TRIES} times")
    except (OSError, ProfileError) as error:
        raise ProfileError(f"asked to record in {path}; found: {error}. Name another file") from error


def _added(folder: Folder, name: str, more: Workload, patience: float) -> Workload | None:
    """Add to a file unless another process replaces it meanwhile; then return None."""
    version = folder.version(name)  # if it is the same under the lock, the file that is locked still has the name
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder.locked(name, patience))  # makes the file
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        data = b""
        if folder.version(name) is not None:
            with opened(folder.open(name, os.O_RDONLY)) as fd:
                data = contents(fd, name, private=False)
        if folder.version(name) != version:
            return None
        whole = decode(data).merge(more)
        with folder.temporary(name, encode(whole), mode=0o666) as temporary:
            if folder.version(name) != version:
                return None
            folder.replace(temporary, name)
        folder.sync()
    return whole
