"""Op: a mathematical operation and the ways to compute it.

An Op states a contract once (what its arguments mean, what counts as right, which sizes are worth measuring); each
Candidate is one way to meet it. Tests, calibration, the command line and the docs iterate the registry, so a new
candidate is one decorated function beside its Op.
"""

from __future__ import annotations

import abc
import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autokern.core import registry
from autokern.core.candidate import ACCURACIES, Candidate, Error, Obeys, Run, nothing, obedient
from autokern.core.errors import AutokernError, SettingsError
from autokern.core.problem import SIZES, Features, Problem

__all__ = ["ACCURACIES", "LEVELS", "Candidate", "Op", "Run", "inside"]

LEVELS = ("quick", "full")
WEIGHTS = {"m": 0.7, "n": 0.7, "d": 0.25, "rhs": 0.8, "batch": 0.5}
"""How far apart an octave of each size puts two problems; doubling both sides of a matrix is one octave."""


class _Inside(threading.local):
    """What this thread is doing."""

    active = False  # it runs a candidate, so that its calls are not dispatched again
    measuring = False  # it calibrates
    formless = False  # it multiplies kernel matrices without forming them

    @contextlib.contextmanager
    def without_matrices(self) -> Iterator[None]:
        """Multiply kernel matrices without forming them."""
        before, self.formless = self.formless, True
        try:
            yield
        finally:
            self.formless = before


inside = _Inside()


