"""T9: every candidate of every op on matrices of all kinds: stock's results within the op's bound, and stock's manners.

Sizes, batches, dtypes, strides, conditions up to 1e16, rank deficiency, NaN and infinity are drawn at random, a fixed
corpus of awkward ones comes first. On what stock computes, a candidate meets the op's own bound against float64 truth;
where stock raises, so does it, the same; warnings and the random state are stock's, and no argument is changed.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from harness import Findings, Mutation, main
from linear_operator.utils.warnings import NumericalWarning

from autokern import dispatch, host, threads
from autokern.arguments import tensors_in
from autokern.op import Candidate, Op, get

OPS = ("cholesky", "qr", "eigh", "cholesky_inverse", "pinverse_root", "matmul")
"""Ops whose arguments are tensors; those on kernels and distributions follow the problems of their grids."""
MODELS = ("kernel_matrix", "kernel_matmul", "exact_log_prob", "inv_quad_logdet", "predict")


class Size(NamedTuple):
    """How much is done: matrices drawn for each op, and the largest of them."""

    matrices: int
    largest: int


SIZES = {"ci": Size(150, 160), "full": Size(4000, 2048)}


def _spectrum(draw: random.Random, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Positive eigenvalues of a condition from 1 to 1e16, some of them equal, some zero."""
    condition = 10 ** draw.uniform(0, 16)
    values = torch.logspace(0, -1, n, base=condition, dtype=torch.float64)
    kind = draw.randrange(5)
    if kind == 0:
        values[n // 2 :] = 0.0
    elif kind == 1:
        values[:] = values.round(decimals=2) + 1e-3
    return (values * 10 ** draw.uniform(-8, 8)).to(dtype)


def _symmetric(draw: random.Random, n: int, batch: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Symmetric matrices with a spectrum; without rounding they would be positive semidefinite."""
    q, _ = torch.linalg.qr(torch.randn(*batch, n, n, dtype=torch.float64))
    a = (q * _spectrum(draw, n, torch.float64)) @ q.mT
    return ((a + a.mT) / 2).to(dtype)


def _general(draw: random.Random, m: int, n: int, batch: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    k = min(m, n)
    left, right = (torch.linalg.qr(torch.randn(*batch, size, k, dtype=torch.float64))[0] for size in (m, n))
    return ((left * _spectrum(draw, k, torch.float64)) @ right.mT).to(dtype)


def _laid_out(draw: random.Random, a: torch.Tensor) -> torch.Tensor:
    """The same values in some memory layout."""
    kind = draw.randrange(5)
    if kind == 1:
        return a.mT.contiguous().mT
    if kind == 2:
        return torch.stack((a, a), -1)[..., 0]
    if kind == 3 and a.dim() == 2:
        return a.expand(2, *a.shape)
    return a


def _spoilt(draw: random.Random, a: torch.Tensor) -> torch.Tensor:
    """Now and then a matrix with NaN or infinity in it, or of zeros."""
    kind = draw.randrange(20)
    if kind > 2 or not a.numel():
        return a
    a = a.clone()
    place = draw.randrange(a.shape[-2]), draw.randrange(a.shape[-1])
    a[..., place[0], place[1]] = [float("nan"), float("inf"), 0.0][kind]
    return a if kind < 2 else a * 0


def _arguments(op: str, draw: random.Random, largest: int) -> tuple[Any, ...]:
    dtype = draw.choice((torch.float64, torch.float32))
    batch: tuple[int, ...] = draw.choice(((), (), (3,), (64,), (2, 2), (1,)))
    most = max(2, int(largest / max(1, torch.Size(batch).numel()) ** 0.5))
    n = max(1, int(most ** draw.uniform(0.0, 1.0)))
    if op in ("cholesky", "eigh"):
        a = _spoilt(draw, _symmetric(draw, n, batch, dtype))
        if op == "cholesky" and draw.randrange(3):
            a = a + torch.eye(n, dtype=dtype) * a.abs().amax() * 10 ** draw.uniform(-7, 0)
    elif op == "cholesky_inverse":
        a = torch.linalg.cholesky_ex(_symmetric(draw, n, batch, torch.float64) + torch.eye(n)).L.to(dtype)
    elif op == "pinverse_root":
        a = _general(draw, n + draw.randrange(3 * n + 1), n, batch, dtype)
    elif op == "matmul":
        a = _spoilt(draw, _general(draw, n, max(1, n - draw.randrange(n)), batch, dtype))
    else:
        a = _spoilt(draw, _general(draw, n + draw.randrange(2 * n), n, batch, dtype))
    a = _laid_out(draw, a)
    gradients = draw.randrange(3) == 0 and a.is_leaf and not any(s == 0 for s in a.stride())
    a = a.detach().requires_grad_(gradients)
    if op != "matmul":
        return (a,)
    rhs = torch.randn(*a.shape[:-2], a.shape[-1], draw.choice((1, 11, 64)), dtype=dtype)
    return a, rhs


def _corpus(op: str) -> Iterator[tuple[Any, ...]]:
    """Matrices that have been trouble somewhere: tiny, empty, singular, indefinite, huge and minute entries."""
    for dtype in (torch.float64, torch.float32):
        hilbert = 1 / (torch.arange(12)[:, None] + torch.arange(12) + 1).to(dtype)
        ones, zero = torch.ones(5, 5, dtype=dtype), torch.zeros(4, 4, dtype=dtype)
        for a in (
            ones[:1, :1], -ones[:1, :1], torch.eye(3, dtype=dtype), ones, zero, hilbert,
            torch.eye(6, dtype=dtype) * 1e30, torch.eye(6, dtype=dtype) * 1e-30, torch.eye(4, dtype=dtype).flip(0),
            torch.diag(torch.tensor([1.0, 1e-16, 1.0, 1e-8], dtype=dtype)), torch.empty(0, 0, dtype=dtype),
            torch.full((3, 3), float("nan"), dtype=dtype), torch.full((3, 3), float("inf"), dtype=dtype),
        ):  # fmt: skip
            yield (a, torch.ones(a.shape[-1], 2, dtype=dtype)) if op == "matmul" else (a,)


class _Told(NamedTuple):
    """How a call ended."""

    out: Any
    error: BaseException | None
    warned: list[tuple[str, str]]
    drew: bool


def _called(run: Callable[..., Any], args: tuple[Any, ...]) -> _Told:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    out, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            out = run(*args)
        except Exception as raised:
            error = raised
    warned = [(type(one.message).__name__, str(one.message)) for one in caught]
    drew = not torch.equal(before, torch.get_rng_state())
    return _Told(out, error, warned, drew)


def _judged(found: Findings, op: Op, candidate: Candidate, args: tuple[Any, ...], stock: _Told, asked: Any) -> None:
    """Compare a candidate with stock on the same arguments."""
    kept = [t.detach().clone() for t in tensors_in(args)]
    told = _called(candidate.run, args)
    where = f"{op.name}.{candidate.name} on {asked}"
    changed = not all(_identical(a, b) for a, b in zip(tensors_in(args), kept, strict=True))
    found.expect(not changed, f"{where}: an argument was changed")
    found.expect(told.drew == stock.drew, f"{where}: the random state is not stock's")
    if stock.error is not None:
        same = type(told.error) is type(stock.error)
        found.expect(same, f"{where}: {told.error!r} where stock raises {stock.error!r}"[:300])
        return
    if told.error is not None:
        found.broken.append(f"{where}: raised {told.error!r} where stock does not"[:300])
        return
    numerical = [warning for warning in stock.warned if warning[0] == NumericalWarning.__name__]
    found.expect(
        [w for w in told.warned if w[0] == NumericalWarning.__name__] == numerical,
        f"{where}: warned {told.warned} where stock warns {stock.warned}"[:300],
    )
    finite = all(t.isfinite().all() for t in tensors_in((stock.out,)))
    if not finite:
        hidden = all(t.isfinite().all() for t in tensors_in((told.out,)))
        found.expect(not hidden, f"{where}: finite where stock's result is not")
        return
    try:
        error, of_stock = (op.check(asked, t.out, args) for t in (told, stock))
    except ZeroDivisionError:  # of zeros there is nothing to measure an error in
        return
    if math.isnan(error) and math.isnan(of_stock):
        return
    if not error <= max(1.0, 3 * of_stock):
        found.broken.append(f"{where}: {error:.3g} times the bound, stock {of_stock:.3g}")


def _identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(one.detach().nan_to_num(7.0), other.nan_to_num(7.0)))


def _served(op: Op, candidate: Candidate, problem: Any) -> bool:
    return any(candidate.why_not(p) is None for p in (problem, problem.replace(device="cuda")))


def tensors(found: Findings, size: Size) -> None:
    """Give all candidates of the ops on tensors the corpus, and matrices drawn at random."""
    host.accelerator = lambda: torch.device("cpu")  # type: ignore[assignment]  # the CPU plays the accelerator
    threads.ceiling = lambda: 64
    torch.manual_seed(9)
    for name in OPS:
        op, draw = get(name), random.Random(name)
        count = calls = raised = 0
        cases = [*_corpus(name), *(_arguments(name, draw, size.largest) for _ in range(size.matrices))]
        for args in cases:
            asked = op.problem_of(*args)
            dispatched = _called(dispatch.route(op), args)
            stock = _called(op.stock.run, args)
            found.expect(
                type(dispatched.error) is type(stock.error),
                f"{name} dispatched: {dispatched.error!r} where stock raises {stock.error!r}"[:300],
            )
            raised += stock.error is not None
            if asked is None:
                continue
            count += 1
            for candidate in op.candidates[1:]:
                if _served(op, candidate, asked) and candidate.accuracy != "approximate" and not candidate.setup:
                    _judged(found, op, candidate, args, stock, asked)
                    calls += 1
        found.figures[name] = f"{count} matrices, {calls} calls of candidates, stock raised {raised} times"


def models(found: Findings, size: Size) -> None:
    """Give all candidates of the ops on kernels and distributions the problems of their grids, with gradients."""
    from autokern.calibrate import gradient_errors

    for name in MODELS:
        op, draw = get(name), random.Random(name)
        calls = 0
        grid = [p for dtype in ("float64", "float32") for p in op.grid("full", dtype, "cpu")]
        draw.shuffle(grid)
        for problem in grid[: size.matrices // 3]:
            most = draw.choice((2, 5, 17, 40, 90))
            factor = min(1.0, most / max(problem.m, problem.n))
            small = problem.replace(
                m=max(2, int(problem.m * factor)), n=max(2, int(problem.n * factor)), batch=min(problem.batch, 3)
            )
            try:
                args = op.sample(small, torch.Generator().manual_seed(draw.randrange(10**6)))
                asked = op.problem_of(*args)
            except (RuntimeError, IndexError, ValueError):
                continue
            if asked is None:
                continue
            stock = op.trial(op.stock.run, asked, args)()
            for candidate in op.candidates[1:]:
                usable = (
                    candidate.why_not(asked) is None and candidate.accuracy != "approximate" and not candidate.setup
                )
                if not usable or candidate.as_stock:
                    continue
                told = op.trial(candidate.run, asked, args)()
                error = op.check(asked, told.out, args)
                slope = gradient_errors(op, asked, args, stock)(told)
                calls += 1
                if not (error <= 1 and slope <= 1):
                    found.broken.append(
                        f"{name}.{candidate.name} on {asked}: {error:.3g} and {slope:.3g} times the bound"
                    )
        found.figures[name] = f"{calls} calls of candidates with their gradients"


MUTATIONS = [
    Mutation(
        "the jitter of failed factorisations is forgotten",
        "ops/cholesky.py",
        "return _stock_cholesky(a, jitter=jitter, max_tries=max_tries) if torch.any(info) else lower",
        "return lower",
        "tensors",
    ),
    Mutation(
        "a QR decomposition by Cholesky is believed however ill the matrix is",
        "ops/qr.py",
        "if torch.any(info) or not defect < 0.05 / gram.shape[-1]:",
        "if False:",
        "tensors",
    ),
    Mutation(
        "a gradient is off by a tenth of a thousandth",
        "kernels/walk.py",
        "            _add(self._weight_totals, scale, self._total(w, None, at) * outer)",
        "            _add(self._weight_totals, scale, self._total(w, None, at) * outer * 1.0001)",
        "models",
    ),
]

if __name__ == "__main__":
    main({"tensors": tensors, "models": models}, SIZES)
