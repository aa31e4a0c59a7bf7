"""The start of a program: a pause of the garbage collector.

torch, gpytorch and BoTorch make some 400,000 objects that live as long as the process. Python's collector walks through
them four times while they are made, a quarter of a second in all. This module is imported before them.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_BORN = 1000
"""Frozen objects of an interpreter that nobody has told to freeze: 375 in Python 3.12; whoever freezes has 4,000."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import the libraries inside the block, without collections; what is alive then counts as old.

    Nothing is kept from the collector: to freeze all objects and to unfreeze them moves them to the oldest generation.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() < _BORN:  # else they are the program's
            gc.freeze()
            gc.unfreeze()
        gc.enable()
