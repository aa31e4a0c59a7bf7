"""Dispatch: call → key → memo → (once per key, by the session: Problem, Decision) → candidate."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad

from autokern.core import registry
from autokern.core.decision import Decision
from autokern.core.errors import RanksError, caught, recoverable
from autokern.core.op import Op
from autokern.core.problem import Feasibility, Problem
from autokern.core.settings import Settings, from_environment, revised
from autokern.core.state import Lock, inside
from autokern.runtime.memo import Entry, Overlay, counted
from autokern.runtime.memo import current as _current
from autokern.runtime.session import Session, existing
from autokern.system import memory, ranks

_compiling: Callable[[], bool] = torch.compiler.is_compiling
_traced: Callable[[], bool] = torch.compiler.is_dynamo_compiling
_tracing: Callable[[], Any] = torch._C._get_tracing_state
_transforming: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_saving: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


def bypassed() -> bool:
    """Whether this call must run stock: inside a candidate, or where it is `transformed`."""
    return inside.active or transformed()


def transformed() -> bool:
    """Whether code is compiled, traced, transformed (functorch, modes, forward AD), autocast or checkpointed."""
    return bool(
        _compiling()
        or _tracing() is not None
        or _transforming() is not None
        or _modes()
        or _autocast()  # would lower a candidate's precision
        or _saving(False) is not None  # a checkpoint recomputes the same tensors, whatever was chosen meanwhile
        or forward_ad._current_level >= 0
    )


def in_force() -> Settings:
    """Return the settings in force in this thread or task."""
    overlay = _current.get()
    return session().settings if overlay is None else overlay.settings


memory.ordered_here = lambda: in_force().memory

_session: Session | None = None
_session_lock = Lock()


def session() -> Session:
    """Return the session of this process, created from the environment by the first call."""
    if _session is None:
        settings = from_environment()
        registry.load(None if settings.strict else "")  # outside of the lock, since a plugin may call `session`
        with _session_lock.here():
            return _session or replace(Session(settings))
    return _session


def reset(settings: Settings | None = None) -> Session:
    """Start a new session from given settings or the environment; raises SettingsError for an invalid one."""
    settings = from_environment() if settings is None else settings
    registry.load(None if settings.strict else "")
    return replace(Session(settings))


def replace(fresh: Session) -> Session:
    """Replace the present session, and return the new one."""
    global _session
    with _session_lock.here():
        _session = fresh
    return fresh


def is_small(op: str, mat: Any) -> bool:
    """Whether stock serves an op's call on this matrix, below the floor of the op; not within a `using` block."""
    if _traced() or mat.__class__ is not torch.Tensor or _current.get() is not None:
        return False
    here = _session
    if here is None:
        return False
    device = "cpu" if mat.is_cpu else mat.device.type
    floor = here.floors.get((op, device))
    return mat.numel() < (here.floor(op, device) if floor is None else floor)


def route(op: Op | str, looked: bool = False) -> Callable[..., Any]:
    """Return a function that dispatches each call of an op in a microsecond; `looked`: the caller asked `bypassed`."""
    called: Op | None = None
    key_of: Callable[..., Any]
    stock: Callable[..., Any]
    name, raises = "", ()  # type: tuple[str, tuple[type[BaseException], ...]]
    flag, overlay_of = inside, _current.get

    def resolve() -> Op:
        nonlocal called, key_of, stock, name, raises
        found = registry.get(op) if isinstance(op, str) else op  # imported by the first call
        key_of, stock, name, raises = found.key, found.stock.run, found.name, found.raises
        called = found
        return found

    def call(*args: Any) -> Any:
        of = called or resolve()
        if not looked and bypassed():
            return stock(*args)
        overlay = overlay_of()
        here = _session or session()
        memo = here.memo if overlay is None else overlay.memo
        try:
            key = key_of(*args)
            table = memo.get(name)
            entry = None if table is None else table.get(key)
        except caught(Exception, by=(of,)):  # unreadable arguments: stock runs or raises its own error
            return stock(*args)
        if entry is None:
            made = here.entry(of, args, here.settings if overlay is None else overlay.settings)
            entry = here.remember(memo, name, key, made)
        entry.count += 1
        if flag.within:
            entry.nested[flag.within] += 1
        if entry.count >= entry.due:
            from autokern.runtime.review import checked

            entry = checked(here, entry, args, here.settings if overlay is None else overlay.settings)
            here.remember(memo, name, key, entry, renewed=True)
        flag.active = not entry.parts
        try:
            return entry.run(*args)
        except raises:
            raise
        except Exception as error:
            return _recovered(entry, args, error)
        finally:
            flag.active = False

    call.__name__ = call.__qualname__ = op if isinstance(op, str) else op.name
    return call


