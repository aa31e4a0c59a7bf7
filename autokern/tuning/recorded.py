"""Recorded hosts: what other machines measured, shipped with the package as ratios, and read op by op.

`pack` writes the file from profiles, and `read` reads it. The part of each op is compressed by itself: columns of
integers; the ratios of candidates to stock are in hundredths of their logarithm. Beside the trials stands what the cost
model fits to them, so that no program fits it when it starts.
"""

from __future__ import annotations

import functools
import math
import pkgutil
import warnings
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from autokern.core.errors import AutokernWarning
from autokern.core.problem import SIZES, Problem
from autokern.core.registry import get
from autokern.tuning.cost_model import CostModel
from autokern.tuning.profile import Profile, Timing, Trial
from autokern.tuning.residuals import spread

__all__ = ["NOISE", "Fitted", "RecordedHost", "Recording", "hosts", "pack", "read"]

_FILE = "recorded.msgpack"
_WORDS = ("dtype", "variant", "grad")
_UNIT = 0.01
NOISE = 0.03
"""Standard error of each ratio: what rounding and the machine's own noise leave of it."""
_MOST = 120
"""Trials of an op that are shipped: fits take the cube of that."""
_FIELDS = ("system", "cpu", "accelerators", "versions")


_DAMAGES = (msgspec.MsgspecError, zlib.error, UnicodeDecodeError)


class Fitted(msgspec.Struct, frozen=True):
    """What the cost model fits to the trials of one candidate.

    Parameters
    ----------
    coefficients : list of float
        Seconds per call, flop, byte and copied byte.
    amplitude : float
        Standard deviation of what they leave, as a Gaussian process.
    weights : bytes
        The inverse of its covariance times the residuals, a float32 for each of the trials.
    """

    coefficients: list[float]
    amplitude: float
    weights: bytes


class _Pool(msgspec.Struct, frozen=True):
    """The trials of one op on one kind of device: words by number, a column for each size, word and candidate."""

    words: list[str]
    sizes: dict[str, list[int]]
    named: dict[str, list[int]]
    seconds: list[int]
    ratios: dict[str, list[int | None]]
    fits: dict[str, Fitted] = {}


class Recording(NamedTuple):
    """One op on one kind of device.

    Parameters
    ----------
    problems : list of Problem
        The problems that were measured.
    rows : dict
        By candidate, the numbers of those on which it was.
    fits : dict
        By candidate, what the cost model fits to its trials.
    """

    problems: list[Problem]
    rows: dict[str, tuple[int, ...]]
    fits: dict[str, Fitted]


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
        pool = self._pool(op, device)
        return [] if pool is None else _trials(op, device, pool)

    def recording(self, op: str, device: str) -> Recording | None:
        """Return the problems and fits of an op on a kind of device, or None where it was not measured."""
        pool = self._pool(op, device)
        if pool is None:
            return None
        rows = {"stock": tuple(range(len(pool.seconds)))}
        for name, ratios in pool.ratios.items():
            rows[name] = tuple(row for row, ratio in enumerate(ratios) if ratio is not None)
        return Recording(_problems(op, device, pool), rows, pool.fits)

    def _pool(self, op: str, device: str) -> _Pool | None:
        data = self.pools.get(f"{op}@{device}")
        if data is None:
            return None
        try:
            pool = msgspec.msgpack.decode(zlib.decompress(data), type=_Pool)
        except _DAMAGES:
            pool = None
        if pool is None or not _is_whole(pool):
            _warn_of_damage()
            return None
        return pool


