"""Recorded hosts: what other machines measured, shipped with the package as trees, and as trials of two digits.

`calibration/ship.py` writes the file by `pack`. A program reads the trees when it first decides; the trials, whose
columns are compressed op by op, only where seconds of a problem are asked for.
"""

from __future__ import annotations

import functools
import math
import pkgutil
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from autokern.core.errors import AutokernWarning
from autokern.core.problem import SIZES, Problem
from autokern.core.registry import get
from autokern.tuning.forest import Forest
from autokern.tuning.profile import Profile, Timing, Trial

__all__ = ["RecordedHost", "Shipped", "forests", "hosts", "pack", "shipped"]

_FILE = "recorded.msgpack"
_WORDS = ("dtype", "variant", "grad")
_UNIT = 0.01
_MOST = 120
"""Trials of an op that are shipped of a host."""
_FIELDS = ("system", "cpu", "accelerators", "versions")
_DAMAGES = (msgspec.MsgspecError, zlib.error, UnicodeDecodeError)


class _Pool(msgspec.Struct, frozen=True):
    """The trials of one op on one kind of device: words by number, a column for each size, word and candidate."""

    words: list[str]
    sizes: dict[str, list[int]]
    named: dict[str, list[int]]
    seconds: list[int]
    ratios: dict[str, list[int | None]]

    @property
    def is_whole(self) -> bool:
        """Whether columns are of one length."""
        columns: list[Sequence[object]] = [*self.sizes.values(), *self.named.values(), *self.ratios.values()]
        named = set(self.sizes) == set(SIZES) and set(self.named) == set(_WORDS)
        there = all(0 <= number < len(self.words) for column in self.named.values() for number in column)
        return named and there and all(len(column) == len(self.seconds) for column in columns)


class RecordedHost(msgspec.Struct, frozen=True):
    """A host that was measured, as the package ships it.

    Parameters
    ----------
    fields : dict
        Its description, as `Host.fields` gives it.
    pools : dict
        The trials by ``"op@device"``, compressed; they are read when they are needed.
    """

    fields: dict[str, Any]
    pools: dict[str, bytes]

    def trials(self, op: str, device: str) -> list[Trial]:
        """Return the trials of an op on a kind of device."""
        data = self.pools.get(f"{op}@{device}")
        if data is None:
            return []
        try:
            pool = msgspec.msgpack.decode(zlib.decompress(data), type=_Pool)
        except _DAMAGES:
            pool = None
        if pool is None or not pool.is_whole:
            _warn_of_damage()
            return []
        return _trials(op, device, pool)


class Shipped(msgspec.Struct, frozen=True):
    """The file: trees by ``"op@device"``, and the hosts that they were fitted to."""

    forests: dict[str, Forest]
    hosts: list[RecordedHost]


@functools.cache
def shipped() -> Shipped:
    """Return what the package ships; nothing where its file was left behind, as by a bundler."""
    try:
        data = pkgutil.get_data("autokern.tuning", _FILE)
        found = Shipped({}, []) if data is None else msgspec.msgpack.decode(data, type=Shipped)
    except OSError:
        return Shipped({}, [])
    except _DAMAGES:
        found = None
    if found is None or not all(forest.is_whole for forest in found.forests.values()):
        _warn_of_damage()
        return Shipped({}, [])
    return found


def forests() -> Mapping[str, Forest]:
    """Return the trees of other hosts by ``"op@device"``."""
    return shipped().forests


def hosts() -> Sequence[RecordedHost]:
    """Return the hosts that the package ships."""
    return shipped().hosts


@functools.cache
def _warn_of_damage() -> None:
    message = f"{_FILE}, which tells what other machines measured, is damaged and left aside; install autokern again"
    warnings.warn(message, AutokernWarning, stacklevel=2)


def pack(profiles: Sequence[Profile]) -> bytes:
    """Return the file of some profiles, without candidates of lower precision."""
    from autokern.tuning.fitting import fit_base

    every: dict[str, list[list[Trial]]] = {}
    found = []
    for profile in profiles:
        groups: dict[str, list[Trial]] = {}
        for trial in profile.trials:
            if "stock" in trial.usual and len(trial.usual) > 1:
                groups.setdefault(f"{trial.problem.op}@{trial.problem.device}", []).append(trial)
        for key, trials in groups.items():
            every.setdefault(key, []).append(trials)
        pools = {key: _packed(trials[:: math.ceil(len(trials) / _MOST)]) for key, trials in sorted(groups.items())}
        found.append(RecordedHost({key: profile.host[key] for key in _FIELDS if key in profile.host}, pools))
    fits = {key: fit_base(get(key.partition("@")[0]), trials) for key, trials in sorted(every.items())}
    return msgspec.msgpack.encode(Shipped({key: fit for key, fit in fits.items() if fit is not None}, found))


def _packed(trials: Sequence[Trial]) -> bytes:
    problems, timings = [t.problem for t in trials], [t.usual for t in trials]
    words = sorted({getattr(p, word) for p in problems for word in _WORDS})
    pool = _Pool(
        words=words,
        sizes={size: [getattr(p, size) for p in problems] for size in SIZES},
        named={word: [words.index(getattr(p, word)) for p in problems] for word in _WORDS},
        seconds=[round(math.log(t["stock"].seconds) / _UNIT) for t in timings],
        ratios={
            name: [round(math.log(t[name].ratio) / _UNIT) if name in t else None for t in timings]
            for name in sorted({name for t in timings for name in t} - {"stock"})
        },
    )
    return zlib.compress(msgspec.msgpack.encode(pool), 9)


def _trials(op: str, device: str, pool: _Pool) -> list[Trial]:
    named = {word: [pool.words[number] for number in numbers] for word, numbers in pool.named.items()}
    columns: dict[str, list[Any]] = {**pool.sizes, **named}
    found = []
    for row, values in enumerate(zip(*columns.values(), strict=True)):
        seconds = math.exp(_UNIT * pool.seconds[row])
        timings = {"stock": Timing(seconds)}
        for name, ratios in pool.ratios.items():
            if (value := ratios[row]) is not None:
                timings[name] = Timing(seconds * math.exp(_UNIT * value), math.exp(_UNIT * value))
        found.append(Trial(Problem(op=op, device=device, **dict(zip(columns, values, strict=True))), timings))
    return found
