"""Programs that tests start: Python in a process of its own, and what it says."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import autokern

QUIET = ("-W", "ignore")
PATH = [str(Path(__file__).parents[1]), *sys.path]
"""Where a child imports from as this process does; first the tests, for `support` is a script of calibration, too."""
BARE = f"""
import sys, types
sys.path[:0] = {PATH!r}
sys.modules["autokern"] = types.ModuleType("autokern")
sys.modules["autokern"].__path__ = [{str(Path(autokern.__file__).parent)!r}]
"""
"""Lets single modules be imported from a package without its contents, for those bring torch and gpytorch along."""


def python(*words: object, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python by these words; variables in capitals stand beside those of this process."""
    variables = {name: options.pop(name) for name in list(options) if name.isupper()}
    options = {"env": {**os.environ, **variables}, "timeout": 280, "capture_output": True, "text": True, **options}
    return subprocess.run([sys.executable, *map(str, words)], check=check, **options)


def said(code: str, *words: object, **options: Any) -> list[str]:
    """Run code that must succeed, without warnings; return the words that it prints."""
    return python(*QUIET, "-c", textwrap.dedent(code), *words, check=True, **options).stdout.split()
