"""Registry: all ops by name, and the plugins that add to them.

An op's module is imported when it is first asked for. Plugins are entry points of the group `autokern.candidates`:
modules or callables that register candidates on ops. If one fails, its registrations are undone, with one warning.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import TYPE_CHECKING

from autokern.core.errors import AutokernError, AutokernWarning, SettingsError, interrupted, nearest
from autokern.core.state import Lock

if TYPE_CHECKING:
    from autokern.core.op import Op

GROUP = "autokern.candidates"
_OWN = {"cuda_graphs": ("exact_log_prob",), "keops": ("kernel_matmul",)}  # the ops to which own plugins add

_ops: dict[str, Op] = {}
_homes: dict[str, str] = {}
_complete: set[str] = set()  # ops whose modules have been imported to the end
_plugins: list[Plugin] | None = None
_announced: set[str] = set()
_lock = Lock()
_loading = False


def declare(name: str, module: str) -> None:
    """Declare the module whose import creates an op."""
    _homes[name] = module


def add(op: Op) -> None:
    """Register an op; AutokernError if its name is taken, unless by an import that was interrupted."""
    if op.name in _ops and (op.name in _complete or op.name not in _homes):
        raise AutokernError(f"op {op.name!r} is registered twice; choose another name")
    _ops[op.name] = op


def known(name: str) -> bool:
    """Whether an op of this name exists."""
    return name in _ops or name in _homes or name in {op.name for op in registered()}


def get(name: str) -> Op:
    """Return the op of a name; SettingsError if it does not exist."""
    if name in _homes:
        _import(name)
    elif not known(name):
        raise SettingsError(f"unknown op {name!r}; autokern knows {', '.join(sorted(_ops))}{nearest(name, _ops)}")
    return _ops[name]


def registered() -> list[Op]:
    """Return all ops, in the order of their names."""
    load()
    return sorted(present(), key=lambda op: op.name)


def present() -> list[Op]:
    """Return all ops, except ops of plugins that are not loaded yet."""
    for name in _homes:
        _import(name)
    return list(_ops.values())


def _import(name: str) -> None:
    """Import the module of an op once; a concurrent thread waits for the end of the import."""
    if name not in _complete:
        importlib.import_module(_homes[name])
        _complete.add(name)


@dataclass
class Plugin:
    """An entry point and its state."""

    source: str  # ``distribution:name``, or the name alone for autokern's plugins: `Candidate.source`
    point: EntryPoint
    state: str = "waiting"  # or "loaded", "failed"; "waiting" also while the plugin's import imports autokern
    failure: str = ""  # why it could not be loaded

    def adds_to(self, op: str | None) -> bool:
        """Whether the plugin is not loaded yet and may add candidates to an op (None: to any op)."""
        return self.state == "waiting" and (op is None or op in _OWN.get(self.source, (op,)))

    @contextlib.contextmanager
    def fails_alone(self) -> Iterator[None]:
        """Record an exception of the block as the plugin's failure, unless a signal handler raised it."""
        try:
            yield
        except (Exception, SystemExit) as error:
            if interrupted(error):
                raise
            self.state, self.failure = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"


def plugins() -> list[Plugin]:
    """Load all plugins, and return them, autokern's own first."""
    load()
    return _plugins or []


def load(op: str | None = None) -> None:
    """Load the plugins that may add candidates to an op (None: to any op), each once; `announce` reports failures."""
    global _plugins, _loading
    if _plugins is not None and not any(plugin.adds_to(op) for plugin in _plugins):
        return
    with _lock.here():
        if _loading:  # a plugin asks for candidates while it is loaded
            return
        _loading = True
        try:
            if _plugins is None:
                _plugins = _installed()
            for plugin in _plugins:
                if plugin.adds_to(op):
                    with plugin.fails_alone():
                        _load(plugin)
        finally:
            _loading = False


def _installed() -> list[Plugin]:
    """Return the installed plugins, autokern's own first."""
    found, all_of_them = [], Plugin("installed packages", EntryPoint("", GROUP, GROUP))
    with all_of_them.fails_alone():
        for point in importlib.metadata.entry_points(group=GROUP):
            own = point.value.startswith("autokern.backends.")  # the name of a distribution takes a millisecond to read
            if own and point.name not in _OWN:  # of an older checkout, whose metadata an editable install keeps
                continue
            package = "" if own or point.dist is None else f"{point.dist.name}:"
            found.append(Plugin(f"{package}{point.name}", point))
    return [all_of_them] if all_of_them.failure else sorted(found, key=lambda one: (":" in one.source, one.source))


def _load(plugin: Plugin) -> None:
    """Load a plugin and set the source of its candidates; after an exception the registry is as before."""
    if _is_being_imported(plugin.point.module):
        return
    for name in _OWN.get(plugin.source, _homes):
        _import(name)
    ops = _ops.copy()
    before = {name: list(op.listed) for name, op in ops.items()}
    try:
        target = plugin.point.load()
        if not isinstance(target, ModuleType):
            if not callable(target):
                raise AutokernError(f"{plugin.point.value} is neither a module nor a function")
            target()
    except BaseException:
        _ops.clear()
        _ops.update(ops)
        for name, op in ops.items():
            op.listed[:] = before[name]
        raise
    for name, op in _ops.items():
        there = {id(candidate) for candidate in before.get(name, ())}
        op.listed[:] = [c if id(c) in there else c.of_plugin(plugin.source) for c in op.listed]
    plugin.state = "loaded"


def _is_being_imported(name: str) -> bool:
    """Whether a module outside of autokern, or one of its parent packages, is being imported at present."""
    parts = name.split(".")
    above = (sys.modules.get(".".join(parts[:count])) for count in range(1, len(parts) + 1) if parts[0] != "autokern")
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in above)


def announce(strict: bool) -> None:
    """Warn of each plugin that has failed to load, once in a process; `strict` raises AutokernError instead."""
    for plugin in _plugins or ():
        if plugin.state != "failed" or (plugin.source in _announced and not strict):
            continue
        _announced.add(plugin.source)
        told = f"candidates of {plugin.source} ({plugin.point.value}) were to be loaded; found: {plugin.failure}. "
        told += "Update or remove the package; all other candidates work"
        if strict:
            raise AutokernError(told)
        warnings.warn(told, AutokernWarning, stacklevel=2)
