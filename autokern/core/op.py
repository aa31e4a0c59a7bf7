"""Op: a mathematical operation and the ways to compute it.

An Op states a contract once (its arguments, the bound of its error, the sizes worth measuring); each Candidate is one
decorated function beside it. `model/marginal.py` registers types with `tensors_in` and `rebuilt`.
"""

from __future__ import annotations

import abc
import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch

from autokern.core import registry
from autokern.core.errors import AutokernError, SettingsError
from autokern.core.problem import ACCURACIES, SIZES, Candidate, Error, Feasibility, Features, Problem, Run, nothing

__all__ = ["ACCURACIES", "LEVELS", "Candidate", "Op", "Run", "tensors_in"]

Altered = Callable[[torch.Tensor], torch.Tensor]
LEVELS = ("quick", "full")
WEIGHTS = {"m": 0.7, "n": 0.7, "d": 0.25, "rhs": 0.8, "batch": 0.5}  # distance when a size doubles; of m and n, 1


class Op(abc.ABC):
    """A mathematical operation with a contract: one file in `autokern/ops/`, a subclass, one instance, candidates.

    Creating the instance registers it (`docs/add-a-candidate.md`). The first candidate is ``stock``: what the library
    does without autokern. Stock of a composite op calls other ops, which are then dispatched; every trial gets fresh
    copies of its arguments, which may cache results. Its `nesting` exceeds that of every op that its candidates call.
    """

    name: str  # unique
    summary: str  # what is computed, in one line
    raises: tuple[type[BaseException], ...] = ()  # errors of the contract, which dispatch passes on unchanged
    composite: bool = False
    nesting: int = 0

    def __init__(self) -> None:
        self.listed: list[Candidate] = []  # the candidates registered so far; `candidates` loads plugins first
        registry.add(self)

    @abc.abstractmethod
    def key(self, *args: Any, **kwargs: Any) -> Any:
        """Return a hashable that determines the problem of these arguments; every call computes it, so be cheap."""

    @abc.abstractmethod
    def problem_of(self, *args: Any, **kwargs: Any) -> Problem | None:
        """Return the Problem of these arguments, or None where the op does not serve them and stock must run."""

    @abc.abstractmethod
    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op in the plainest differentiable way; its float64 result is the truth in all checks."""

    @abc.abstractmethod
    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        """Return valid random arguments of a problem; leaves require gradients if the problem does."""

    @abc.abstractmethod
    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        """Return typical problems, few (``quick``) or many (``full``); calibrations draw other sizes of their kinds."""

    @abc.abstractmethod
    def features(self, problem: Problem) -> Features:
        """Return the work counts of stock."""

    @abc.abstractmethod
    def memory(self, problem: Problem) -> int:
        """Return the bytes of results and workspaces of a plain implementation."""

    def converted(self, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """Return a copy of arguments in another precision."""
        return converted(args, dtype)

    def exact(self, args: tuple[Any, ...], altered: Altered | None) -> tuple[Any, ...]:
        """Return a copy of arguments in float64, `altered` where floating, whose leaves are in the same order."""
        return converted(args, torch.float64, altered or itself)

    def check(self, problem: Problem, out: Any, args: tuple[Any, ...]) -> float:
        """Return the error of a result against float64 truth, in units of its bound.

        The bound is the largest of 100 times the rounding error of the reference (scaled from a run in float32), ten
        times stock's error unless stock approximates, and ``max(1000, 10 n) eps`` times the largest entry.
        """
        dtype, graded = getattr(torch, problem.dtype), bool(problem.grad)
        eps, exact = torch.finfo(dtype).eps, self._found(self.reference, args, torch.float64, graded)

        def errors(found: Iterable[torch.Tensor]) -> list[float]:
            pairs = zip(found, exact, strict=True)
            return [float((t.detach().double() - truth).abs().max().nan_to_num(math.inf)) for t, truth in pairs]

        own, least = errors(tensors_in((out,))), max(1000, 10 * problem.n) * eps
        units = [max(1e-300, least * float(truth.abs().max())) for truth in exact]
        if any(error > unit for error, unit in zip(own, units, strict=True)):
            others = [(100 * eps / torch.finfo(torch.float32).eps, self.reference, torch.float32)]
            others += [] if self.approximates(problem) else [(10.0, self.stock.run, dtype)]
            for factor, run, of in others:
                rounded = errors(self._found(run, args, of, graded))
                units = [max(u, factor * e) if math.isfinite(e) else u for u, e in zip(units, rounded, strict=True)]
        return max((error / unit for error, unit in zip(own, units, strict=True)), default=0.0)

    def _found(self, run: Run, args: tuple[Any, ...], dtype: torch.dtype, graded: bool) -> list[torch.Tensor]:
        """Return the tensors of a result for a copy of the arguments."""
        with torch.enable_grad():  # lazy arguments keep the grad mode in which they were made
            there = self.converted(args, dtype)
        with torch.set_grad_enabled(graded):
            return [t.detach() for t in tensors_in((self.materialize(run(*there)),))]

    def canonical(self, out: Any) -> Any:
        """Return a result in its unique form (the signs of a QR fixed, say), by which gradients are compared."""
        return out

    def materialize(self, out: Any) -> Any:
        """Compute the parts of a lazy result that callers read; they are timed, checked and compared in its place."""
        return out

    def warm_repeats(self, problem: Problem) -> int:
        """Return how often a trial repeats the call with caches filled by the first call."""
        return 0

    def approximates(self, problem: Problem) -> bool:
        """Whether stock only approximates, so that a better candidate may take its place at the same speed."""
        return False

    def may_cost(self, problem: Problem) -> float:
        """Return the most time of an exact result on samples, in units of stock's; 1 where stock is accurate enough."""
        return 1.0

    def expected_error(self, problem: Problem, candidate: Candidate) -> Error | None:
        """Return the error to expect of a candidate; None where its results are within the bound of the contract."""
        return candidate.error(problem)

    def remark(self, problem: Problem) -> str:
        """Return what the times of the candidates do not say."""
        return ""

    def default_candidate(self, problem: Problem) -> str:
        """Return the candidate of an unmeasured problem: stock, unless it needs far more operations than another."""
        return "stock"

    def candidate(
        self,
        name: str,
        *,
        accuracy: str = "same",
        unsupported: Callable[[Problem], str | None] = nothing,
        obeys: Callable[[str, float, Problem], bool | None] = nothing,
        **fields: Any,
    ) -> Callable[[Run], Run]:
        """Return a decorator that registers a function as a candidate; the first one must be ``stock``.

        Further `fields` are those of `Candidate`; memory is the op's by default. The candidate cannot serve if the user
        changed a library setting and ``obeys(name, value, problem)`` is false.
        """
        is_stock = name == "stock"
        if accuracy not in ACCURACIES:
            raise AutokernError(f"{self.name}.{name}: accuracy {accuracy!r} is none of {', '.join(ACCURACIES)}")
        if any(there.name == name for there in self.listed) or (not self.listed) != is_stock:
            raise AutokernError(f"{self.name}.{name}: registered twice, or not after 'stock'")

        def why(problem: Problem) -> str | None:
            orders = problem.orders.items() if "order:" in problem.variant else ()
            ignored = [f"{order}({value:g})" for order, value in orders if not obeys(order, value, problem)]
            return f"it does not obey {', '.join(ignored)}, which you set" if ignored else unsupported(problem)

        def register(run: Run) -> Run:
            given = {"memory": self.memory, "summary": (run.__doc__ or "").strip().partition("\n")[0], **fields}
            if is_stock:
                given |= {"as_stock": True, "parts": self.composite}
            self.listed.append(Candidate(name, run, accuracy, unsupported if is_stock else why, **given))
            return run

        return register

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates, stock first; the first access loads plugins."""
        registry.load(self.name)
        return self.listed

    @property
    def stock(self) -> Candidate:
        """The candidate that runs the hooked library's own code."""
        return self.listed[0]

    def names(self) -> list[str]:
        """Names of all candidates, stock first."""
        return [candidate.name for candidate in self.candidates]

    def __getitem__(self, name: str) -> Candidate:
        listed = (candidate for candidate in self.listed if candidate.name == name)
        found = next(listed, None) or next((c for c in self.candidates if c.name == name), None)
        if found is None:
            raise SettingsError(f"op {self.name} has no candidate {name!r}; it has {', '.join(self.names())}")
        return found

    def feasible(self, problem: Problem) -> list[Candidate]:
        """Candidates that can serve a problem, stock first, whatever their accuracy."""
        return Feasibility(self, problem).feasible()

    def coordinates(self, problem: Problem) -> tuple[float, ...]:
        """Weighted sizes in octaves; their distance is that between two problems."""
        return tuple(WEIGHTS[size] * math.log2(1 + getattr(problem, size)) for size in SIZES)


