"""Plugins: candidates that installed packages add, autokern's own optional backends among them, by entry points.

An entry point of the group `autokern.candidates` names a module, or a callable without arguments; importing the one or
calling the other registers candidates on ops. One that fails is taken back whole, and told of once: it never keeps
autokern from working. May import `op` and the floor below.
"""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import ModuleType

from autokern.core.errors import AutokernError, AutokernWarning
from autokern.core.op import registering

__all__ = ["GROUP", "Plugin", "announce", "load", "loaded"]

GROUP = "autokern.candidates"


@dataclass
class Plugin:
    """What came of an entry point.

    Parameters
    ----------
    source : str
        Name of the entry point, and of its distribution if that is another: what `Candidate.source` says.
    names : str
        The module or callable that it names.
    state : {"waiting", "loaded", "failed"}
        A plugin waits where it is being imported itself, and autokern with it.
    failure : str
        Why it could not be loaded.
    """

    source: str
    names: str
    state: str = "waiting"
    failure: str = ""


_plugins: list[tuple[Plugin, EntryPoint]] | None = None
_announced: set[str] = set()


def loaded() -> list[Plugin]:
    """Return all plugins that were found, autokern's own first."""
    return [plugin for plugin, _ in _plugins or ()]


def load() -> None:
    """Load the plugins that are installed, each of them once; what it raises is kept for `announce`."""
    global _plugins
    if _plugins is None:
        try:
            _plugins = sorted(_found(), key=lambda pair: (":" in pair[0].source, pair[0].source))
        except Exception as error:
            _plugins = [(Plugin("installed packages", GROUP, "failed", _told(error)), EntryPoint("", "", GROUP))]
    for plugin, point in _plugins:
        if plugin.state == "waiting":
            try:
                _load(plugin, point)
            except (Exception, SystemExit) as error:
                plugin.state, plugin.failure = "failed", _told(error)


def announce(strict: bool) -> None:
    """Warn of each plugin that failed, once in a process.

    Parameters
    ----------
    strict : bool
        Raise instead.

    Raises
    ------
    AutokernError
        If a plugin failed, and `strict` says so.
    """
    for plugin in loaded():
        if plugin.state != "failed" or (plugin.source in _announced and not strict):
            continue
        _announced.add(plugin.source)
        told = (
            f"candidates of {plugin.source} ({plugin.names}) were to be loaded; found: {plugin.failure}. Update or "
            "remove the package; all other candidates work"
        )
        if strict:
            raise AutokernError(told)
        warnings.warn(told, AutokernWarning, stacklevel=2)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _found() -> Iterator[tuple[Plugin, EntryPoint]]:
    for point in importlib.metadata.entry_points(group=GROUP):
        package = "" if point.dist is None else point.dist.name
        yield Plugin(point.name if package == "autokern" else f"{package}:{point.name}", point.value), point


def _load(plugin: Plugin, point: EntryPoint) -> None:
    if _is_being_imported(point.module):
        return
    with registering(plugin.source):
        target = point.load()
        if not isinstance(target, ModuleType):
            if not callable(target):
                raise AutokernError(f"{point.value} is neither a module nor a function")
            target()
    plugin.state = "loaded"


def _is_being_imported(name: str) -> bool:
    """Whether somebody's import of a module, or of a package that it lies in, is under way, and led here."""
    parts = name.split(".")
    above = (sys.modules.get(".".join(parts[:count])) for count in range(1, len(parts) + 1) if parts[0] != "autokern")
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in above)


def _reset() -> None:
    """Forget what was found and told (for tests); candidates stay."""
    global _plugins
    _plugins = None
    _announced.clear()
