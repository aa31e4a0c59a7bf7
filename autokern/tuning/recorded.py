"""Recorded: the shipped measurements of other machines, packed by `calibration/ship.py`: trees and rounded trials."""

from __future__ import annotations

import functools
import math
import pkgutil
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from autokern.core.errors import AutokernWarning
from autokern.core.problem import Problem
from autokern.core.recovery import uninterrupted
from autokern.tuning.forest import Forest
from autokern.tuning.profile import Timing, Trial

UNIT = 0.01  # log units of the integers that store stock's seconds, and the ratios of other candidates to them
_FILE = "recorded.msgpack"
_DAMAGES = (msgspec.MsgspecError, zlib.error, UnicodeDecodeError, KeyError)


class Shipped(msgspec.Struct, frozen=True):
    """Content of the file: trees and compressed trials by ``"op@device"``, and descriptions of the measured hosts."""

    forests: dict[str, Forest] = {}
    trials: dict[str, bytes] = {}
    hosts: list[dict[str, Any]] = []


@functools.cache
def shipped() -> Shipped:
    """Return the content of the shipped file; empty if the file is missing (a bundler may drop it) or damaged."""
    try:
        data = pkgutil.get_data("autokern.tuning", _FILE)
        found = Shipped() if data is None else msgspec.msgpack.decode(data, type=Shipped)
        if all(forest.is_whole for forest in found.forests.values()):
            return found
        _warn_of_damage()
    except uninterrupted(OSError):
        pass
    except uninterrupted(*_DAMAGES):
        _warn_of_damage()
    return Shipped()


def trials(key: str) -> Sequence[Trial]:
    """Return other hosts' trials of an ``"op@device"``."""
    data = shipped().trials.get(key)
    return () if data is None else unpacked(data)


@functools.cache
def unpacked(data: bytes) -> Sequence[Trial]:
    """Return the trials in compressed data; empty if these are damaged."""

    def trial(problem: Problem, logs: dict[str, int]) -> Trial:
        seconds = math.exp(UNIT * logs.pop("stock"))
        ratios = {"stock": 1.0} | {name: math.exp(UNIT * log) for name, log in logs.items()}
        return Trial(problem, {name: Timing(seconds * ratio, ratio) for name, ratio in ratios.items()})

    try:
        rows = msgspec.msgpack.decode(zlib.decompress(data), type=list[tuple[Problem, dict[str, int]]])
        return [trial(*row) for row in rows]
    except uninterrupted(*_DAMAGES):
        _warn_of_damage()
        return ()


@functools.cache
def _warn_of_damage() -> None:
    message = f"{_FILE}, which tells what other machines measured, is damaged and left aside; install autokern again"
    warnings.warn(message, AutokernWarning, stacklevel=2)
