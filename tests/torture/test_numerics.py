"""T9: every candidate of the ops on tensors, on matrices of all kinds: stock's results within bounds, and its manners.

A fixed corpus of awkward matrices comes first; then hypothesis draws sizes, batches, dtypes, strides, conditions up to
1e16, rank deficiency, NaN, infinity and whether gradients are wanted. On what stock computes, a candidate meets the
op's own bound against float64 truth, and its result and gradients those of `TOLERANCES`; where stock raises, so does
it, the same; warnings, jitter and the random state are stock's, and no argument is changed. What
`AUTOKERN_FORCE=random:SEED` dispatches is judged as candidates are.
"""

import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.outcomes import outcome

from autokern.core.op import tensors_in
from autokern.core.registry import get
from autokern.ops._problems import EPS
from autokern.runtime import dispatch
from autokern.system import host, threads
from autokern.tuning.measuring import trial

TOLERANCES = {
    "cholesky": ((20, 1), (100, 1), "Higham 2002, theorem 10.8; two solves with L in the gradient"),
    "qr": ((50, 1), (100, 2), "Higham 2002, section 19.9; R is inverted twice in the gradient"),
}
"""Of result and gradient: errors relative to the largest entry are at most factor n eps κ^power, and nothing from a
tenth on. What an op checks (its contract: a residual) holds whatever the condition κ is."""
LAYOUTS: dict[str, Any] = {
    "contiguous": lambda a: a,
    "transposed": lambda a: a.mT.contiguous().mT,
    "strided": lambda a: torch.stack((a, a), -1)[..., 0],
    "part of a larger one": lambda a: torch.nn.functional.pad(a, (2, 1, 1, 3))[..., 1:-3, 2:-1],
    "expanded": lambda a: a.expand(2, *a.shape) if a.dim() == 2 else a,
}
SPECTRA = ("geometric", "rank-deficient", "clustered", "one small", "one large")


def orthonormal(*shape: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(shape, dtype=torch.float64))[0]


