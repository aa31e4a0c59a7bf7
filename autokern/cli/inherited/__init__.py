"""Inherited: autokern in Python processes that are not started by `autokern run`.

The child processes of a served program run the ``sitecustomize`` of this folder, which stands in front of
``PYTHONPATH``; all programs of an environment run one file in ``site-packages`` (`autokern everywhere`).
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from autokern.core.errors import SettingsError
from autokern.system.files import write_whole

INHERITED = str(Path(__file__).parent)  # the folder of the ``sitecustomize``
_LINE = (
    "import sys; sys.path.insert(0, {folder!r}); exec('try: import autokern_watch\\nexcept Exception: pass'); "
    "sys.path.remove({folder!r})\n"
)
"""The line that Python executes when it starts; once autokern is uninstalled, it does nothing."""


def file() -> Path:
    """Return the file of this environment, which need not exist."""
    return Path(sysconfig.get_path("purelib")) / "autokern_everywhere.pth"


def state() -> str:
    """Return ``on``, ``off``, or ``stale`` for the file of an autokern that lies elsewhere."""
    path = file()
    if not path.exists():
        return "off"
    return "on" if path.read_text(encoding="utf-8") == _LINE.format(folder=INHERITED) else "stale"


def switch(on: bool, outside: bool = False) -> None:
    """Write or remove the file; SettingsError outside of a virtual environment, unless `outside`."""
    if sys.prefix == sys.base_prefix and not outside:
        found = f"{sys.prefix} is no virtual environment"
        raise SettingsError(f"{found}: the file affects all its programs; --yes allows that")
    if on:
        write_whole(file(), _LINE.format(folder=INHERITED).encode())
        return
    try:
        file().unlink(missing_ok=True)
    except OSError as error:
        raise SettingsError(f"asked to remove {file()}; found: {error.strerror}") from None


def with_inherited() -> str:
    """Return ``PYTHONPATH`` with the folder of the ``sitecustomize`` in front; ``python -I`` and ``-E`` ignore it."""
    given = os.environ.get("PYTHONPATH", "")
    if INHERITED in given.split(os.pathsep):
        return given
    return f"{INHERITED}{os.pathsep}{given}" if given else INHERITED  # empty entries count
