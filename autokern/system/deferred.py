"""Torch's rules for tensors without data, which its own import ends with, imported when something first needs them.

`torch._meta_registrations` and the decompositions that it imports take a sixth of the time of ``import torch``. Only
tensors on the device "meta", tracers and compilers use them. While autokern imports torch, an empty module stands in
their place. They are imported as soon as anything asks for one of these modules or creates such a tensor; nothing is
left then of what this file did.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from operator import attrgetter
from types import ModuleType
from typing import Any

from autokern.core.state import Lock

_RULES = "torch._meta_registrations"
_MODULES = {_RULES, "torch._decomp", "torch._refs"}
"""Modules that import each other: the rules come first."""
_CREATING = "empty.memory_format", "empty_strided.default", "_efficientzerotensor.default"
"""The operations that have a kernel for the device "meta" and no tensor among their arguments."""
_FUNCTIONALIZING = (
    ("torch._functorch.eager_transforms", "_func_increment_nesting"),
    ("torch", "_enable_functionalization"),
    ("torch._C", "_EnablePythonDispatcher"),
)
"""Functions after which operations run by rules, or on tensors without data that no dispatched operation creates."""
_TRIED = "2.13.", "2.14."
"""Releases whose rules have no effects but these: `tests/system/test_deferred.py` looks for others."""


class Deferred:
    """A finder, first in ``sys.meta_path`` until the rules are imported: it imports them when one of them is wanted."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._begins = True
        self._spec: ModuleSpec | None = None
        self._undone: list[Callable[[], object]] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return a spec by which `create_module` imports the rules, None for other modules."""
        return ModuleSpec(name, self) if name in _MODULES else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return a module that the rules have imported; None, for an empty one, where torch's import asks for them."""
        if self._begins and spec.name == _RULES:
            self._begins = False
            return None
        self.load()
        self._spec = importlib.import_module(spec.name).__spec__
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Leave a module as it was imported."""
        module.__spec__ = self._spec or module.__spec__

    def arm(self) -> bool:
        """Wait for the first use of the rules; false if they are there, or this torch is built otherwise."""
        torch, empty = sys.modules["torch"], sys.modules[_RULES]
        if getattr(empty.__spec__, "loader", None) is not self:
            return False
        del sys.modules[_RULES], torch._meta_registrations
        torch._lazy_modules.update(name.removeprefix("torch.") for name in _MODULES)
        importlib.import_module("torch._prims")  # which the rules import: it makes operations, and generators work
        library = torch.library.Library("aten", "IMPL", "Meta")
        self._undone.append(library._destroy)
        for name in _CREATING:
            operation = attrgetter(name)(torch.ops.aten)
            library.impl(name.removesuffix(".default"), functools.partial(self._again, operation))
        for owner, name in _FUNCTIONALIZING:
            module = sys.modules[owner]
            function = getattr(module, name)
            self._undone.append(functools.partial(setattr, module, name, function))
            setattr(module, name, functools.partial(self._again, function))
        return True

    def _again(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        self.load()
        return operation(*args, **kwargs)

    def load(self) -> None:
        """Import the rules, unless that has happened."""
        with self._lock.here():
            if self not in sys.meta_path:
                self._leave()  # the rules themselves compute, while they are imported
                return
            sys.meta_path.remove(self)
            try:
                importlib.import_module(_RULES)
            except BaseException:
                sys.meta_path.insert(0, self)
                raise
            self._leave()

    def _leave(self) -> None:
        while self._undone:
            self._undone.pop()()


@contextlib.contextmanager
def rules() -> Iterator[None]:
    """Defer torch's rules in the block, if that imports a torch of a tried release, on Linux and with autokern on."""
    off = sys.platform != "linux" or os.environ.get("AUTOKERN", "").strip().lower() in ("0", "false", "off", "no")
    if off or "torch" in sys.modules:
        yield
        return
    deferred = Deferred()
    sys.meta_path.insert(0, deferred)
    try:
        yield
    finally:
        waits = False
        with contextlib.suppress(AttributeError, ImportError, KeyError, RuntimeError, TypeError):  # another release
            waits = deferred.arm() and sys.modules["torch"].__version__.startswith(_TRIED)
        if "torch" not in sys.modules:
            sys.meta_path.remove(deferred)
        elif not waits:
            deferred.load()
