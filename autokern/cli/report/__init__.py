"""Reports: facts of a program, a profile or a benchmark as one HTML file that needs nothing beside it.

`page` states what a page consists of; `program`, `measurements` and `benchmark` fill it, `machine` the part that they
share; `render.py` makes the HTML and the plots, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from autokern.cli.report.page import Page
from autokern.core import shown
from autokern.core.errors import AutokernError, ProfileError
from autokern.system.files import write_whole

__all__ = ["Page", "check", "write"]

_NEEDED = ("matplotlib", "jinja2")
_RENDER = str(Path(__file__).with_name("render.py"))


def check(file: Path, option: str) -> None:
    """Check that a page can be made and written.

    Raises AutokernError where that is not so.
    """
    shown.require(_NEEDED, option)
    try:
        write_whole(file, None)
    except (OSError, ProfileError) as error:
        raise _unwritten(file, error) from None


def write(file: Path, page: Page) -> None:
    """Write a page to a file, all or nothing.

    Raises AutokernError where that fails.
    """
    # A process of its own: plots must not depend on what the program has set in matplotlib, nor on what Python allows
    # when it ends. Files in place of pipes, because reading from two pipes takes threads on Windows.
    with tempfile.TemporaryFile() as facts, tempfile.TemporaryFile() as made, tempfile.TemporaryFile() as told:
        facts.write(msgspec.json.encode(page))
        facts.seek(0)
        environment = {**os.environ, "AUTOKERN": "0"}
        status = subprocess.call(
            [sys.executable, _RENDER],
            stdin=facts,
            stdout=made,
            stderr=told,
            env=environment,
            start_new_session=True,  # an interrupt from the keyboard is the caller's alone, who ends the process
        )
        for stream in (made, told):
            stream.seek(0)
        if status:
            last = told.read().decode(errors="replace").strip().splitlines()[-1:]
            raise AutokernError(f"asked to write {file}; found: the page cannot be made ({' '.join(last)})")
        text = made.read()
    try:
        write_whole(file, text)
    except (OSError, ProfileError) as error:
        raise _unwritten(file, error) from None


def _unwritten(file: Path, error: Exception) -> AutokernError:
    found = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return AutokernError(f"asked to write {file}; found: {found}. Name another file")
