"""Measuring: candidates checked against float64 truth and timed side by side on one problem."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import msgspec
import torch

from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.core.recovery import recoverable
from autokern.system import host, memory_limit
from autokern.tuning import timer
from autokern.tuning.profile import Ban, Timing
from autokern.tuning.trial import Trialled, gradient_errors, relative_error, trial, truth

_log = logging.getLogger("autokern")

WORTHLESS = 0.3  # share of waiting for a core above which a timing is not kept
_MIN_TIME = {"quick": 1e-4, "full": 5e-4}
_ROUNDS = {"quick": (3, 7), "full": (5, 15)}
_CHECKED_ELEMENTS = 300_000  # larger results are checked only once in their group: truth costs more than timing
_BESIDE = 2  # times a candidate's memory that must be free: what it is compared with is there at the same time


class Measurer:
    """Measures problems, and bans candidates that fail or give wrong numbers; those that are banned do not run."""

    def __init__(self, level: str, banned: Iterable[Ban]) -> None:
        self._level = level
        self._out = {(b.op, b.candidate, b.dtype, b.device) for b in banned}
        self._checked: set[tuple[object, ...]] = set()
        self.banned: list[Ban] = []  # since
        self.setup: dict[str, float] = {}  # seconds of the first call of what compiles, by "op.candidate"
        self.compiling = 0.0  # seconds of all such calls together

    def runnable(self, problem: Problem, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return the candidates that are not banned and fit the memory twice; none where stock is not among them."""
        where = problem.dtype, problem.device
        usual = [c for c in candidates if (problem.op, c.name, *where) not in self._out]
        found = [c for c in usual if memory_limit.fits(_BESIDE * c.memory(problem), problem.device)]
        return found if any(c.name == "stock" for c in found) else []

    def timings(self, op: Op, problem: Problem, candidates: list[Candidate], seconds: float) -> dict[str, Timing]:
        """Return the timings of candidates in about so many seconds; none where they cannot be trusted."""
        candidates = self.runnable(problem, candidates)
        if len(candidates) < 2:
            return {}
        with torch.device("cpu"):  # the caller may have set another default
            args = op.sample(problem, torch.Generator().manual_seed(1234 + problem.n))
        calls, warm = dict[str, Callable[[], Trialled]](), dict[str, float]()
        errors, relative = dict[str, float](), dict[str, float]()
        gradient_error = exact = None
        for candidate in candidates:
            call = trial(op, candidate.run, problem, args)
            try:
                if candidate.compiles:
                    key, first_seconds = f"{op.name}.{candidate.name}", timer.once(call, lambda: None)
                    self.setup[key] = max(self.setup.get(key, 0.0), first_seconds)
                    self.compiling += first_seconds
                first = call()
                if candidate.accuracy == "approximate":
                    exact = exact or truth(op, problem, args)
                    relative[candidate.name] = relative_error(op, first, exact)
                elif (kind := _kind(candidate, problem)) not in self._checked:
                    if gradient_error is None:  # its unit is stock's own error, whichever candidate is checked first
                        own = "stock" not in calls or not problem.grad
                        gradient_error = gradient_errors(op, problem, args, first if own else calls["stock"]())
                    expected = candidate.error(problem)
                    slope = gradient_error(first, 0.0 if expected is None else expected.gradients)
                    errors[candidate.name] = float(max(op.check(problem, first.out, args), slope))
                    self._checked.add(kind)
                del first
                warm[candidate.name] = timer.once(call, host.settle)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if not recoverable(error, op, candidate.run):
                    raise
                _log.debug("candidate %s.%s failed on %s", op.name, candidate.name, problem, exc_info=True)
                if candidate.name == "stock":
                    return {}
                self._ban(candidate, problem, f"raised {type(error).__name__} on {problem}")
                continue
            if errors.get(candidate.name, 0.0) > 1 and not candidate.as_stock:
                self._ban(candidate, problem, f"error {errors[candidate.name]:.3g} times its bound on {problem}")
            else:
                calls[candidate.name] = call
        if len(calls) < 2:
            return {}
        min_time, rounds = _MIN_TIME[self._level], _ROUNDS[self._level]
        found = timer.compare(
            calls, synchronize=host.settle, seconds=seconds, warm=warm, min_time=min_time, rounds=rounds
        )
        return {
            n: msgspec.structs.replace(timing, error=errors.get(n, 0.0), relative_error=relative.get(n))
            for n, timing in trusted(found).items()
        }

    def _ban(self, candidate: Candidate, problem: Problem, reason: str) -> None:
        _log.info("banned %s.%s on this host: %s", problem.op, candidate.name, reason)
        self._out.add((problem.op, candidate.name, problem.dtype, problem.device))
        self.banned.append(Ban(problem.op, candidate.name, problem.dtype, problem.device, reason))


def trusted(timings: Mapping[str, Timing]) -> dict[str, Timing]:
    """Return the timings that tell something: none where stock itself was disturbed, or no other is left."""
    kept = {name: t for name, t in timings.items() if t.disturbed <= WORTHLESS}
    return kept if "stock" in kept and len(kept) > 1 else {}


def _kind(candidate: Candidate, problem: Problem) -> tuple[object, ...]:
    """Return what is checked once for a candidate: the variant if results are small, and otherwise the group."""
    large = problem.elements > _CHECKED_ELEMENTS
    return (*problem.group, candidate.name, () if large else problem.words, problem.batch > 1)
