"""What a dispatch mode does not see of a computation: reads by others, warnings, and kernels of extensions in C++.

A recorder (`recording`) is told by its methods `leaves`, `fail` and `called`.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

_LEAVING = frozenset(("__array__", "__dlpack__", "data_ptr", "numpy", "storage", "tolist", "untyped_storage"))


class Extension:
    """A module in C++ whose functions are recorded as operations; in other threads they are called as ever."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        function: Callable[..., torch.Tensor] = getattr(self._module, name)

        def called(*args: Any) -> torch.Tensor:
            mode: Any = _get_current_dispatch_mode()
            return mode.called(function, args) if hasattr(mode, "called") else function(*args)

        return called


class Leaving(TorchFunctionMode):
    """Notices where tensors of a recording are read by others."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and getattr(func, "__name__", "") in _LEAVING:
            with torch._C.DisableTorchFunction():
                self._recorder.noticed(self._recorder.leaves, args[0])
        return func(*args, **(kwargs or {}))


class _Warnings:
    """Notices the warnings of recordings, which are shown as ever.

    `warnings.catch_warnings` would lose those of other threads: two that do not end in turn leave one of them in force.
    """

    def __init__(self) -> None:
        self._lock, self._recorders = threading.Lock(), dict[int, list[Any]]()
        self._stock, self._show = warnings.showwarning, self._note  # one object, to be found again

    @contextlib.contextmanager
    def noticed(self, recorder: Any) -> Iterator[None]:
        """Tell a recorder of warnings in this thread."""
        here = threading.get_ident()
        try:
            with self._lock:
                self._recorders.setdefault(here, []).append(recorder)
                if warnings.showwarning is not self._show:
                    self._stock, warnings.showwarning = warnings.showwarning, self._show
            yield
        finally:
            with self._lock:
                if recorder in (those := self._recorders.get(here, [])):
                    those.remove(recorder)
                if not those:
                    self._recorders.pop(here, None)
                if not self._recorders and warnings.showwarning is self._show:
                    warnings.showwarning = self._stock

    def _note(self, *args: Any, **kwargs: Any) -> None:
        for recorder in self._recorders.get(threading.get_ident(), ()):
            recorder.fail("a warning")
        self._stock(*args, **kwargs)


warnings_noticed = _Warnings().noticed
