"""Registry: all ops by name, and the plugins that add to them.

The module of an op is imported when the op is first asked for. Plugins are entry points of the group
`autokern.candidates`, those of autokern's own optional backends among them. Each names a module, or a callable without
arguments; importing the one or calling the other registers candidates on ops. The registrations of one that fails are
undone, with one warning; all else works.
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

from autokern.core.errors import AutokernError, AutokernWarning, SettingsError
from autokern.core.locks import Lock
from autokern.core.recovery import interrupted

if TYPE_CHECKING:
    from autokern.core.op import Op

GROUP = "autokern.candidates"
_OWN = {
    "cuda_graphs": ("exact_log_prob",),
    "cupy": ("cholesky", "qr"),
    "keops": ("kernel_matmul",),
    "lower_precision": ("exact_log_prob", "inv_quad_logdet", "kernel_matmul"),
    "xla": ("kernel_matmul",),
}
"""The ops that autokern's own plugins add candidates to."""

_ops: dict[str, Op] = {}
_homes: dict[str, str] = {}
_complete: set[str] = set()
"""Ops whose modules have been imported to the end."""
_plugins: list[Plugin] | None = None
_announced: set[str] = set()
_lock = Lock()
_loading = False


def declare(name: str, module: str) -> None:
    """Declare that importing a module makes the op of a name."""
    _homes[name] = module


def add(op: Op) -> None:
    """Register an op; AutokernError if there is one of its name, unless an import of it was interrupted."""
    if op.name in _ops and (op.name in _complete or op.name not in _homes):
        raise AutokernError(f"op {op.name!r} is registered twice; choose another name")
    _ops[op.name] = op


def known(name: str) -> bool:
    """Whether there is an op of this name."""
    return name in _ops or name in _homes or name in {op.name for op in registered()}


def get(name: str) -> Op:
    """Return the op of a name; SettingsError if there is none."""
    if name in _homes:
        _import(name)
    elif not known(name):
        raise SettingsError(f"unknown op {name!r}; autokern knows {', '.join(sorted(_ops))}")
    return _ops[name]


def registered() -> list[Op]:
    """Return all ops, in the order of their names."""
    load()
    return sorted(present(), key=lambda op: op.name)


def present() -> list[Op]:
    """Return all ops, without those that only plugins make which are not loaded yet."""
    for name in _homes:
        _import(name)
    return list(_ops.values())


def _import(name: str) -> None:
    """Import the module of an op, once; a thread that comes meanwhile waits for the end of it."""
    if name not in _complete:
        importlib.import_module(_homes[name])
        _complete.add(name)


@dataclass
class Plugin:
    """An entry point, and what came of it."""

    source: str  # name of the entry point, and of its distribution if that is another: `Candidate.source`
    point: EntryPoint
    state: str = "waiting"  # or "loaded", "failed"; it waits where it is being imported itself, and autokern with it
    failure: str = ""  # why it could not be loaded

    def adds_to(self, op: str | None) -> bool:
        """Whether it waits, and may add candidates to an op, or to any without a name."""
        return self.state == "waiting" and (op is None or op in _OWN.get(self.source, (op,)))

    @contextlib.contextmanager
    def fails_alone(self) -> Iterator[None]:
        """Keep what is raised in the block as the reason why the plugin failed, unless a signal interrupted it."""
        try:
            yield
        except (Exception, SystemExit) as error:
            if interrupted(error):
                raise
            self.state, self.failure = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"


def plugins() -> list[Plugin]:
    """Load the plugins that are not loaded yet, and return all, autokern's own first."""
    load()
    return _plugins or []


def load(op: str | None = None) -> None:
    """Load the plugins that are installed, each of them once; what it raises is kept for `announce`.

    With the name of an op, those of autokern's own that add nothing to it wait. Others may add families of covariances
    and hooks, and wait for nothing.
    """
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
    """Return the plugins that are installed, autokern's own first."""
    found, all_of_them = [], Plugin("installed packages", EntryPoint("", GROUP, GROUP))
    with all_of_them.fails_alone():
        for point in importlib.metadata.entry_points(group=GROUP):
            own = point.value.startswith("autokern.backends.")  # the name of a distribution takes a millisecond to read
            package = "" if own or point.dist is None else f"{point.dist.name}:"
            found.append(Plugin(f"{package}{point.name}", point))
    return [all_of_them] if all_of_them.failure else sorted(found, key=lambda one: (":" in one.source, one.source))


def _load(plugin: Plugin) -> None:
    """Load a plugin and mark its candidates as its own; an exception leaves the registry as it was."""
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
    """Whether somebody's import of a module, or of a package that it lies in, is under way, and led here."""
    parts = name.split(".")
    above = (sys.modules.get(".".join(parts[:count])) for count in range(1, len(parts) + 1) if parts[0] != "autokern")
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in above)


def announce(strict: bool) -> None:
    """Warn of each plugin that has failed to load, once in a process; `strict` raises AutokernError instead."""
    for plugin in _plugins or ():
        if plugin.state != "failed" or (plugin.source in _announced and not strict):
            continue
        _announced.add(plugin.source)
        told = (
            f"candidates of {plugin.source} ({plugin.point.value}) were to be loaded; found: {plugin.failure}. Update "
            "or remove the package; all other candidates work"
        )
        if strict:
            raise AutokernError(told)
        warnings.warn(told, AutokernWarning, stacklevel=2)
