"""Measuring: draw random problems between those of the ops' grids; check candidates and time them side by side.

A candidate of class ``approximate`` exceeds its op's bound by design. Its error is the largest error of an entry of the
result, or of a gradient, relative to the largest entry.
"""

from __future__ import annotations

import functools
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from autokern.core.errors import recoverable
from autokern.core.op import Candidate, Op, Run, rebuilt, tensors_in
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.core.state import inside
from autokern.system import host, memory
from autokern.tuning import timer
from autokern.tuning.profile import Ban, Timing

_log = logging.getLogger("autokern")

WORTHLESS = 0.3  # a timing that waited for a core for a larger share of its time is discarded
HOPELESS = 1e9  # recorded in place of an error that is NaN or infinite
_MIN_TIME = {"quick": 1e-4, "full": 5e-4}
_ROUNDS = {"quick": (3, 7), "full": (5, 15)}
_CHECKED_ELEMENTS = 300_000  # larger results are checked once, whatever the words: the truth costs more than timing
_BESIDE = 2  # multiple of a candidate's memory that must be free, since results are compared side by side
_EPS = {"float32": 2.0**-23, "float64": 2.0**-52}
_MOVES = 3  # number of random perturbations of the arguments, to see how rounding changes a gradient
_ROUNDINGS = 30  # a candidate's gradient may err by this multiple of that change
_LARGEST = {"qr": 1500, "cholesky": 3000, "kernel_matrix": 4000}  # largest n drawn, else that of the op's full grid
_MOST_WORK = {True: (2e10, 1e9), False: (2e11, 2e10)}  # flops and bytes of stock on the CPU (below a second), elsewhere
_MOST_BATCH = 256
_MOST_TRUTH = 2**25  # elements of a problem up to which float64 truth is computed to check approximate candidates
_TRIES = 20  # draws for each problem: where few sizes are allowed, most draws are repetitions or too large


class Trialled(NamedTuple):
    """Outcome of one trial: a candidate's result, and gradients with respect to the leaves of its arguments."""

    out: Any
    grads: tuple[torch.Tensor, ...]


