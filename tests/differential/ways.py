"""How a scenario is run: as stock, by default with a recorded profile, forced to candidates, drawn at random."""

import contextlib
import functools
import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import gpytorch
import linear_operator
import torch
from table import COUNTS, FORMULAE, Facts, Scenario, See, worded

import autokern
from autokern.core.registry import get
from autokern.hooks import install
from autokern.runtime import dispatch

HOSTS = sorted((Path(__file__).parents[2] / "calibration" / "hosts").glob("*.json"))
_ONCE = ("TypedStorage is deprecated", "Sparse invariant checks", "torch.sparse.SparseTensor", "torch.jit")
"""Warnings of torch about itself, of the library's own code."""
_QUICK = {"gpytorch": (True, 3, 800, 512), "botorch": (False, 6, 4096, 4096)}


class Told(NamedTuple):
    """What became of a run."""

    facts: Facts
    raised: str
    warned: frozenset[str]
    state: str
    counts: dict[str, int]
    kappa: float = 0.0


@contextlib.contextmanager
def defaults(library: str) -> Iterator[None]:
    """Let the defaults of one library hold, whichever was imported."""
    fast, tries, cholesky, eager = _QUICK[library]
    of, more = linear_operator.settings, gpytorch.settings
    switches = [of._fast_covar_root_decomposition, of._fast_log_prob, of._fast_solves]
    numbers = {of.cholesky_max_tries: tries, of.max_cholesky_size: cholesky, more.max_eager_kernel_size: eager}
    with contextlib.ExitStack() as stack:
        for kind in switches:
            stack.enter_context(mock.patch.object(kind, "_default", fast))
        for kind, value in numbers.items():
            stack.enter_context(mock.patch.object(kind, "_global_value", value))
        yield


@contextlib.contextmanager
def _undisturbed(threads: int) -> Iterator[None]:
    """Put back what a program may leave changed for the process."""
    before, dtype, grad = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    torch.set_num_threads(threads)
    torch.set_warn_always(True)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_warn_always(False)
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.set_num_threads(before)


def told(scenario: Scenario, truth: bool = False, first: bool = True, formula: bool = False) -> Told:
    """Run a program once, under whatever is enabled."""
    see = See(torch.float64 if truth else getattr(torch, scenario.dtype), first, truth)
    COUNTS.clear()
    FORMULAE["on"] = formula
    raised = ""
    with defaults(scenario.library), _undisturbed(scenario.threads), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(1)
        exact = gpytorch.settings.max_cholesky_size(10**6) if truth and scenario.exact else contextlib.nullcontext()
        try:
            with exact:
                scenario.program(see)
        except Exception as error:
            raised = worded(error)
        state = hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8]
    heard = (f"{w.category.__name__}: {w.message}"[:200] for w in caught)
    warned = frozenset(one for one in heard if not any(own in one for own in _ONCE))
    return Told(see.facts, raised, warned, state, dict(COUNTS), see.kappa)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("AUTOKERN")]:
            del os.environ[name]
        os.environ.update({"AUTOKERN_CALIBRATE": "never", **variables})
        yield


_home: list[str] = []
_models: dict[str, Any] = {}
"""What was fitted to a recorded profile: pure, and costly to fit anew for every scenario."""


@functools.cache
def _patches() -> list[Any]:
    """What autokern puts in: looked up once, for all modules that hold a function by value are searched for it."""
    return list(_patches_of_autokern())


_patches_of_autokern = install.patches


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    with (
        mock.patch.object(install, "patches", _patches),
        tempfile.TemporaryDirectory() as home,
        _environment(AUTOKERN_HOME=home),
    ):
        dispatch.reset()
        autokern.enable()
        _home.append(home)
        try:
            yield
        finally:
            _home.pop()
            autokern.disable()


@contextlib.contextmanager
def session(**orders: str) -> Iterator[None]:
    """A session of its own within `enabled`, with nothing but some ``AUTOKERN_*`` variables set."""
    with _environment(AUTOKERN_HOME=_home[-1], **orders):
        fresh = dispatch.reset()
        if "AUTOKERN_PROFILE" in orders:
            host = orders["AUTOKERN_PROFILE"]
            fresh._chooser = _models.get(host)
            _models[host] = fresh.chooser
        yield


def _left(found: list[Any]) -> dict[str, list[str]]:
    """Return the candidates that could serve what was dispatched, by op, in the order of the registry."""
    wanted: dict[str, set[str]] = {}
    for decision, _ in found:
        wanted.setdefault(decision.problem.op, set()).update(decision.order)
    return {
        op: [c.name for c in get(op).candidates if c.name in names and c.accuracy != "approximate" and not c.compiles]
        for op, names in wanted.items()
    }


def forced(scenario: Scenario, most: int, turn: int = 0) -> Iterator[tuple[str, Told]]:
    """Run without a profile, then with all ops forced at once until each candidate has run where it can.

    Where that takes more than `most` runs, it depends on `turn` which candidates come first.
    """
    todo: dict[str, list[str]] = {}
    done: set[tuple[str, str]] = set()
    failed: dict[tuple[str, str], int] = {}
    for k in range(most):
        order = {op: left[0] for op, left in todo.items() if left}
        if k and not order:
            return
        text = ",".join(f"{op}={name}" for op, name in order.items())
        with session(**({"AUTOKERN_FORCE": text} if text else {})):
            found = told(scenario)
            made = dispatch.decisions()
            ran = {(op, name) for op, counts in dispatch.stats().items() for name in counts}
        yield f"forced {text}" if text else "without a profile", found
        done |= ran
        for op, names in _left(made).items():
            known = todo.setdefault(op, [])
            more = [n for n in names if n not in known and (op, n) not in done and (op, n) not in failed]
            first = turn % len(more) if more else 0
            known += more[first:] + more[:first]
        for op, left in todo.items():
            if left and op in order and left[0] == order[op] and (op, left[0]) not in done:
                failed[op, left[0]] = failed.get((op, left[0]), 0) + 1
                left.append(left.pop(0))
            left[:] = [name for name in left if (op, name) not in done and failed.get((op, name), 0) < 2]


def runs(scenario: Scenario, host: Path, seed: int, most: int = 99) -> Iterator[tuple[str, Told]]:
    """Run a scenario in every way but stock, within `enabled`; yield names and what became of each."""
    with session(AUTOKERN_PROFILE=str(host)):
        found = told(scenario)
    yield host.stem, found
    yield from forced(scenario, min(most, scenario.most), seed)
    with session(AUTOKERN_FORCE=f"random:{seed}"):
        found = told(scenario)
    yield f"random:{seed}", found
