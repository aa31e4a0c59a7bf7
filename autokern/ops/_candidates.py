"""Shared by the ops: rules of candidates, their memory, devices and threads, and ops whose stock iterates.

Stock's conjugate gradients take more products on real models than on samples, and their gradients have errors. A study
counts these products and measures these errors; `calibration/large.py --ship` writes them to `iterations.json`.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import importlib.resources
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from linear_operator import settings as library
from linear_operator.utils.errors import NanError, NotPSDError
from msgspec import structs

from autokern.core.op import Op, Run, rebuilt, tensors_in
from autokern.core.problem import Candidate, Error, Problem
from autokern.core.state import once, permitted
from autokern.kernels.family import known_family
from autokern.model.libraries import LONGEST, TOLERANCE
from autokern.ops._problems import families, iterates
from autokern.system import host, threads

CG_VECTORS = 150
"""Vectors that conjugate gradients hold: about eight sets of eleven columns, and a preconditioner of rank 15."""
_SMALL = {"float64": 400, "float32": 255}
_MAY_COST = 1.3  # least share of stock's time that exact gradients may take where stock's gradients are inaccurate
_REST = 12.0  # time of the rest of a training step, in units of a product
Rule = Callable[[Problem], "str | None"]  # says why a candidate cannot serve a problem, or None
LOW_RANK = "the library solves a linear kernel by its rank"
"""Why stock serves a linear kernel alone: in few dimensions its solve is far cheaper than a factor of all points."""


def only(words: str, serves: Callable[[Problem], bool]) -> Rule:
    """Return the rule of a candidate that cannot serve other problems, for the reason `words`."""
    return lambda problem: None if serves(problem) else words


def every(*rules: Rule) -> Rule:
    """Return one rule for several, all of which must hold; the first reason counts."""
    return lambda problem: next((why for rule in rules if (why := rule(problem)) is not None), None)


needs_few = only("only for batches of at most 64 matrices", lambda p: p.batch <= 64)
"""For candidates that use all threads for each matrix."""
of_many = only(
    "only for one matrix of 1000 rows or more on the CPU", lambda p: p.n >= 1000 and p.batch <= 1 and p.device == "cpu"
)
"""For candidates that iterate or check their results; with fewer rows a factorisation is faster."""
needs_tall = only("only for at least twice as many rows as columns", lambda p: p.m >= 2 * p.n)
needs_cpu_detour = only("the data is on the CPU already", lambda p: p.device != "cpu")
needs_accelerator = only("the data is on the accelerator already", lambda p: p.device == "cpu")
of_trees = only("only for stationary kernels", lambda p: all(known_family(name) for name in families(p)))
"""For candidates that need a tree of known families."""


def squares(problem: Problem, plain: float, graded: float | None = None) -> int:
    """Return the bytes of so many matrices ``(n, n)`` without gradients, and with them (default: as many)."""
    count = plain if graded is None or not problem.grad else graded
    return int(count * problem.batch * problem.n**2 * problem.itemsize)


def moved(run: Run, there: torch.device, args: tuple[Any, ...]) -> Any:
    """Run with all tensors of the arguments on a device, and return the results on the device of the arguments."""
    home = next(tensors_in(args)).device
    return rebuilt(run(*rebuilt(args, lambda t: t.to(there))), lambda t: t.to(home))


def on_other_devices(
    op: Op,
    run: Run,
    summary: str,
    *,
    read: Callable[..., tuple[Any, ...]] = lambda *args: args,
    on_cpu: Rule | None = needs_cpu_detour,
    on_accelerator: Rule = needs_accelerator,
    **options: Any,
) -> None:
    """Register the candidates ``cpu`` and ``accelerator``, whose name stands for ``{}`` in `summary`.

    ``cpu`` is left out if `on_cpu` is None, for ops in which it hardly ever won on two recorded GPUs. `read` maps the
    op's arguments to those of `run`, whose tensors are moved to the device.
    """

    def register(name: str, unsupported: Rule) -> None:
        def there() -> Any:
            return torch.device("cpu") if name == "cpu" else host.accelerator()

        def unavailable(device: str) -> str | None:
            return "this machine has no accelerator" if there() is None else None

        told = summary.format("CPU" if name == "cpu" else name)
        op.candidate(name, unsupported=unsupported, unavailable=unavailable, summary=told, **options)(
            lambda *args: moved(run, there(), read(*args))
        )

    if on_cpu is not None:
        register("cpu", on_cpu)
    register("accelerator", on_accelerator)


def with_one_thread(op: Op, name: str) -> None:
    """Register a candidate for one thread, its backward pass included, as ``name@1``."""
    whole = op[name]

    on_cpu = only("the number of threads matters only on a CPU", lambda p: p.device == "cpu")

    def unavailable(device: str) -> str | None:
        if "threads" not in permitted:
            return "AUTOKERN_THREADS=off leaves the number of threads alone"
        if threads.ceiling() == 1:
            return "this process has one thread"
        return whole.unavailable(device)

    own = {"name": f"{name}@1", "summary": f"{whole.summary.rstrip('.')}; one thread.", "threads": 1}
    own |= {"unsupported": every(on_cpu, whole.unsupported), "unavailable": unavailable}
    op.listed.append(structs.replace(whole, run=threads.limited(whole.run, 1), **own))


def as_asked(exact: bool, n: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which stock factorises n rows if `exact`; real calls have such settings already."""
    asked = exact and n > library.max_cholesky_size.value()
    return library.fast_computations(False, False, False) if asked else contextlib.nullcontext()


