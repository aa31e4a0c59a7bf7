"""Install the patches of all hook files, and remove them again.

Installing is reference-counted and under a lock. The identical original object is put back, unless another party (a
mock, say) has replaced the patch since.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from autokern.core.settings import Settings, from_environment
from autokern.runtime import dispatch
from autokern.system import buffers, host, threads

__all__ = ["Patch", "disable", "enable", "enabled", "everywhere", "is_enabled", "patches"]


class Patch(NamedTuple):
    """An attribute of a module or class, and its replacement."""

    owner: Any
    name: str
    replacement: Any


def patches() -> list[Patch]:
    """Return all patches of gpytorch and linear_operator, in the order of installation."""
    from autokern.hooks import gpytorch, linear_operator, matrixfree, memory, prediction

    return [
        patch for module in (linear_operator, gpytorch, prediction, memory, matrixfree) for patch in module.patches()
    ]


def everywhere(package: str, name: str, original: Any, replacement: Any) -> list[Patch]:
    """Return patches of all modules of a package, itself included, that hold a function by value under its name."""
    holders = [m for n, m in sorted(sys.modules.items()) if m is not None and f"{n}.".startswith(f"{package}.")]
    return [Patch(module, name, replacement) for module in holders if vars(module).get(name) is original]


_lock = threading.RLock()
_depth = 0
_originals: list[tuple[Patch, Any]] = []
_threads_before: int | None = None


def enable() -> None:
    """Route the libraries' calls through autokern until `disable` has been called as often.

    Raises
    ------
    SettingsError
        If an ``AUTOKERN_*`` variable has a value that cannot be obeyed; nothing is changed then.

    Examples
    --------
    >>> import autokern
    >>> autokern.enable()
    >>> autokern.disable()
    """
    global _depth
    with _lock:
        if _depth == 0:
            settings = from_environment()
            if dispatch.session().settings != settings:
                dispatch.reset(settings)
            if settings.enabled:
                try:
                    _install(settings)
                except BaseException:  # all or nothing
                    _remove()
                    raise
        _depth += 1


def disable() -> None:
    """Undo one `enable`; the last one restores the libraries' own functions. Without an `enable`, do nothing.

    Examples
    --------
    >>> import autokern
    >>> autokern.enable()
    >>> autokern.disable()
    """
    global _depth
    with _lock:
        if _depth == 0:
            return
        _depth -= 1
        if _depth == 0:
            _remove()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Enable within a ``with`` block, or around a function as a decorator.

    Raises
    ------
    SettingsError
        As `enable` does.

    Examples
    --------
    >>> import autokern
    >>> with autokern.enabled():
    ...     pass
    """
    enable()
    try:
        yield
    finally:
        disable()


def is_enabled() -> bool:
    """Whether the hooks are installed; while they are not, a wrapper that is still held runs stock."""
    return bool(_originals)


def _install(settings: Settings) -> None:
    for patch in patches():
        _put(patch)
    buffers.set_limit(settings.memory)
    threads.allow(settings.threads != "off")
    if threads.allowed():
        _limit_threads(settings)


def _limit_threads(settings: Settings) -> None:
    global _threads_before
    ceiling = host.thread_ceiling() if settings.threads == "auto" else int(settings.threads)
    before = torch.get_num_threads()
    if before > ceiling:
        _threads_before = before
        torch.set_num_threads(ceiling)  # also the default of later threads, as intended


def _put(patch: Patch) -> None:
    present = vars(patch.owner)[patch.name]
    if present is patch.replacement:  # a mock put it back after the last `disable`
        present = patch.replacement.__wrapped__
    _originals.append((patch, present))
    setattr(patch.owner, patch.name, patch.replacement)


def _remove() -> None:
    global _threads_before
    while _originals:
        patch, original = _originals.pop()
        if vars(patch.owner)[patch.name] is patch.replacement:
            setattr(patch.owner, patch.name, original)
    if _threads_before is not None:
        torch.set_num_threads(_threads_before)
        _threads_before = None
    buffers.set_limit(None)
    buffers.free()
    threads.allow(True)
