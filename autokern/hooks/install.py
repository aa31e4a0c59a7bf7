"""Install the patches of all hook files, and remove them again.

Installing is reference-counted and under a lock. The identical original object is put back, unless another party (a
mock, say) has replaced the patch since.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from autokern import hooks
from autokern.core.releases import known
from autokern.core.releases.known import Status, relied
from autokern.core.releases.recorded import is_ours, is_within
from autokern.core.settings import Settings, from_environment
from autokern.core.state import Lock, permitted
from autokern.runtime import dispatch, ranks
from autokern.runtime.session import why_off
from autokern.system import host, memory
from autokern.system import ranks as joining


class Patch(NamedTuple):
    """An attribute of a module or class, and its replacement."""

    owner: Any
    name: str
    replacement: Any


class Property(property):
    """A property that can have the attribute ``__wrapped__``, as `hook` needs."""

    __wrapped__: property


_hooks: dict[tuple[Any, str], Patch] = {}
_codes: dict[FunctionType, tuple[CodeType, CodeType]] = {}
_originals: list[tuple[Patch, Any]] = []
inherited = set[tuple[Any, str]]()  # places of hooks whose original may be that of a base class
_lock, _depth = Lock(), 0
_threads_before: int | None = None


def hook(
    owner: Any, name: str, relies: Iterable[str] | None = (), idle: Callable[..., Any] | None = None
) -> Callable[[Any], Any]:
    """Return a decorator that declares the replacement of an attribute, in its owner's own namespace, while enabled.

    A hook is one decorated function, in a file of `autokern/hooks/` or in any module that is imported before `enable`.
    It takes over the name and docstring of the original, and keeps the original as ``__wrapped__``. `relies` names
    other library functions that it relies on, as for `known.relied`: where the original or one of them is missing or
    differs from the tested releases, the original runs; None: the hook checks this itself. `idle` says, by the call's
    arguments, where the hook would only call the original. It runs before the check, which takes ten microseconds, and
    the first time a thousand times as long.
    """
    before = stock_of(owner, name)

    def declare(replacement: Any) -> Any:
        placed = replacement
        asks = before is not None and is_ours(replacement) and isinstance(replacement, FunctionType)
        if asks and (relies is not None or not _takes_all(replacement, before)):
            holds = relied((known.full_name(owner, name), before), *(relies or ())).holds
            skips = idle if idle is not None and _takes_all(idle, before) else None

            def hooked(*args: Any, **kwargs: Any) -> Any:
                if skips is not None and skips(*args, **kwargs):
                    return before(*args, **kwargs)
                # a compiler cannot trace `holds`; while one traces, hooks call the original themselves
                serves = torch.compiler.is_compiling() or holds()
                return replacement(*args, **kwargs) if serves else before(*args, **kwargs)

            placed = hooked
        if isinstance(placed, FunctionType) and isinstance(like := getattr(owner, name, None), FunctionType):
            functools.update_wrapper(placed, like)
        if isinstance(placed, Property) and before is not None:
            placed.__set_name__(owner, name)  # type: ignore[attr-defined]
            placed.__doc__ = before.__doc__
        placed.__wrapped__ = before
        _hooks[owner, name] = Patch(owner, name, placed)
        return placed

    return declare


def _takes_all(replacement: Any, before: Any) -> bool:
    """Whether a hook accepts every call of the original: a new release may add, drop or rename arguments."""
    original = inspect.unwrap(before)
    mine, theirs = replacement.__code__, getattr(original, "__code__", None)
    if theirs is None:
        return True
    named = mine.co_varnames[: mine.co_argcount]
    expected = theirs.co_varnames[: theirs.co_argcount + theirs.co_kwonlyargcount]
    required = len(named) - len(replacement.__defaults__ or ())
    if expected[: len(named)] != named or required > theirs.co_argcount - len(original.__defaults__ or ()):
        return False
    more = theirs.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return bool(mine.co_flags & inspect.CO_VARKEYWORDS) or (not more and len(expected) == len(named))


def stock_of(owner: Any, name: str) -> Any:
    """Return an attribute from the own namespace of a module or class, None if it is absent."""
    return getattr(owner, "__dict__", {}).get(name)


def recode(function: FunctionType, template: Any) -> None:
    """Declare the template's code for a function, which stays the same object and keeps its globals and closure."""
    _codes[function] = (function.__code__, template.__code__)