def _is_whole(pool: _Pool) -> bool:
    """Whether columns are of one length and fits are of the trials beside them."""
    rows = len(pool.seconds)
    counts = {"stock": rows, **{name: rows - ratios.count(None) for name, ratios in pool.ratios.items()}}
    return (
        set(pool.sizes) == set(SIZES)
        and set(pool.named) == set(_WORDS)
        and all(len(column) == rows for group in (pool.sizes, pool.named, pool.ratios) for column in group.values())
        and all(0 <= number < len(pool.words) for column in pool.named.values() for number in column)
        and (not pool.fits or "stock" in pool.fits)
        and all(
            len(fit.weights) == 4 * counts.get(name, -1) and len(fit.coefficients) == 4
            for name, fit in pool.fits.items()
        )
    )


@functools.cache
def hosts() -> tuple[RecordedHost, ...]:
    """Return the hosts that the package ships; none where its file was left behind, as by a bundler."""
    try:
        data = pkgutil.get_data("autokern.tuning", _FILE)
    except OSError:
        return ()
    try:
        return () if data is None else read(data)
    except _DAMAGES:
        _warn_of_damage()
        return ()


@functools.cache
def _warn_of_damage() -> None:
    message = f"{_FILE}, which tells what other machines measured, is damaged and left aside; install autokern again"
    warnings.warn(message, AutokernWarning, stacklevel=2)


def read(data: bytes) -> tuple[RecordedHost, ...]:
    """Return the hosts of a file."""
    return tuple(msgspec.msgpack.decode(data, type=list[RecordedHost]))


def pack(profiles: Sequence[Profile]) -> bytes:
    """Return the file of some profiles, without candidates of lower precision."""
    found = []
    for profile in profiles:
        groups: dict[str, list[Trial]] = {}
        for trial in profile.trials:
            if "stock" in trial.usual and len(trial.usual) > 1:
                groups.setdefault(f"{trial.problem.op}@{trial.problem.device}", []).append(trial)
        pools = {key: _packed(key, _thinned(trials)) for key, trials in sorted(groups.items())}
        fields = {key: profile.host[key] for key in _FIELDS if key in profile.host}
        found.append(RecordedHost(fields, pools))
    return msgspec.msgpack.encode(found)


def _thinned(trials: list[Trial]) -> list[Trial]:
    """Return the trials of a pool, or of very many those that lie farthest apart: reading all would take too long."""
    if len(trials) <= _MOST:
        return trials
    return [trials[row] for row in spread(get(trials[0].problem.op), [t.problem for t in trials], _MOST)]


def _packed(key: str, trials: Sequence[Trial]) -> bytes:
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
    return zlib.compress(msgspec.msgpack.encode(msgspec.structs.replace(pool, fits=_fits(key, pool))), 9)


def _fits(key: str, pool: _Pool) -> dict[str, Fitted]:
    """Return what the cost model fits to the trials of a pool, of those candidates that there are."""
    name, _, device = key.partition("@")
    op, model, fits = get(name), CostModel(Profile(trials=_trials(name, device, pool))), {}
    for candidate in op.candidates:
        found = model.fitted(op, candidate, device)
        if found is not None:
            coefficients, fit = found
            *rounded, amplitude = (float(f"{value:.7g}") for value in (*coefficients, fit.amplitudes[0]))
            fits[candidate.name] = Fitted(rounded, amplitude, fit.weights.astype("<f4").tobytes())
    return fits


def _problems(op: str, device: str, pool: _Pool) -> list[Problem]:
    named = {word: [pool.words[number] for number in numbers] for word, numbers in pool.named.items()}
    columns: dict[str, list[Any]] = {**pool.sizes, **named}
    return [
        Problem(op=op, device=device, **dict(zip(columns, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    ]


def _trials(op: str, device: str, pool: _Pool) -> list[Trial]:
    found = []
    for row, problem in enumerate(_problems(op, device, pool)):
        seconds = math.exp(_UNIT * pool.seconds[row])
        timings = {"stock": Timing(seconds)}
        for name, ratios in pool.ratios.items():
            value = ratios[row]
            if value is not None:
                ratio = math.exp(_UNIT * value)
                timings[name] = Timing(seconds * ratio, ratio, NOISE)
        found.append(Trial(problem, timings))
    return found
