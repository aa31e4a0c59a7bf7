"""Parsers of settings: from the text of a variable to a value; each raises ValueError with the expected form."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[a-z0-9][a-z0-9_.@\-]*")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

Pairs = tuple[tuple[str, str], ...]


def parse_bytes(text: str) -> int:
    """Return the number of bytes of a text such as ``8GiB``, ``512 MB`` or ``1048576``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError("expected a size such as 8GiB, 512MB or 1048576")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if not 1 <= size < math.inf:
        raise ValueError("the size must be positive and finite")
    return int(size)


def flag(text: str) -> bool:
    """Return the truth value of 0 or 1, false or true, off or on, no or yes."""
    values = dict.fromkeys(("1", "true", "on", "yes"), True) | dict.fromkeys(("0", "false", "off", "no"), False)
    if text.lower() not in values:
        raise ValueError("expected 0 or 1")
    return values[text.lower()]


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a parser that accepts one of these words, in upper or lower case."""

    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"expected {' or '.join(choices)}")
        return text.lower()

    return parse


def path(text: str) -> Path:
    """Return a path, the home folder expanded."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _number(kind: type, is_valid: Callable[[Any], bool], expected: str, *words: str) -> Callable[[str], Any]:
    """Return a parser that accepts a valid number or one of these words."""

    def parse(text: str) -> Any:
        if text.lower() in words:
            return text.lower()
        try:
            found = kind(text)
        except ValueError:
            found = math.nan
        if not is_valid(found):
            raise ValueError(f"expected {expected}")
        return found

    return parse


seconds = _number(float, lambda value: 0 <= value < math.inf, "a number of seconds, 0 or more")
relative_error = _number(float, lambda value: 0 < value < 1, "a relative error between 0 and 1, such as 1e-3")
count = _number(int, lambda value: value >= 0, "a number of calls, 0 or more")
threads = _number(int, lambda value: value >= 1, "auto, off or a number of threads, 1 or more", "auto", "off")
ranks = _number(
    float, lambda value: 0 < value < math.inf, "auto, on, off or a number of seconds above 0", "auto", "on", "off"
)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text.strip()):
        raise ValueError(f"{text!r} is no name of an op or candidate")
    return text.strip()


def force(text: str) -> Pairs | int:
    """Return pairs of op and candidate, or the seed of ``random:SEED``."""
    if text.startswith("random:"):
        seed = text.removeprefix("random:")
        if not re.fullmatch(r"\d+", seed):
            raise ValueError("expected random:SEED with a whole number")
        return int(seed)
    pairs = []
    for item in text.split(","):
        op, equals, candidate = item.partition("=")
        if not equals:
            raise ValueError(f"expected op=candidate, found {item!r}")
        pairs.append((_name(op), _name(candidate)))
    if len({op for op, _ in pairs}) < len(pairs):
        raise ValueError("an op is named twice")
    return tuple(sorted(pairs))


def exclude(text: str) -> frozenset[str]:
    """Return names of candidates, alone or as ``op=name``."""
    names = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        op, equals, candidate = item.partition("=")
        names.add(f"{_name(op)}={_name(candidate)}" if equals else _name(op))
    return frozenset(names)


def threshold(text: str) -> tuple[tuple[str, str, int], ...]:
    """Return triples of op, device and size."""
    found = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*([a-z0-9_]+):([a-z0-9]+)=(\d+)\s*", item)
        if not match:
            raise ValueError(f"expected op:device=size, found {item!r}")
        found.append((match[1], match[2], int(match[3])))
    return tuple(found)
