"""Plugins: candidates that installed packages add, autokern's own optional backends among them, by entry points.

An entry point of the group `autokern.candidates` names a module, or a callable without arguments; importing the one or
calling the other registers candidates on ops. The registrations of one that fails are undone, with one warning; all
else works.
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
from autokern.core.locks import Lock
from autokern.core.recovery import interrupted
from autokern.core.registry import registering

__all__ = ["GROUP", "Plugin", "announce", "load", "loaded"]

GROUP = "autokern.candidates"


@dataclass
class Plugin:
    """What came of an entry point."""

    source: str  # name of the entry point, and of its distribution if that is another: `Candidate.source`
    names: str  # the module or callable
    state: str = "waiting"  # or "loaded", "failed"; it waits where it is being imported itself, and autokern with it
    failure: str = ""  # why it could not be loaded


_plugins: list[tuple[Plugin, EntryPoint]] | None = None
_announced: set[str] = set()
_lock = Lock()
_loading = False


def loaded() -> list[Plugin]:
    """Load the plugins that are not loaded yet, and return all, autokern's own first."""
    load()
    return [plugin for plugin, _ in _plugins or ()]


def load(own: bool = True) -> None:
    """Load the plugins that are installed, each of them once; what it raises is kept for `announce`.

    Autokern's own add candidates only, so they wait until candidates are compared; others may add families of
    covariances and hooks.
    """
    global _plugins, _loading
    if _plugins is not None and not any(plugin.state == "waiting" for plugin, _ in _plugins):
        return
    with _lock.here():
        if _loading:  # a plugin asks for candidates while it is loaded
            return
        _loading = True
        try:
            if _plugins is None:
                _plugins = _sorted()
            for plugin, point in _plugins:
                if plugin.state == "waiting" and (own or ":" in plugin.source):
                    try:
                        _load(plugin, point)
                    except (Exception, SystemExit) as error:
                        if interrupted(error):
                            raise
                        plugin.state, plugin.failure = "failed", _told(error)
        finally:
            _loading = False


def _sorted() -> list[tuple[Plugin, EntryPoint]]:
    try:
        return sorted(_found(), key=lambda pair: (":" in pair[0].source, pair[0].source))
    except Exception as error:
        if interrupted(error):
            raise
        return [(Plugin("installed packages", GROUP, "failed", _told(error)), EntryPoint("", "", GROUP))]


def announce(strict: bool) -> None:
    """Warn of each plugin that has failed to load, once in a process; `strict` raises AutokernError instead."""
    for plugin, _ in _plugins or ():
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
        own = point.value.startswith("autokern.backends.")  # the name of a distribution takes a millisecond to read
        package = "" if own or point.dist is None else f"{point.dist.name}:"
        yield Plugin(f"{package}{point.name}", point.value), point


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