def _recovered(entry: Entry, args: tuple[Any, ...], error: Exception) -> Any:
    """Answer a call whose candidate failed: by the next one if memory ran out, else by stock or its own error."""
    final = entry.candidate.name == "stock" or isinstance(error, RanksError) or ranks.active() is not None
    if final or not recoverable(error, entry.op, entry.candidate.run):
        raise error  # ranks must not diverge
    failed, op, problem = entry.candidate.name, entry.op, entry.decision.problem
    exhausted = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    others = [op[name] for name in entry.decision.order if name != failed]
    fitting = [c for c in others if memory.fits(c.memory(problem), problem.device)]
    if not exhausted:  # stock first, which may raise the same error; another only if stock does not fit
        fitting.sort(key=lambda candidate: candidate is not op.stock)
    if not fitting:
        raise error
    if exhausted:
        traceback.clear_frames(error.__traceback__)  # frees the failed candidate's tensors
    successor = fitting[0]
    result = successor.run(*args)
    if (_session or session()).settings.strict and not exhausted:
        raise error
    what = "ran out of memory" if exhausted else f"failed ({type(error).__name__}: {error})"
    entry.demote(successor, f"{failed} {what}", 4)
    return result


@contextlib.contextmanager
def using(
    force: Mapping[str, str] | str | None = None,
    exclude: Iterable[str] | None = None,
    accuracy: str | None = None,
    max_error: float | None = None,
    memory: int | str | None = None,
    calls: int | None = None,
) -> Iterator[None]:
    """Override settings within a ``with`` block, in this thread or task only.

    Parameters
    ----------
    force : mapping or str, optional
        Candidate by op, e.g. ``{"qr": "cpu"}``, or ``"random:SEED"``.
    exclude : iterable of str, optional
        Candidates that must not run, by name or as ``op=name``.
    accuracy : {"same", "approximate"}, optional
        Whether lower precision is allowed, where its error, measured on this machine, is at most `max_error`.
    max_error : float, optional
        Largest allowed error of an entry of a result or gradient, relative to the largest entry; default 1e-3.
    memory : int or str, optional
        Most bytes that one call may take, e.g. ``"4GiB"``.
    calls : int, optional
        Expected number of calls of one size, over which compiling must repay itself. By default, a candidate is
        compiled once the calls have lost as much time without it.

    Raises
    ------
    SettingsError
        If an order cannot be obeyed: unknown op, unknown candidate, malformed size.

    Examples
    --------
    >>> with autokern.using(force={"cholesky": "stock"}):
    ...     print(autokern.explain("cholesky", n=100).reason)
    forced by the user
    """
    settings = revised(
        in_force(), force=force, exclude=exclude, accuracy=accuracy, max_error=max_error, memory=memory, calls=calls
    )
    if force or exclude:
        settings = existing(settings)
    overlay = Overlay(settings, _current.get())
    token = _current.set(overlay)
    try:
        yield
    finally:
        _current.reset(token)
        session().forget(overlay.memo)


def explain(problem: Problem) -> Decision:
    """Return the decision for a problem under the present settings, without running it."""
    here = session()
    return here.described(here.decide(Feasibility(registry.get(problem.op), problem), in_force()))


def _overlays() -> Iterator[Overlay]:
    overlay = _current.get()
    while overlay is not None:
        yield overlay
        overlay = overlay.outer


def decisions() -> list[tuple[Decision, int]]:
    """Return the decisions of this process, each with the number of calls that it served."""
    return [] if _session is None else session().decisions(overlay.memo for overlay in _overlays())


def stats() -> dict[str, dict[str, int]]:
    """Return the number of calls by op and candidate in this process.

    Hooked calls below the sizes at which any candidate beats stock are not counted.

    Returns
    -------
    dict
        Calls by op, then by candidate; ops without calls are absent. ``"optimised function"`` counts evaluations that
        were replayed (``AUTOKERN_REPLAY``).

    Examples
    --------
    >>> before = autokern.stats().get("cholesky", {}).get("stock", 0)
    >>> with autokern.using(force={"cholesky": "stock"}):
    ...     _ = autokern.linalg.cholesky(torch.eye(3))
    ...     autokern.stats()["cholesky"]["stock"] - before
    1
    """
    if (here := _session) is None:  # nothing was called, nor a variable read
        return {}
    total = sum((counted(overlay.memo) for overlay in _overlays()), here.past + counted(here.memo))
    result: dict[str, dict[str, int]] = {}
    for (name, candidate), count in sorted((+total).items()):
        result.setdefault(name, {})[candidate] = count
    return result
