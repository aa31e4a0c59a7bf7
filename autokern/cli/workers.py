"""Workers: processes that a program under `autokern run` starts with Python are served too.

That holds for `subprocess`, for `multiprocessing` by any method, for loky and what is built on it. Python reads
``PYTHONPATH`` there, unless it is started with ``-I`` or ``-E``.
"""

from __future__ import annotations

import os
from pathlib import Path

from autokern.core.settings import from_environment

__all__ = ["inherit"]

_FOLDER = str(Path(__file__).parent / "inherited")


def inherit() -> None:
    """Let the processes that this one starts enable autokern, unless ``AUTOKERN_WORKERS=0``."""
    given = os.environ.get("PYTHONPATH", "")
    if from_environment().workers and _FOLDER not in given.split(os.pathsep):
        os.environ["PYTHONPATH"] = (
            f"{_FOLDER}{os.pathsep}{given}" if given else _FOLDER
        )  # an empty entry is a folder too