class Measurer:
    """Measures problems, and bans candidates that fail or give wrong numbers; banned candidates do not run."""

    def __init__(self, level: str, banned: Iterable[Ban]) -> None:
        self._level = level
        self._out = {(b.op, b.candidate, b.dtype, b.device) for b in banned}
        self._checked: set[tuple[object, ...]] = set()
        self.banned: list[Ban] = []  # new bans
        self.setup: dict[str, float] = {}  # seconds of the first call of candidates that compile, by "op.candidate"
        self.compiling = 0.0  # seconds of all first calls that compile or run on accelerators

    def runnable(self, problem: Problem, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return the candidates that are not banned and fit the memory twice; empty unless stock is among them."""
        where = problem.dtype, problem.device
        usual = [c for c in candidates if (problem.op, c.name, *where) not in self._out]
        found = [c for c in usual if memory.fits(_BESIDE * c.memory(problem), problem.device)]
        return found if any(c.name == "stock" for c in found) else []

    def timings(
        self, op: Op, problem: Problem, candidates: list[Candidate], seconds: float, until: float = math.inf
    ) -> dict[str, Timing]:
        """Time candidates for about `seconds`; empty without trustworthy times, or if checks last beyond `until`."""
        candidates = self.runnable(problem, candidates)
        if len(candidates) < 2:
            return {}
        with torch.device("cpu"):  # the caller may have set another default
            args = op.sample(problem, torch.Generator().manual_seed(1234 + problem.n))
        calls, warm = dict[str, Callable[[], Trialled]](), dict[str, float]()
        told: dict[str, dict[str, float]] = {}  # errors, by candidate
        words = () if problem.elements > _CHECKED_ELEMENTS else problem.words
        gradient_error = exact = None
        for candidate in candidates:
            call = trial(op, candidate.run, problem, args)
            kind = *problem.group, candidate.name, words, problem.batch > 1
            try:
                began, first = time.perf_counter(), call()
                if candidate.compiles or problem.device != "cpu":  # an accelerator loads libraries at first calls
                    host.settle()
                    self.compiling += (spent := time.perf_counter() - began)
                    if candidate.compiles:
                        key = f"{problem.op}.{candidate.name}"
                        self.setup[key] = max(self.setup.get(key, 0.0), spent)
                if candidate.accuracy == "approximate":
                    exact = exact or truth(op, problem, args)
                    told[candidate.name] = {"relative_error": relative_error(op, first, exact)}
                elif kind not in self._checked:
                    if gradient_error is None:  # the unit is stock's error, whichever candidate is checked first
                        own = "stock" not in calls or not problem.grad
                        gradient_error = gradient_errors(op, problem, args, first if own else calls["stock"]())
                    slope = gradient_error(first)
                    told[candidate.name] = {"error": float(max(op.check(problem, first.out, args), slope))}
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
            if (wrong := told.get(candidate.name, {}).get("error", 0.0)) > 1 and not candidate.as_stock:
                self._ban(candidate, problem, f"error {wrong:.3g} times its bound on {problem}")
            else:
                calls[candidate.name] = call
            if time.perf_counter() > until:
                return {}
        if len(calls) < 2:
            return {}
        limits: dict[str, Any] = {"min_time": _MIN_TIME[self._level], "rounds": _ROUNDS[self._level]}
        found = timer.compare(calls, synchronize=host.settle, seconds=seconds, warm=warm, **limits)
        return {n: msgspec.structs.replace(timing, **told.get(n, {})) for n, timing in trusted(found).items()}

    def _ban(self, candidate: Candidate, problem: Problem, reason: str) -> None:
        _log.info("banned %s.%s on this host: %s", problem.op, candidate.name, reason)
        self._out.add((problem.op, candidate.name, problem.dtype, problem.device))
        self.banned.append(Ban(problem.op, candidate.name, problem.dtype, problem.device, reason))


def trusted(timings: Mapping[str, Timing]) -> dict[str, Timing]:
    """Return the timings that were not disturbed too much; empty unless stock and another candidate are left."""
    kept = {name: t for name, t in timings.items() if t.disturbed <= WORTHLESS}
    return kept if "stock" in kept and len(kept) > 1 else {}


def trial(op: Op, run: Run, problem: Problem, args: tuple[Any, ...]) -> Callable[[], Trialled]:
    """Return a function that runs a candidate and, for a problem with gradients, its backward pass."""
    leaves = tuple({id(t): t for t in tensors_in(args) if t.requires_grad}.values())
    cotangents: list[torch.Tensor] = []
    nested = any(candidate.parts and candidate.run is run for candidate in op.listed)
    shared = any(t.grad_fn is not None for t in leaves)  # parts of a caller's graph, which must be retained
    repeats = op.warm_repeats(problem)
    # `torch.autograd.grad` imports a computer algebra system at its first call with cotangents, for half a second
    backward: Any = torch.autograd.Variable._execution_engine.run_backward

    def call() -> Trialled:
        with torch.set_grad_enabled(bool(problem.grad)):
            fresh = rebuilt(args) if op.composite else args
            out = op.materialize(run(*fresh))
            for _ in range(repeats):
                out = op.materialize(run(*rebuilt(fresh)))
            if not problem.grad:
                return Trialled(out, ())
            outputs = tuple(tensors_in(op.canonical(out)))
        if not cotangents:
            generator = torch.Generator().manual_seed(7)
            for output in outputs:
                random = torch.rand(output.shape, generator=generator, dtype=torch.float32, device="cpu") - 0.5
                cotangents.append(random.to(dtype=output.dtype, device=output.device))
        roots = (pair for pair in zip(outputs, cotangents, strict=True) if pair[0].requires_grad)
        return Trialled(out, backward(*zip(*roots, strict=True), shared, False, leaves, False, accumulate_grad=False))

    return inside.having(active=False)(call) if nested else call


def truth(op: Op, problem: Problem, args: tuple[Any, ...], move: int | None = None) -> Trialled:
    """Return the op's reference in float64, with wanted gradients; `move` seeds changes of arguments by one eps."""
    generator, eps = torch.Generator().manual_seed(move or 0), _EPS[problem.dtype]

    def moved(values: torch.Tensor) -> torch.Tensor:
        sides = torch.randint(0, 2, values.shape, generator=generator, device="cpu").to(values) * 2 - 1
        return values * (1 + eps * sides)

    with torch.enable_grad():  # lazy arguments keep the grad mode in which they were made
        there = op.exact(args, None if move is None else moved)
    return trial(op, op.reference, problem, there)()


def relative_error(op: Op, found: Trialled, exact: Trialled) -> float:
    """Return the largest error of an entry of the result or a gradient, relative to its largest entry."""
    outs = gap(tensors_in(op.canonical(found.out)), tensors_in(op.canonical(exact.out)))
    return max(outs, gap(found.grads, exact.grads))


def gap(found: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]) -> float:
    """Return the largest difference between paired tensors, relative to the largest entry of each exact one."""
    worst = 0.0
    for one, other in zip(found, exact, strict=True):
        if other.numel():
            size = other.abs().max().item() or 1.0
            error = (one.detach().double() - other.detach().double()).abs().max().item() / size
            worst = max(worst, error if math.isfinite(error) else HOPELESS)
    return worst


