"""Ranks of one job share large products, and take the same decisions: those of rank 0.

A decision is a function of settings, profile and memory limit. All of these are rank 0's, sent once when the ranks
meet, and nothing is measured while they are together. So no decision needs a message.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import msgspec

from autokern.core.errors import RanksError, SettingsError
from autokern.core.registry import registered
from autokern.core.settings import Settings
from autokern.core.versions import __version__
from autokern.runtime import dispatch
from autokern.runtime.session import Session
from autokern.system import host, randomness
from autokern.system import ranks as system

_OWN = ("home", "log", "ranks")
"""Settings that each rank keeps."""


def timeout_of(settings: Settings) -> float:
    """Return the seconds after which a rank that does not answer ends the job."""
    return float(settings.ranks) if isinstance(settings.ranks, float) else system.TIMEOUT


def facts() -> dict[str, Any]:
    """Return what ranks must have in common, and what they tell of themselves."""
    fields = host.current().fields
    versions, cpu = fields["versions"], fields["cpu"]
    names = ("python", "torch", "gpytorch", "linear_operator")
    own = {"autokern": __version__, "threads": cpu["torch_threads"]}
    return {
        "common": {name: versions[name] for name in names} | own,
        "cpu": f"{cpu['model']}, {cpu['capability']}",
        "memory": host.available_memory("cpu"),
    }


def unlike(found: list[dict[str, Any]]) -> str:
    """Return in words which ranks have not what rank 0 has; empty where all have."""
    first = found[0]["common"]
    told = [
        f"rank {rank} has {name} {one['common'][name]}, rank 0 {value}"
        for rank, one in enumerate(found)
        for name, value in first.items()
        if one["common"][name] != value
    ]
    return "; ".join(told)


def begin(shy: bool = False, timeout: float | None = None) -> None:
    """Meet the other ranks of this job; all of them call this. They draw the same random numbers from then on.

    The `shy` stand back once the program has a process group of its own. Raises RanksError if a rank does not come, or
    ranks differ in what decides the bits of their results.
    """
    if system.held() is not None:
        raise RanksError("autokern: this process has joined its ranks already")
    from autokern.kernels import over_ranks

    mine = dispatch.session()
    here = system.join(timeout_of(mine.settings) if timeout is None else timeout, shy)
    try:
        found = here.objects(facts())
        if told := unlike(found):
            raise RanksError(f"autokern: {told}. Give all ranks the same libraries and the same OMP_NUM_THREADS")
        over_ranks.measure(here)
        settings, profile = _agreed(here, mine, min(one["memory"] for one in found))
        randomness.take(here.objects(randomness.states() if here.rank == 0 else None)[0])
        system.use(here)
        dispatch.replace(Session(settings, profile, mine.asked))
    except BaseException:
        end_of(here)
        raise


def _agreed(here: system.Ranks, mine: Any, free: int) -> tuple[Settings, Any]:
    """Return the settings and the profile of rank 0, without what some rank cannot run."""
    able = [f"{op.name}={c.name}" for op in registered() for c in op.candidates if c.compiles or c.unavailable("cpu")]
    own = (mine.settings, mine.profile) if here.rank == 0 else None
    everyone = here.objects((own, able))
    (theirs, profile), _ = everyone[0]
    lacking = {name for _, names in everyone for name in names if not name.endswith("=distributed")}
    ordered = {f"{op}={candidate}" for op, candidate in theirs.force}
    each = free // int(os.environ.get("LOCAL_WORLD_SIZE") or here.size)
    settings = msgspec.structs.replace(
        theirs,
        exclude=theirs.exclude | (lacking - ordered),
        memory=each if theirs.memory is None else min(each, theirs.memory),
        calibrate="never",
        **{name: getattr(mine.settings, name) for name in _OWN},
    )
    return settings, profile


def end_of(here: system.Ranks) -> None:
    """Take leave of ranks, which share nothing with this process any more."""
    system.use(None)
    here.leave()


def end(decide: bool = False) -> None:
    """Take leave of the other ranks; with `decide`, this process decides by itself again."""
    here = system.held()
    if here is not None:
        end_of(here)
        if decide:
            dispatch.reset(dispatch.session().asked)


@contextlib.contextmanager
def ranks(timeout: float | None = None) -> Iterator[None]:
    """Share large products with the other ranks of this job; all of them enter and leave the block together.

    They must run the same calls on the same data within it; `autokern run` under torchrun does this for whole programs.

    Parameters
    ----------
    timeout : float, optional
        Seconds after which a rank that does not answer ends the job; default 300, or that of ``AUTOKERN_RANKS``.

    Raises
    ------
    SettingsError
        If this process is not one of several, by torchrun's variables or a process group of the program.
    RanksError
        If ranks disagree, or one of them is lost.

    Examples
    --------
    >>> with autokern.ranks(timeout=60):  # doctest: +SKIP
    ...     train(model)
    """
    from torch import distributed

    if not (system.is_job() or (distributed.is_available() and distributed.is_initialized())):
        raise SettingsError("autokern.ranks: this process is one alone; start the program by torchrun")
    begin(timeout=timeout)
    try:
        yield
    finally:
        end(decide=True)
