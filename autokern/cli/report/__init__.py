"""Reports: what a program or a profile tells, as one HTML file that needs nothing beside it.

`facts` makes the content of a page, `render.py` the HTML and the plots, in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from autokern.cli.notebook import missing
from autokern.cli.report.facts import of_profile, of_program
from autokern.core.errors import AutokernError, ProfileError
from autokern.system.files import write_whole

__all__ = ["check", "of_profile", "of_program", "put", "write"]

_RENDER = str(Path(__file__).with_name("render.py"))


def check(file: Path, option: str) -> None:
    """Raise AutokernError where a page cannot be made or written."""
    for name in ("matplotlib", "jinja2"):
        if importlib.util.find_spec(name) is None:
            raise missing(name, option)
    put(file, None)


def put(file: Path, content: bytes | None) -> None:
    """Write a file that the user named, all or nothing; without content, only try whether that would work."""
    try:
        write_whole(file, content)
    except (OSError, ProfileError) as error:
        found = getattr(error, "strerror", None) or error
        raise AutokernError(f"asked to write {file}; found: {found}. Name another file") from None


def write(file: Path, page: dict[str, Any]) -> None:
    """Write a page to a file, all or nothing."""
    # A process of its own: plots must not depend on what the program has set in matplotlib, nor on what Python allows
    # when it ends. Files in place of pipes, because reading from two pipes takes threads on Windows.
    with tempfile.TemporaryFile() as facts, tempfile.TemporaryFile() as made, tempfile.TemporaryFile() as told:
        facts.write(msgspec.json.encode(page))
        facts.seek(0)
        status = subprocess.call(
            [sys.executable, _RENDER], stdin=facts, stdout=made, stderr=told, env={**os.environ, "AUTOKERN": "0"},
            start_new_session=True,  # an interrupt from the keyboard is the caller's alone, who ends the process
        )  # fmt: skip
        made.seek(0), told.seek(0)
        if status:
            last = told.read().decode(errors="replace").strip().splitlines()[-1:]
            raise AutokernError(f"asked to write {file}; found: the page cannot be made ({' '.join(last)})")
        put(file, made.read())