def is_few(problem: Problem) -> bool:
    """Whether points are so few that arrays need no measurement, twice as many for a mixture."""
    return problem.n * problem.batch <= (2 if "mixture" in families(problem) else 1) * _SMALL[problem.dtype]


class OpOfParts(Op):
    """An Op whose stock calls other ops, among them a factorisation, whose errors it may raise."""

    raises = (NanError, NotPSDError)
    composite = True
    looseness: Error | None = None  # of stock, where it iterates to a loose tolerance above `max_cholesky_size`

    def small(self, problem: Problem) -> bool:
        """Whether `arrays`, where it can serve, needs no measurement."""
        return is_few(problem)

    def default_candidate(self, problem: Problem) -> str:
        """Return `arrays` for small problems, in which stock's modules, autograd nodes and launches dominate."""
        if problem.device != "cpu":  # computed on the CPU, and an accelerator gains sooner by more points
            problem = problem.replace(m=2 * problem.m, n=2 * problem.n)
        return "arrays" if self.small(problem) else "stock"

    def approximates(self, problem: Problem) -> bool:
        return self.looseness is not None and iterates(problem)

    def expected_error(self, problem: Problem, candidate: Candidate) -> Error | None:
        return self.looseness if candidate.loose and self.approximates(problem) else candidate.error(problem)


class Counted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Results of the study of stock's conjugate gradients."""

    least: int  # smallest number of products of any system
    points: list[int]
    usual: list[float]  # typical numbers of products at the sizes `points`
    errors: list[float]  # lowest and highest relative error of stock's gradients
    alone: float  # the library's time over that of the candidate `stock`, whose parts are dispatched
    exact: int  # points up to which exact candidates serve without measurements


@functools.cache
def counted() -> Counted:
    text = importlib.resources.files("autokern.ops").joinpath("iterations.json").read_bytes()
    return msgspec.json.decode(text, type=Counted)


class Iterated(OpOfParts):
    """An op whose stock spends its time in products: densities and solves."""

    @once
    def looseness(self) -> Error:  # type: ignore[override]
        low, high = (100 * error for error in counted().errors)
        worth = f"its gradients are off by {low:.0f} % to {high:.0f} % on models like this"
        return Error(f"{low:.0f}-{high:.0f} %", f"stock iterates, by default to a tolerance of 1: {worth}")

    def may_cost(self, problem: Problem) -> float:
        """Return how many times stock's time on a sample an exact candidate may take.

        Real systems take more products than samples, and on a CPU the library by itself takes longer than the candidate
        `stock`, whose parts are dispatched. On a CPU with more points than `exact_up_to`, iterations are much faster.
        """
        if not iterates(problem) or (problem.device == "cpu" and problem.n > exact_up_to(problem)):
            return 1.0
        known = counted()
        usual = known.usual[max(0, bisect.bisect_right(known.points, problem.n) - 1)]
        harder = (max(usual, known.least) + _REST) / (known.least + _REST)
        return harder * (max(_MAY_COST, known.alone) if problem.device == "cpu" else _MAY_COST)


def to_a_residual(problem: Problem, more: str = "") -> Error:
    """Return the error of a candidate that solves by `density.systems`; `more` ends the text."""
    goal = f"{TOLERANCE[getattr(torch, problem.dtype)]:.0e}"
    return Error(f"residual {goal}", f"solved to a relative residual of {goal}, or your tighter cg_tolerance{more}")


def own_obeys(name: str, value: float, problem: Problem) -> bool:
    """Whether autokern's preconditioned iterations obey the library setting `name` at `value`."""
    some = {"max_cg_iterations": value >= LONGEST, "min_preconditioning_size": value <= problem.n}
    return some.get(name, name in ("max_cholesky_size", "terminate_cg_by_size", "num_trace_samples"))


def or_iterate(stock: Run, numbers: Callable[[Any], Iterable[torch.Tensor]] = tensors_in) -> Callable[[Run], Run]:
    """Return a decorator of exact candidates: where stock iterates, it serves after a failed factorisation or a NaN.

    The last argument, or its `exact`, says whether stock factorises; `numbers` returns tensors that must be finite.
    """

    def decorate(run: Run) -> Run:
        @functools.wraps(run)
        def either(*args: Any) -> Any:
            exact = getattr(args[-1], "exact", args[-1])
            try:
                found = run(*args)
            except (NanError, NotPSDError):
                if exact:
                    raise
            else:
                if exact or all(t.isfinite().all() for t in numbers(found)):
                    return found
            return stock(*args)

        return either

    return decorate


def exact_up_to(problem: Problem) -> int:
    """Return the number of points up to which an exact candidate serves without measurements, 0 under user orders."""
    return counted().exact if iterates(problem) and not problem.orders else 0
