"""Ranks of one job share large products, and take the same decisions without messages.

When the ranks join, rank 0 sends its settings and profile, they agree on a memory limit, and nothing is measured later.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import msgspec

from autokern.core.errors import RanksError, SettingsError
from autokern.core.registry import registered
from autokern.core.releases import __version__
from autokern.runtime import dispatch
from autokern.runtime.session import Session
from autokern.system import host
from autokern.system import ranks as system

_OWN = ("home", "log", "ranks")  # settings that each rank keeps


def facts() -> dict[str, Any]:
    """Return the facts that ranks exchange: those that must agree (``common``), and the free memory."""
    fields = host.current().fields
    own = {name: fields["versions"][name] for name in ("python", "torch", "gpytorch", "linear_operator")}
    own |= {"autokern": __version__, "threads": fields["cpu"]["torch_threads"]}
    return {"common": own, "memory": host.available_memory("cpu")}


def unlike(found: list[dict[str, Any]]) -> str:
    """Describe all differences of ranks from rank 0 in the ``common`` facts; empty if all ranks agree."""
    each = ((rank, *item) for rank, one in enumerate(found) for item in one["common"].items())
    first = found[0]["common"]
    return "; ".join(f"rank {r} has {name} {own}, rank 0 {first[name]}" for r, name, own in each if own != first[name])


def begin(shy: bool = False, timeout: float | None = None) -> None:
    """Join the other ranks of this job, all of which must call this. Afterwards all draw the same random numbers."""
    if system.held is not None:
        raise RanksError("autokern: this process has joined its ranks already")
    from autokern.kernels import matmul

    mine = dispatch.session()
    asked = mine.settings.ranks if timeout is None else timeout
    here = system.join(asked if isinstance(asked, float | int) else system.TIMEOUT, shy)
    try:
        found = here.objects(facts())
        if told := unlike(found):  # the bits of results depend on these
            raise RanksError(f"autokern: {told}. Give all ranks the same libraries and the same OMP_NUM_THREADS")
        matmul.measure(here)
        # the settings and the profile of rank 0, without candidates that compile or that some rank cannot run
        able = [
            f"{op.name}={c.name}" for op in registered() for c in op.candidates if c.compiles or c.unavailable("cpu")
        ]
        everyone = here.objects(((mine.settings, mine.profile) if here.rank == 0 else None, able))
        (theirs, profile), _ = everyone[0]
        lacking = {name for _, names in everyone for name in names if not name.endswith("=distributed")}
        ordered = {f"{op}={candidate}" for op, candidate in theirs.force}
        each = min(one["memory"] for one in found) // int(os.environ.get("LOCAL_WORLD_SIZE") or here.size)
        settings = msgspec.structs.replace(
            theirs,
            exclude=theirs.exclude | (lacking - ordered),
            memory=each if theirs.memory is None else min(each, theirs.memory),
            calibrate="never",
            **{name: getattr(mine.settings, name) for name in _OWN},
        )
        host.take_random_states(here.objects(host.random_states() if here.rank == 0 else None)[0])
        system.held = here
        dispatch.replace(Session(settings, profile, mine.asked))
    except BaseException:
        system.held = None
        here.leave()
        raise


def end(decide: bool = False) -> None:
    """Leave the other ranks; with `decide`, start a session of this process's own settings."""
    here = system.held
    if here is not None:
        system.held = None
        here.leave()
        if decide:
            dispatch.reset(dispatch.session().asked)


@contextlib.contextmanager
def ranks(timeout: float | None = None) -> Iterator[None]:
    """Share large products with the other ranks of this job; all of them enter and leave the block together.

    They must run the same calls on the same data there. `autokern run` under torchrun does this for whole programs.

    Parameters
    ----------
    timeout : float, optional
        Seconds after which a rank that does not answer ends the job; default 300, or that of ``AUTOKERN_RANKS``.

    Raises
    ------
    SettingsError
        If neither torchrun's variables nor a process group of the program make this process one of several.
    RanksError
        If ranks disagree, or if one of them is lost.

    Examples
    --------
    >>> with autokern.ranks(timeout=60):  # doctest: +SKIP
    ...     train(model)
    """
    from torch import distributed

    if not (system.is_job() or (distributed.is_available() and distributed.is_initialized())):
        raise SettingsError("autokern.ranks: this process is not one of several ranks; start the program by torchrun")
    begin(timeout=timeout)
    try:
        yield
    finally:
        end(decide=True)