def patches() -> list[Patch]:
    """Return the patches of all declared hooks, in the order of installation."""
    for module in pkgutil.iter_modules(hooks.__path__):
        name = f"{hooks.__name__}.{module.name}"
        try:
            importlib.import_module(name)
        except (AttributeError, ImportError, KeyError, TypeError) as error:  # this release lacks a library name
            known.leave_out(name, f"cannot be used: {error}")
    return list(_hooks.values())


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
    with _lock.here():
        if _depth == 0:
            settings = from_environment()
            if dispatch.session().asked != settings:
                dispatch.reset(settings)
            if settings.enabled:
                try:
                    _install(settings)
                    if settings.ranks == "on" and joining.is_job() and joining.held is None:
                        ranks.begin()
                        atexit.register(ranks.end)
                except BaseException:  # all or nothing
                    _remove()
                    raise
        _depth += 1


def disable() -> None:
    """Undo one `enable`; the last one restores the libraries' own functions. Without an `enable`, do nothing.

    Afterwards `enable` or `import autokern.auto` enable it again.

    Examples
    --------
    >>> import autokern
    >>> autokern.enable()
    >>> autokern.disable()
    """
    global _depth
    with _lock.here():
        if _depth == 0:
            return
        _depth -= 1
        if _depth == 0:
            _remove()
            sys.modules.pop("autokern.auto", None)  # so that a later `import autokern.auto` enables again
            vars(sys.modules["autokern"]).pop("auto", None)


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Enable within a ``with`` block, or around a function as a decorator; raises the same errors as `enable`.

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
    """Return whether calls of the libraries go through autokern; if not, wrappers that a program still holds run stock.

    Examples
    --------
    >>> with autokern.enabled():
    ...     autokern.is_enabled()
    True
    """
    return len(_originals) > 0


def _install(settings: Settings) -> None:
    global _threads_before
    known.trust(settings.unknown == "trust")
    for patch in patches():
        _put(patch)
    if _told(settings.unknown == "stock") and settings.unknown == "stock":
        _remove()
    if not _originals:
        return
    for function, (_, ours) in _codes.items():
        if is_within(function):
            function.__code__ = ours
    memory.recycle()
    (permitted.discard if settings.threads == "off" else permitted.add)("threads")
    if settings.threads != "off":
        ceiling = host.thread_ceiling() if settings.threads == "auto" else int(settings.threads)
        before = torch.get_num_threads()
        if before > ceiling:
            _threads_before = before
            torch.set_num_threads(ceiling)  # also the default of later threads, as intended


def _told(every: bool = False) -> bool:
    """Warn of unknown library functions, and return whether any was found; tested releases are checked lazily."""
    tested = all(tested for _, tested in known.versions().values())
    known.warn(found := known.unknown(every or not tested))
    return bool(found)


def status() -> Status:
    """Return whether autokern is enabled, the libraries' versions, and the library functions whose hooks stay out.

    Examples
    --------
    >>> autokern.status().enabled
    False
    """
    with _lock.here():
        if not _originals:
            known.trust(False)
            for patch in patches():
                _admits(patch, stock_of(patch.owner, patch.name))
        return Status(bool(_originals), known.versions(), known.unknown(), "" if _originals else why_off())


def _admits(patch: Patch, present: Any) -> bool:
    ours, base = patch.replacement, present is None and patch[:2] in inherited
    return base or not is_ours(ours) or known.admits(patch.owner, patch.name, present, ours.__wrapped__)


def put_declared() -> None:
    """Install the hooks that were declared since `enable`, if autokern is enabled."""
    with _lock.here():
        there = {(patch.owner, patch.name) for patch, _ in _originals}
        for patch in patches() if _originals else ():
            if (patch.owner, patch.name) not in there:
                _put(patch)
        if _originals:
            _told()


def _put(patch: Patch) -> None:
    present = stock_of(patch.owner, patch.name)
    if present is patch.replacement:  # a mock put it back after the last `disable`
        present = patch.replacement.__wrapped__
    if not _admits(patch, present):
        return
    _originals.append((patch, present))
    setattr(patch.owner, patch.name, patch.replacement)


def _remove() -> None:
    global _threads_before
    for function, (theirs, ours) in _codes.items():
        if function.__code__ is ours:
            function.__code__ = theirs
    while _originals:
        patch, original = _originals.pop()
        if stock_of(patch.owner, patch.name) is patch.replacement:
            delattr(patch.owner, patch.name) if original is None else setattr(patch.owner, patch.name, original)
    if _threads_before is not None:
        torch.set_num_threads(_threads_before)
        _threads_before = None
    permitted.add("threads")
