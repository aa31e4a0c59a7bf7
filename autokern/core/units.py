"""Units: numbers as text."""

from __future__ import annotations

__all__ = ["sized"]


def sized(count: int) -> str:
    """Return a number of bytes as text.

    Examples
    --------
    >>> sized(3 * 2**29), sized(2**20)
    ('1.5 GiB', '1 MiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size / 8:
            return f"{count / size:,.0f} {unit}" if count >= 1000 * size else f"{count / size:.3g} {unit}"
    return f"{count} bytes"