class Op(abc.ABC):
    """A mathematical operation with a contract: one file in `autokern/ops/`, a subclass, one instance, candidates.

    Creating the instance registers it; tests, calibration, the command line and the docs find it there. Eight methods
    must be written, the others have defaults. The first candidate is ``stock``: what the library does without autokern.
    `docs/add-a-candidate.md` shows a complete file.

    Parameters
    ----------
    name : str
        Unique name.
    summary : str
        What is computed, in one line.
    contract : str
        What every result must satisfy, with the bound that `check` measures in.
    raises : tuple of exception types
        Errors that belong to the contract; dispatch passes them on unchanged.
    composite : bool
        Whether stock is made of calls that are ops of their own, which then are dispatched inside of it. Its arguments
        may keep caches, so every trial gets fresh ones.
    nesting : int
        Larger than that of every op which its candidates call: a calibration measures the innermost ops first.

    Attributes
    ----------
    listed : list of Candidate
        The candidates that are registered so far; `candidates` loads the plugins first.
    """

    name: str
    summary: str
    contract: str
    raises: tuple[type[BaseException], ...] = ()
    composite: bool = False
    nesting: int = 0

    def __init__(self) -> None:
        self.listed: list[Candidate] = []
        registry.add(self)

    @abc.abstractmethod
    def key(self, *args: Any, **kwargs: Any) -> Any:
        """Return something hashable that determines the problem of these arguments; every call asks, so cheap."""

    @abc.abstractmethod
    def problem_of(self, *args: Any, **kwargs: Any) -> Problem | None:
        """Return the Problem of these arguments, or None where the op does not serve them and stock must run."""

    @abc.abstractmethod
    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op in the plainest differentiable way; run in float64 it is the truth."""

    @abc.abstractmethod
    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        """Return valid random arguments of a problem; leaves require gradients if the problem does."""

    @abc.abstractmethod
    def check(self, problem: Problem, out: Any, args: tuple[Any, ...]) -> float:
        """Return the error of a result against float64 truth, in units of the contract's bound."""

    @abc.abstractmethod
    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        """Return telling problems, few (``quick``) or many (``full``), of whose kinds calibrations draw others."""

    @abc.abstractmethod
    def features(self, problem: Problem) -> Features:
        """Return the Features of a plain implementation; candidates that work otherwise have their own."""

    @abc.abstractmethod
    def memory(self, problem: Problem) -> int:
        """Return the bytes of results and workspaces of a plain implementation."""

    def nearest(self, problem: Problem) -> Problem:
        """Return a problem that there is, near to one of random sizes: points in a structure are not of any number."""
        return problem

    def canonical(self, out: Any) -> Any:
        """Return a result in the form that the contract makes unique (signs of a QR), to compare gradients by."""
        return out

    def materialize(self, out: Any) -> Any:
        """Compute the parts of a lazy result that callers read: they are timed, checked and compared in its place."""
        return out

    def warm_repeats(self, problem: Problem) -> int:
        """Return how often a trial repeats the call on the caches that the first one has filled."""
        return 0

    def approximates(self, problem: Problem) -> bool:
        """Whether stock only approximates, so that a better candidate may take its place at the same speed."""
        return False

    def may_cost(self, problem: Problem) -> float:
        """Return up to how many times stock's time exact is preferred, on samples; 1 where stock is close enough."""
        return 1.0

    def remark(self, problem: Problem) -> str:
        """Return in words what stock's answer is worth where it approximates; empty where that is not known."""
        return ""

    def expected_error(self, problem: Problem, candidate: Candidate) -> Error | None:
        """Return the error to expect of a candidate; None where its results are within the bound of the contract."""
        return candidate.error(problem)

    def default_candidate(self, problem: Problem) -> str:
        """Return the candidate that runs while nothing is measured: stock, unless counting leaves no doubt."""
        return "stock"

    def candidate(
        self,
        name: str,
        *,
        accuracy: str = "same",
        unsupported: Callable[[Problem], str | None] = nothing,
        obeys: Obeys = nothing,
        **fields: Any,
    ) -> Callable[[Run], Run]:
        """Return a decorator that registers a function as a candidate; the first one must be ``stock``.

        `Candidate` says what the arguments are, and what further ones there may be; memory and features are the op's
        by default. `obeys` says whether the candidate obeys a value of a setting of the libraries, by its name, for a
        problem; one that does not cannot serve where the user changed it.
        """
        is_stock = name == "stock"
        if accuracy not in ACCURACIES:
            raise AutokernError(f"{self.name}.{name}: accuracy {accuracy!r} is none of {', '.join(ACCURACIES)}")
        if any(there.name == name for there in self.listed) or (not self.listed) != is_stock:
            raise AutokernError(f"{self.name}.{name}: registered twice, or not after 'stock'")

        def register(run: Run) -> Run:
            given = {"memory": self.memory, "features": self.features, **fields}
            given["summary"] = (run.__doc__ or "").strip().partition("\n")[0]
            if is_stock:
                given |= {"as_stock": True, "parts": self.composite}
            why = unsupported if is_stock else obedient(unsupported, obeys)
            self.listed.append(Candidate(name, run, accuracy, why, **given))
            return run

        return register

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates, stock first; plugins are loaded when this is first asked for."""
        registry.load(self.name)
        return self.listed

    @property
    def stock(self) -> Candidate:
        """The candidate that does exactly what the hooked library would have done."""
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
        """Sizes in octaves: the place of a problem among those that were measured."""
        return tuple(WEIGHTS[size] * math.log2(1 + getattr(problem, size)) for size in SIZES)


class Feasibility:
    """The table of one problem that a decision is made from: each entry is evaluated at most once, when first read."""

    __slots__ = ("_memory", "_reasons", "candidates", "op", "problem")

    def __init__(self, op: Op, problem: Problem) -> None:
        self.op, self.problem = op, problem
        self.candidates = tuple(op.candidates)
        self._reasons: dict[str, str | None] = {}
        self._memory: dict[str, int] | None = None

    def why_not(self, candidate: Candidate) -> str | None:
        """Return why a candidate cannot serve the problem, or None where it can."""
        name = candidate.name
        if name not in self._reasons:
            why = candidate.unsupported(self.problem)
            self._reasons[name] = candidate.unavailable(self.problem.device) if why is None else why
        return self._reasons[name]

    def feasible(self) -> list[Candidate]:
        """Candidates that can serve the problem, stock first, whatever their accuracy and memory."""
        return [c for c in self.candidates if self.why_not(c) is None]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that each candidate takes at its peak, results included, whether it can serve the problem or not."""
        if self._memory is None:
            self._memory = {c.name: c.memory(self.problem) for c in self.candidates}
        return self._memory