def matrix(
    op, dtype, n, more=3, batch=(), condition=0.0, scale=0.0, spectrum="geometric", layout="contiguous", spoilt="",
    shift=-18.0, grad=False, seed=0,
):  # fmt: skip
    """A matrix, for a Cholesky factorisation positive semidefinite but for rounding.

    Condition, scale and the shift of the diagonal are powers of ten, the last in units of the largest entry; one for
    QR has some more rows. `spoilt` replaces an entry, all, or the sign.
    """
    torch.manual_seed(seed)
    values = torch.logspace(0, -condition, n, dtype=torch.float64)
    if spectrum == "rank-deficient":
        values[(n + 1) // 2 :] = 0.0
    elif spectrum == "clustered":
        values = values.round(decimals=2) + 10.0**-condition
    elif spectrum == "one small":
        values[:-1] = 1.0
    elif spectrum == "one large":
        values[1:] = values[-1].item()
    right, values = orthonormal(*batch, n, n), values * 10.0**scale
    a = (orthonormal(*batch, n + more, n) if op == "qr" else right) * values @ right.mT
    if op == "cholesky":
        a = (a + a.mT) / 2
        if shift >= -17 and a.numel():
            a += torch.eye(n, dtype=a.dtype) * a.abs().amax() * 10.0**shift
    if spoilt in ("minus", "zeros"):
        a = a * {"minus": -1, "zeros": 0}[spoilt]
    elif spoilt and a.numel():
        a[..., a.shape[-2] // 2, a.shape[-1] // 3] = float(spoilt)
    return LAYOUTS[layout](a.to(dtype).requires_grad_(grad))


def corpus(op: str):
    """Matrices that have been trouble somewhere, and a ladder of conditions: what breaks does so within a decade."""
    for dtype in (torch.float64, torch.float32):
        hilbert = 1 / (torch.arange(12)[:, None] + torch.arange(12) + 1).to(dtype)
        ones, eye = torch.ones(5, 5, dtype=dtype), torch.eye(6, dtype=dtype)
        nan, inf = (torch.full((3, 3), float(text), dtype=dtype) for text in ("nan", "inf"))
        arrow = torch.cat((eye, torch.linspace(-1, 1, 6, dtype=dtype).unsqueeze(0)))  # a row appended to a root
        yield from (
            ones[:1, :1], -ones[:1, :1], 0 * ones[:1, :1], eye[:3, :3], ones, 0 * ones, hilbert, -hilbert,
            eye * 1e30, eye * 1e-30, eye * 1e-42, eye[:4, :4].flip(0), torch.stack((eye, ones[:1, :1] * eye, -eye)),
            torch.diag(torch.tensor([1.0, 1e-16, 1.0, 1e-8], dtype=dtype)), hilbert.expand(3, 12, 12), nan, inf,
            torch.stack((nan, eye[:3, :3])), eye.new_empty(0, 0), eye.new_empty(0, 3, 3), eye.new_empty(3, 0, 0),
            *((arrow, eye.new_empty(4, 0)) if op == "qr" else ()),
        )  # fmt: skip
        for half in range(33):
            yield matrix(op, dtype, 2 + half % 3, batch=((), (64,))[half % 2], condition=half / 2, seed=half)


def is_finite(tensors) -> bool:
    return all(t.isfinite().all() for t in tensors)


def gap(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """The largest error, in units of the largest entry."""
    pairs = [(f.double(), t) for f, t in zip(found, truth, strict=True) if t.numel()]
    return max(((f - t).abs().max() / t.abs().max().clamp_min(1e-300)).item() for f, t in pairs)


def ended(run, a):
    """What a call returns or raises, without the numbers in its error, what it warns of, and whether it drew."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    out, warned = outcome(run, a)
    failed = isinstance(out, tuple) and isinstance(out[0], type)  # by which minor it is indefinite, rounding tells
    raised = re.sub(r"[-+.e\d]*\d", "#", str(out)) if failed else ""
    return out, (raised, warned, torch.equal(before, torch.get_rng_state()))


def is_right(op, a: torch.Tensor, run) -> None:
    asked, kept = op.problem_of(a), a.detach().clone()
    (stock, manners), (out, found) = ended(op.stock.run, a), ended(run, a)
    assert torch.equal(a.detach().nan_to_num(7.0), kept.nan_to_num(7.0)), "an argument was changed"
    assert found == manners
    if manners[0]:
        return
    kinds = [[(t.shape, t.dtype, t.device, t.requires_grad) for t in tensors_in((o,))] for o in (out, stock)]
    assert kinds[0] == kinds[1]
    if asked is None:
        return
    if not is_finite(tensors_in((stock,))):
        assert not is_finite(tensors_in((out,)))
        return
    try:
        error, of_stock = (op.check(asked, o, (a,)) for o in (out, stock))
        assert error <= max(1.0, 3 * of_stock) or (math.isnan(error) and math.isnan(of_stock)), "times the bound"
    except ZeroDivisionError:  # of zeros there is nothing to measure an error in
        pass
    if manners[1] or not is_finite([a]):
        return
    values = torch.linalg.svdvals(a.detach().double())
    kappa = (values[..., 0] / values[..., -1]).nan_to_num(math.inf).amax().item()
    results = lambda out: [t.detach() for t in tensors_in((op.canonical(out),))]  # noqa: E731
    gradients = lambda run, a: list(trial(op, run, asked, (a,))().grads)  # noqa: E731
    exact = a.detach().double().requires_grad_(a.requires_grad)
    for place in range(1 + bool(asked.grad)):
        factor, power = TOLERANCES[op.name][place]
        tolerance = factor * asked.n * EPS[asked.dtype] * kappa**power
        if tolerance < 0.1:
            if place:
                truth, of_stock, found = (gradients(*of) for of in ((op.reference, exact), (op.stock.run, a), (run, a)))
            else:
                truth, of_stock, found = (results(o) for o in (op.reference(exact), stock, out))
            error, most = gap(found, truth), max(tolerance, 3 * gap(of_stock, truth))
            assert not is_finite(truth) or error <= most, ("result", "gradient")[place]


@pytest.fixture(params=TOLERANCES)
def judge(request, monkeypatch):
    """A function that judges whatever may serve a matrix in stock's place; the CPU plays the accelerator."""
    monkeypatch.setattr(host, "accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(threads, "ceiling", lambda: 64)
    op = get(request.param)

    def drawn(a, seed):
        with dispatch.using(force=f"random:{seed}"):
            return dispatch.route(op)(a)

    def judge(a):
        problem = op.problem_of(a)
        for one in op.candidates[1:] if problem is not None else ():
            serves = any(one.why_not(p) is None for p in (problem, problem.replace(device="cuda")))
            if serves and one.accuracy != "approximate" and not one.compiles:
                is_right(op, a, one.run)
        for seed in (1, 2, 3):
            is_right(op, a, functools.partial(drawn, seed=seed))

    judge.op = op.name
    return judge


@pytest.mark.timeout(7200)
def test_awkward_matrices_and_those_that_hypothesis_draws_are_served_as_by_stock(judge, in_earnest):
    for a in corpus(judge.op):
        judge(a)
    largest = 2048 if in_earnest else 160

    @settings(
        max_examples=400 if in_earnest else 100, derandomize=not in_earnest, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(
        batch=st.sampled_from(((), (1,), (3,), (2, 2), (64,), (0,))), size=st.floats(0, 1), more=st.floats(0, 2),
        dtype=st.sampled_from((torch.float64, torch.float32)), condition=st.floats(0, 16),
        scale=st.one_of(st.just(0.0), st.floats(-8, 8)), spectrum=st.sampled_from(SPECTRA),
        layout=st.sampled_from(tuple(LAYOUTS)), spoilt=st.sampled_from((*[""] * 12, "nan", "inf", "zeros", "minus")),
        shift=st.floats(-18, 0), grad=st.booleans(), seed=st.integers(0, 2**20),
    )  # fmt: skip
    def search(batch, size, more, **given):
        most = max(2, int(largest / max(1, torch.Size(batch).numel()) ** 0.5))  # of many matrices smaller ones
        n = max(1, round(most**size))
        judge(matrix(judge.op, n=n, more=round(more * n), batch=batch, **given))

    search()


def test_tolerances_are_written_down():
    def told(factor, power):
        return f"{factor} n eps κ{'²' if power == 2 else ''}"

    rows = [f"| `{op}` | {told(*one)} | {told(*other)} | A | {why} |" for op, (one, other, why) in TOLERANCES.items()]
    table = "\n".join(["| op | result | gradients | κ of | source |", "|---|---|---|---|---|", *rows])
    assert table in (Path(__file__).parents[2] / "docs" / "promises.md").read_text(encoding="utf-8")
