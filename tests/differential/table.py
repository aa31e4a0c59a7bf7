"""The table of scenarios: small seeded programs, each with what it may differ in and why.

A program gets a `See`, builds its model and data afresh, and notes what it computed. It runs many times: as stock, as
autokern in several ways, and where it asks for it as stock without its first prediction (`See.first`, for models whose
caches the library lets grow stale) and in float64 or by exact solves (`See.truth`, for what stock only approximates).
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch

COUNTS: dict[str, int] = {}
"""Calls of user code in the present run, by name."""
FORMULAE = {"on": False}
"""Whether kernels are those of their formulae on plain distances, as `Scenario.formula` asks for."""
TABLE: dict[str, Scenario] = {}
Facts = dict[str, Any]


def count(name: str) -> None:
    COUNTS[name] = COUNTS.get(name, 0) + 1


def worded(error: BaseException) -> str:
    """An exception without its numbers: which minor is found indefinite is a matter of rounding."""
    text = re.sub(r"[-+.e\d]*\d", "#", str(error).partition("\n")[0].partition(": [torch")[0])
    return f"{type(error).__name__}: {text[:160]}"


class See:
    """What a program sees of its run, and where it notes what it computed."""

    def __init__(self, dtype: torch.dtype, first: bool = True, truth: bool = False) -> None:
        self.dtype, self.facts = dtype, Facts()
        self.first = first  # whether what only fills caches is done: the first of two predictions
        self.truth = truth  # whether this run is the one in float64 and by exact solves
        self.kappa = 0.0  # what `Scenario.kappa` is at least, as found out in the run for the truth

    def __call__(self, name: str, value: Any) -> None:
        """Note a tensor, a number, a text, or a sequence of these."""
        assert name not in self.facts, f"{name} is noted twice"
        if isinstance(value, torch.Tensor):
            kept = value.detach()
            # What inference mode made is copied outside of it, so that it compares as any other.
            self.facts[name] = kept.clone() if kept.device.type != "meta" else str(tuple(kept.shape))
            self.facts[f"{name} kind"] = f"{type(value).__name__}, graph {value.requires_grad}, on {value.device}"
        elif isinstance(value, (tuple, list)):
            self.facts[f"{name} length"] = len(value)
            for k, part in enumerate(value):
                self(f"{name} {k}", part)
        else:
            self.facts[name] = value

    def grads(self, name: str, of: torch.Tensor, by: Any, **options: Any) -> None:
        """Note the gradients of the sum of a tensor by named tensors, those of a module by default."""
        named = dict(by.named_parameters()) if isinstance(by, torch.nn.Module) else dict(by)
        named = {one: t for one, t in named.items() if t.requires_grad}
        options = {"allow_unused": True, "retain_graph": True, **options}
        found = torch.autograd.grad(of.sum(), list(named.values()), **options)
        for one, gradient in zip(named, found, strict=True):
            self(f"{name} by {one}", gradient)

    def posterior(self, name: str, p: Any, joint: bool = True) -> None:
        """Note what users read of a distribution."""
        self(f"{name} type", type(p).__name__)
        self(f"{name} shapes", f"{tuple(p.batch_shape)} {tuple(p.event_shape)}")
        self(f"{name} mean", p.mean)
        self(f"{name} variance", p.variance)
        if joint:
            self(f"{name} covariance", p.covariance_matrix)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Note what is raised inside, and go on after it."""
        try:
            yield
        except Exception as error:
            self(name, worded(error))
        else:
            self(name, "nothing raised")


Program = Callable[[See], None]


@dataclass(frozen=True)
class Scenario:
    """A program, and how its runs are compared.

    What is computed in float32 is held against the truth in float64: the error is at most twice stock's and the
    rounding of a few operations. `stale`, `exact` and `formula` are reasons, or empty: why what stock tells in the run
    without `See.first` will do as well, why stock's values are only an approximation, so that the truth of exact solves
    is asked for, and why derivatives may be those of the formula as well as stock's own.
    """

    name: str
    program: Program
    dtype: str = "float64"
    library: str = "gpytorch"  # whose defaults hold: BoTorch changes several when it is imported
    kappa: float = 1.0  # by what rounding errors are amplified, roughly the condition number over a thousand
    floor: float = 1e-2  # below it entries count as rounding: what cancels to nothing was a sum of ones
    stale: str = ""
    fresh: bool = False  # whether of the two that `stale` is about only a fresh model's will do
    exact: str = ""
    formula: str = ""
    may: dict[str, str] = field(default_factory=dict)  # why a fact, "warnings" or "random state" is not compared at all
    threads: int = 1
    most: int = 14  # runs by force, where they are long
    rare: bool = False  # a sibling of others that the fast tests run


_OPTIONS = {f.name for f in fields(Scenario)} - {"name", "program"}


_MATERN12 = 30.0
"""Stock's distances of equal points are not 0 but 3e-8, and this kernel's slope there is 1: so much of it is error."""


def cases(**values: Any) -> list[dict[str, Any]]:
    """All combinations of values; a value that is no list is that of all."""
    lists = [v if isinstance(v, list) else [v] for v in values.values()]
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*lists)]


def scenarios(*groups: list[dict[str, Any]], **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that registers a program once for each case.

    What a case names that a `Scenario` has is the scenario's; the rest is given to the program by keyword.
    """

    def register(program: Callable[..., None]) -> Callable[..., None]:
        for case in itertools.chain(*groups) if groups else [{}]:
            of_scenario = {**options, **{k: v for k, v in case.items() if k in _OPTIONS}}
            given = {k: v for k, v in case.items() if k not in _OPTIONS}
            words = [program.__name__.replace("_", " "), *(_word(k, v) for k, v in given.items())]
            words += [of_scenario["dtype"]] if of_scenario.get("dtype", "float64") != "float64" else []
            words += [case["library"]] if "library" in case and "library" not in options else []
            name = ", ".join(w for w in words if w)
            if "matern12" in name:
                of_scenario["kappa"] = _MATERN12 * of_scenario.get("kappa", 1.0)
            assert name not in TABLE, f"{name} is registered twice"
            TABLE[name] = Scenario(name, partial(program, **given), **of_scenario)
        return program

    return register


def _word(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else ""
    return value if isinstance(value, str) else f"{name} {value}"