def gradient_errors(op: Op, problem: Problem, args: tuple[Any, ...], stock: Trialled) -> Callable[[Trialled], float]:
    """Return a function of a Trialled: the error of its gradients in units of their bound.

    The bound is ten times stock's error against float64 truth, at least ``max(1000, 2 n) eps`` of the largest gradient;
    or 30 times the change of the gradient when every argument moves by one eps: cancellation leaves no more digits.
    """
    if not problem.grad:
        return lambda trialled: 0.0
    exact = truth(op, problem, args).grads
    unit = max(10 * gap(stock.grads, exact), max(1000, 2 * problem.n) * _EPS[problem.dtype])
    by_rounding = functools.cache(lambda: max(gap(truth(op, problem, args, m).grads, exact) for m in range(_MOVES)))

    def error(trialled: Trialled) -> float:
        found, largest = gap(trialled.grads, exact), unit
        if largest < found < HOPELESS:
            largest = max(largest, _ROUNDINGS * by_rounding())
        return found / largest

    return error


def contenders(problem: Problem, compiles: bool = False, free: int | None = None) -> list[Candidate]:
    """Return the candidates that may serve a problem within memory, stock first, without approximate ones."""
    free = host.available_memory(problem.device) if free is None else free
    exact = (c for c in get(problem.op).feasible(problem) if c.accuracy != "approximate" and c.compiles <= compiles)
    return [c for c in exact if c.name == "stock" or c.memory(problem) <= 0.5 * free]


def measurable(op: Op, problem: Problem, level: str, accuracy: str = "same") -> list[Candidate]:
    """Return the candidates that a calibration measures on a problem; approximate ones only if `accuracy` allows."""
    rough = accuracy == "approximate" and problem.elements <= _MOST_TRUTH
    usual = [c for c in op.feasible(problem) if not c.tight and (level == "full" or not c.compiles)]
    return [c for c in usual if rough or c.accuracy != "approximate"]


def draw(
    op: Op, count: int, dtypes: Sequence[str], device: str, seed: str, most: tuple[float, float] | None = None
) -> list[Problem]:
    """Return up to `count` random problems of log-uniform sizes; `most` are flops and bytes of one call of stock."""
    flops, moved = most or _MOST_WORK[device == "cpu"]
    grids = {dtype: grid for dtype in dtypes if (grid := op.grid("full", dtype, device))}
    dtypes, chance, free = list(grids), random.Random(seed), host.available_memory(device)
    every = next(iter(grids.values()), [])
    found, kinds = dict[Problem, None](), dict[object, Problem]()
    for p in every:
        if len(contenders(p, free=free)) > 1:
            kinds.setdefault((p.variant, p.grad, p.m == p.n, p.batch > 1), p)
    shapes = list(kinds.values())
    for attempt in range(_TRIES * count if shapes else 0):
        problem = _drawn(op, chance.choice(shapes), every, chance).replace(dtype=dtypes[attempt % len(dtypes)])
        work = op.features(problem)
        small = work.flops <= flops and work.bytes <= moved
        if small and problem not in found and len(contenders(problem, free=free)) > 1:
            found[problem] = None
        if len(found) == count:
            break
    return list(found)


def _drawn(op: Op, base: Problem, every: list[Problem], chance: random.Random) -> Problem:
    """Return a problem shaped as `base`, with random sizes between the smallest and largest of its variant's grid."""
    grid = [p for p in every if p.variant == base.variant]

    def size(name: str, low: int = 1) -> int:
        values = {getattr(p, name) for p in grid if getattr(p, name) > 0}
        if name in ("d", "rhs") and len(values) == 1 and values != {1}:  # the grid has one case of a rare variant
            values = {getattr(p, name) for p in every if getattr(p, name) > 0}
        high = _LARGEST.get(op.name, max(values)) if name == "n" else max(values)
        low = max(low, min(values))
        return round(math.exp(chance.uniform(math.log(low), math.log(max(low, high)))))

    n = size("n")
    changes = {"n": n, "m": n if base.m == base.n else size("m", low=n if all(p.m >= p.n for p in grid) else 1)}
    if base.d:
        changes["d"] = size("d", low=2 if "ard" in base.words else 1)
    if base.rhs:
        changes["rhs"] = size("rhs")
    if base.batch > 1:
        changes["batch"] = min(_MOST_BATCH, size("batch", low=2))
    return base.replace(**changes)
