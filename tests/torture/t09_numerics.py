"""T9: every candidate of every op on matrices of all kinds: stock's results within the op's bound, and stock's manners.

A fixed corpus of awkward matrices comes first; then hypothesis draws sizes, batches, dtypes, strides, conditions up to
1e16, rank deficiency, NaN, infinity and whether gradients are wanted. On what stock computes, a candidate meets the
op's own bound against float64 truth, and its result and gradients those of `TOLERANCES`; where stock raises, so does
it, the same; warnings, jitter and the random state are stock's, and no argument is changed. What
`AUTOKERN_FORCE=random:SEED` dispatches is judged as candidates are.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from harness import Findings, Mutation, main
from hypothesis import HealthCheck, Phase, given, settings
from linear_operator.utils.warnings import NumericalWarning
from matrices import corpus, recipes

from autokern.core.op import Candidate, Op, tensors_in
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.ops._problems import EPS
from autokern.runtime import dispatch
from autokern.system import host, threads
from autokern.tuning.measuring import trial


class Tolerance(NamedTuple):
    """Bounds of an op by factor and power: errors relative to the largest entry are at most factor n eps κ^power.

    What an op checks (its contract: a residual) holds whatever the condition κ is. These say what follows for the
    result itself and its gradients: nothing from a tenth on, and three times stock's error where stock leaves them.
    """

    result: tuple[float, int]
    gradient: tuple[float, int]
    why: str  # where the power comes from

    def __call__(self, which: str, n: int, eps: float, kappa: float) -> float:
        factor, power = getattr(self, which)
        bound = factor * n * eps * kappa**power
        return bound if bound < 0.1 else math.inf

    def told(self, which: str) -> str:
        """Return a bound in words, for the documentation."""
        factor, power = getattr(self, which)
        return f"{factor:g} n eps κ{'²' if power == 2 else ''}"


TOLERANCES = {
    "cholesky": Tolerance((20, 1), (100, 1), "Higham 2002, theorem 10.8; two solves with L in the gradient"),
    "qr": Tolerance((50, 1), (100, 2), "Higham 2002, section 19.9; R is inverted twice in the gradient"),
}
"""Of the ops whose arguments are tensors; `tests/ops/test_ops.py` has those on kernels and distributions."""
SEEDS = (1, 2, 3)
"""Of random choice."""
Run = Callable[..., Any]


class Size(NamedTuple):
    """How much is done: matrices drawn for each op, the largest of them, and whether each run draws others."""

    matrices: int
    largest: int
    anew: bool


SIZES = {"ci": Size(100, 160, False), "full": Size(400, 2048, True)}


class _Told(NamedTuple):
    """How a call ended."""

    out: Any
    error: BaseException | None
    warned: list[str]
    drew: bool


def _called(run: Run, args: tuple[Any, ...]) -> _Told:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    out, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            out = run(*args)
        except Exception as raised:
            error = raised
    warned = [str(one.message) for one in caught if issubclass(one.category, NumericalWarning)]
    return _Told(out, error, warned, not torch.equal(before, torch.get_rng_state()))


def _worded(error: BaseException | None) -> str:
    """An exception without its numbers: by which minor a matrix is told to be indefinite is a matter of rounding."""
    return "nothing" if error is None else re.sub(r"[-+.e\d]*\d", "#", repr(error))


class Case:
    """The arguments of a call, the first of them a matrix, what stock makes of them, and what is true."""

    def __init__(self, op: Op, args: tuple[Any, ...]) -> None:
        self.op, self.args, self.asked = op, args, op.problem_of(*args)
        self.stock = _called(op.stock.run, args)
        self.plain = self.asked is not None and self.stock.error is None and not self.stock.warned
        self.finite = self.plain and all(t.isfinite().all() for t in tensors_in((args, self.stock.out)))

    def complaints(self, name: str, run: Run) -> Iterator[str]:
        """Run something else in stock's place; yield what is wrong with it."""
        for wrong in self._manners(run):
            yield f"{self.op.name}.{name} on {self.asked or [tuple(t.shape) for t in tensors_in(self.args)]}: {wrong}"

    def _manners(self, run: Run) -> Iterator[str]:
        kept = [t.detach().clone() for t in tensors_in(self.args)]
        stock, told = self.stock, _called(run, self.args)
        if not all(_identical(a, b) for a, b in zip(tensors_in(self.args), kept, strict=True)):
            yield "an argument was changed"
        if told.drew != stock.drew:
            yield "the random state is not stock's"
        if _worded(told.error) != _worded(stock.error):
            yield f"{told.error!r} where stock raises {stock.error!r}"[:300]
        elif told.warned != stock.warned:
            yield f"warned {told.warned} where stock warns {stock.warned}"[:300]
        elif stock.error is None:
            yield from self._numbers(run, told.out)

    def _numbers(self, run: Run, out: Any) -> Iterator[str]:
        kind, of_stock = (
            [(t.shape, t.dtype, t.device, t.requires_grad) for t in tensors_in((o,))] for o in (out, self.stock.out)
        )
        if kind != of_stock:
            yield f"{kind} where stock returns {of_stock}"
        elif self.asked is not None and not all(t.isfinite().all() for t in tensors_in((self.stock.out,))):
            if all(t.isfinite().all() for t in tensors_in((out,))):
                yield "finite where stock's result is not"
        elif self.asked is not None:
            yield from self._residual(out)
            if self.finite:
                yield from self._errors("result", lambda: self._results(out))
                if self.asked.grad:
                    yield from self._errors("gradient", lambda: self._gradients(run, self.args))

    def _residual(self, out: Any) -> Iterator[str]:
        try:
            error, of_stock = (self.op.check(self.asked, o, self.args) for o in (out, self.stock.out))
        except ZeroDivisionError:  # of zeros there is nothing to measure an error in
            return
        if not error <= max(1.0, 3 * of_stock) and not (math.isnan(error) and math.isnan(of_stock)):
            yield f"{error:.3g} times the bound, stock {of_stock:.3g}"

    def _errors(self, which: str, found: Callable[[], list[torch.Tensor]]) -> Iterator[str]:
        tolerance = TOLERANCES[self.op.name](which, self.asked.n, EPS[self.asked.dtype], self._kappa)
        if math.isinf(tolerance):
            return
        truth, stock = self._true_results if which == "result" else self._true_gradients
        if not all(t.isfinite().all() for t in truth):
            return
        bound = max(tolerance, 3 * _gap(stock, truth))
        if not (gap := _gap(found(), truth)) <= bound:
            yield f"error of the {which} is {gap:.3g}, the tolerance at condition {self._kappa:.3g} {bound:.3g}"

    @functools.cached_property
    def _exact(self) -> tuple[torch.Tensor, ...]:
        return tuple(t.detach().double().requires_grad_(t.requires_grad) for t in self.args)

    @functools.cached_property
    def _true_results(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the reference gives in float64, and what stock gives."""
        return self._results(self.op.reference(*self._exact)), self._results(self.stock.out)

    @functools.cached_property
    def _true_gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return self._gradients(self.op.reference, self._exact), self._gradients(self.op.stock.run, self.args)

    def _results(self, out: Any) -> list[torch.Tensor]:
        return [t.detach() for t in tensors_in((self.op.canonical(out),))]

    def _gradients(self, run: Run, args: tuple[Any, ...]) -> list[torch.Tensor]:
        return list(trial(self.op, run, self.asked, args)().grads)

    @functools.cached_property
    def _kappa(self) -> float:
        """The condition, the largest of a batch."""
        values = torch.linalg.svdvals(self.args[0].detach().double())
        smallest = values[..., -1]
        return math.inf if bool((smallest == 0).any()) else (values[..., 0] / smallest).amax().item()


def _gap(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """The largest error, in units of the largest entry."""
    pairs = [(f.double(), t) for f, t in zip(found, truth, strict=True) if t.numel()]
    return max(((f - t).abs().max() / t.abs().max().clamp_min(1e-300)).item() for f, t in pairs)


def _identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(one.detach().nan_to_num(7.0), other.nan_to_num(7.0)))


def _candidates(op: Op, problem: Problem | None) -> Iterator[Candidate]:
    """Candidates other than stock that could serve a problem, with its data on either side."""
    for candidate in op.candidates[1:] if problem is not None else ():
        sides = (problem, problem.replace(device="cuda"))
        serves = any(candidate.why_not(p) is None for p in sides)
        if serves and candidate.accuracy != "approximate" and not candidate.compiles:
            yield candidate


def _drawn(op: Op, seed: int, *args: Any) -> Any:
    """Dispatch the op, with candidates drawn at random."""
    with dispatch.using(force=f"random:{seed}"):
        return dispatch.route(op)(*args)


def tensors(found: Findings, size: Size) -> None:
    """Give all candidates of the ops on tensors the corpus, and matrices that hypothesis draws."""
    host.accelerator = lambda: torch.device("cpu")  # type: ignore[assignment]  # the CPU plays the accelerator
    threads.ceiling = lambda: 64
    for name in TOLERANCES:
        op, counts = get(name), Counter[str]()

        def wrong(args: tuple[Any, ...], op: Op = op, counts: Counter[str] = counts) -> list[str]:
            case = Case(op, args)
            others: dict[str, Run] = {one.name: one.run for one in _candidates(op, case.asked)}
            others |= {f"random:{seed}": functools.partial(_drawn, op, seed) for seed in SEEDS}
            counts.update(matrices=1, calls=len(others))
            counts.update({"stock raised": case.stock.error is not None, "stock warned": bool(case.stock.warned)})
            return [told for name, run in others.items() for told in case.complaints(name, run)]

        found.broken += [told for args in corpus(name) for told in wrong(args)]
        found.broken += _searched(name, size, wrong)
        found.figures[name] = ", ".join(f"{what} {count}" for what, count in counts.items())


def _searched(name: str, size: Size, wrong: Callable[[tuple[Any, ...]], list[str]]) -> list[str]:
    """Let hypothesis look for a recipe with whose matrix something is wrong; return what is, for the simplest."""

    @settings(
        max_examples=size.matrices, derandomize=not size.anew, deadline=None, database=None, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(recipe=recipes(name, size.largest))
    def search(recipe: Any) -> None:
        told = wrong(recipe.arguments())
        assert not told, f"{recipe}: {'; '.join(told)}"

    try:
        search()
    except Exception as error:
        return [str(error)[:900]]
    return []


DECOMPOSITIONS = "ops/decompositions.py"
MUTATIONS = [
    Mutation(
        "the jitter of failed factorisations is forgotten", DECOMPOSITIONS,
        "return libraries.psd_safe_cholesky(a, jitter=jitter, max_tries=max_tries)",
        "return torch.linalg.cholesky_ex(a)[0]", "tensors",
    ),
    Mutation(
        "a QR decomposition by Cholesky is believed however ill the matrix is", DECOMPOSITIONS,
        "if torch.any(info) or not defect < 0.05 / gram.shape[-1]:", "if False:", "tensors",
    ),
    Mutation(
        "the gradient of a QR decomposition forgets half of a matrix", DECOMPOSITIONS,
        "symmetric = core.tril() + core.tril(-1).mT", "symmetric = core.tril()", "tensors",
    ),
]  # fmt: skip

if __name__ == "__main__":
    main({"tensors": tensors}, SIZES)
