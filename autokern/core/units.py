"""Numbers as text, in characters that the reader's stream can write; results in notebooks and as data frames."""

from __future__ import annotations

import importlib
import sys
from typing import Any

_PLAIN = {ord(one): other for one, other in zip("µ×–→✓•✗é₂⁰¹²³⁴⁵⁶⁷⁸⁹", "ux->+*!e20123456789", strict=True)} | {
    ord("…"): "...",
    ord("\u00a0"): " ",
    ord("≤"): "<=",
}
"""ASCII substitutes of the characters that a stream may be unable to write."""


def duration(seconds: float) -> str:
    """Return seconds as three digits with a unit, such as ``1.23 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds * 1e6)} µs"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def sized(count: int) -> str:
    """Return a number of bytes as text, such as ``1.5 GiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size / 8:
            return f"{count / size:,.0f} {unit}" if count >= 1000 * size else f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def legible(text: str, stream: Any = None) -> str:
    """Return text with substitutes for the characters that a stream cannot write, by default standard output."""
    encoding = getattr(sys.stdout if stream is None else stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    except LookupError:
        pass
    return text


class Shown:
    """A result that a notebook shows as a table; the module that makes it is imported on first use."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(importlib.import_module("autokern.cli.report").html(self))

    def to_frame(self) -> Any:
        """Return a pandas data frame: a row for each candidate of a decision or trial, decision, or part of a model.

        Times are in seconds, memory in bytes. AutokernError if pandas is not installed.
        """
        return importlib.import_module("autokern.cli.report").frame(self)