@functools.singledispatch
def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors and the parameters of modules in nested arguments, in order and with repetitions."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from tensors_in(item)


def itself(leaf: Any) -> Any:
    """Return a leaf as it is."""
    return leaf


@functools.singledispatch
def rebuilt(value: Any, leaf: Callable[[Any], Any] = itself) -> Any:
    """Return a copy without caches, with `leaf` applied to each tensor and module."""
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return leaf(value)
    if not isinstance(value, (tuple, list)) or isinstance(value, torch.Size):
        return value
    return getattr(value, "_make", type(value))(rebuilt(item, leaf) for item in value)


def copied(root: torch.nn.Module) -> Any:
    """Return a deep copy without parts of the original, which the library's copies of some kernels share."""
    memo: dict[int, Any] = {}
    made, own = copy.deepcopy(root, memo), {*root.modules()}
    for part in [part for part in made.modules() if part not in own]:
        part._modules.update([(name, copy.deepcopy(one, memo)) for name, one in part._modules.items() if one in own])
    return made


def converted(args: tuple[Any, ...], dtype: torch.dtype, altered: Altered = itself) -> tuple[Any, ...]:
    """Copy arguments to autograd leaves of a dtype, `altered` where floating; a repeated tensor is copied once."""
    copies: dict[int, Any] = {}

    def leaf(value: Any) -> Any:
        if id(value) not in copies:
            if isinstance(value, torch.Tensor):
                plain = altered(value.detach().to(dtype)) if value.is_floating_point() else value
                copies[id(value)] = plain.requires_grad_(value.requires_grad)
            else:
                copies[id(value)] = copied(value).to(dtype)
                for parameter in copies[id(value)].parameters():
                    parameter.data.copy_(altered(parameter.detach()))
        return copies[id(value)]

    return cast("tuple[Any, ...]", rebuilt(args, leaf))
