"""Registry: all ops by name; the module of an op is imported when the op is first asked for."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autokern.core.errors import AutokernError, SettingsError

if TYPE_CHECKING:
    from autokern.core.op import Op

__all__ = ["add", "declare", "get", "known", "present", "registered", "registering"]

_ops: dict[str, Op] = {}
_homes: dict[str, str] = {}
_complete: set[str] = set()
"""Ops whose modules have been imported to the end."""


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
    return name in _ops or name in _homes or name in _completed()


def get(name: str) -> Op:
    """Return the op of a name; SettingsError if there is none."""
    if name in _homes:
        _import(name)
    elif name not in _ops and name not in _completed():
        raise SettingsError(f"unknown op {name!r}; autokern knows {', '.join(sorted(_ops))}")
    return _ops[name]


def registered() -> list[Op]:
    """Return all ops, in the order of their names."""
    return [op for _, op in sorted(_completed().items())]


def present() -> list[Op]:
    """Return all ops, without those that only plugins make which are not loaded yet."""
    return list(_imported().values())


def _completed() -> dict[str, Op]:
    """Return the ops with those that plugins make."""
    from autokern.core import plugins

    plugins.load()
    return _imported()


def _imported() -> dict[str, Op]:
    for name in _homes:
        _import(name)
    return _ops


def _import(name: str) -> None:
    """Import the module of an op, once; a thread that comes meanwhile waits for the end of it."""
    if name not in _complete:
        importlib.import_module(_homes[name])
        _complete.add(name)


@contextlib.contextmanager
def registering(source: str) -> Iterator[None]:
    """Mark the candidates that are registered inside the block with the plugin that they come from.

    An exception in the block leaves the registry as it was.
    """
    ops = dict(_imported())
    before = {name: list(op.listed) for name, op in ops.items()}
    try:
        yield
    except BaseException:
        _ops.clear()
        _ops.update(ops)
        for name, op in ops.items():
            op.listed[:] = before[name]
        raise
    for name, op in _ops.items():
        there = {id(candidate) for candidate in before.get(name, ())}
        op.listed[:] = [c if id(c) in there else c.of_plugin(source) for c in op.listed]
