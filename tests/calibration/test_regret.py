"""Regret: problems off the grid, and verdicts that noise does not make."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import regret
import torch
from regret import AGAIN, apart, random_problems
from support.clocks import Clock

from autokern.core.errors import SettingsError
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.tuning import timer


def test_random_problems_are_what_their_samples_are():
    """A problem that its own op would describe otherwise tests nothing."""
    for problem in random_problems(40, seed=5, most=(1e8, 1e7)):
        op = get(problem.op)
        args = op.sample(problem, torch.Generator().manual_seed(0))
        assert op.problem_of(*args) == problem


def test_problems_come_in_turns_of_op_and_dtype():
    found = random_problems(40, ops=["qr", "cholesky"])
    assert found == random_problems(40, ops=["qr", "cholesky"])
    assert Counter(p.op for p in found) == {"qr": 20, "cholesky": 20}
    assert {p.dtype for p in found} == {"float32", "float64"}
    assert [p.op for p in found[:4]] == ["qr", "cholesky"] * 2
    with pytest.raises(SettingsError, match="unknown op"):
        random_problems(5, ops=["qrr"])


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def test_regret_of_a_good_of_a_bad_and_of_a_failing_choice(make_op, clock):
    op = make_op("probe", grid=lambda level, dtype, device: [Problem(op="probe", m=4, n=4)])

    for name, seconds in (("stock", 1e-3), ("other", 0.5e-3)):
        op.candidate(name)(clock.takes(lambda seconds=seconds: seconds))
    op.candidate("broken")(lambda a: 1 / 0)
    (row,) = regret.timed([Problem(op="probe", m=4, n=4)], math.inf, rounds=(3, 5))
    assert row.fastest == row.best(0) == row.best(1) == "other"
    assert (row.regret("other"), row.over_stock("other")) == (1.0, pytest.approx(0.5))
    assert (row.regret("stock"), row.over_stock("stock")) == (pytest.approx(2.0), 1.0)
    assert set(row.ratios) == {"stock", "other", AGAIN}
    assert row.regret("broken") == row.regret("stock"), "stock runs in its place"
    assert row.seconds == pytest.approx(1e-3)


def test_the_luckiest_timing_is_no_regret():
    """Of two equal candidates one always looks faster in one half; the other half says how fast it is."""
    ratios = {"stock": (1.0, 1.0), "other": (0.8, 1.25), AGAIN: (1.0, 1.0)}
    row = regret.Row(problem=Problem(op="qr"), seconds=1e-3, ratios=ratios)
    assert row.regret("stock") == pytest.approx(math.sqrt(1 / 1.25 * 1.0))
    assert row.over_stock("other") == pytest.approx(1.0)


def _row(n: int, seconds: float = 1e-3, **ratios: float) -> regret.Row:
    both = {"stock": (1.0, 1.0), AGAIN: (1.02, 1.02), **{name: (ratio, ratio) for name, ratio in ratios.items()}}
    return regret.Row(problem=Problem(op="qr", m=n, n=n), seconds=seconds, ratios=both)


def test_verdict():
    rows = [*[_row(n, a=0.5) for n in range(1, 20)], _row(20, a=1.1, b=0.55), _row(21, seconds=1e-6, a=9.0)]
    found = regret.verdict(rows, lambda problem: "a")
    assert found.problems == 20, "what takes less than 30 us does not count"
    assert found.regret_geomean == pytest.approx(2 ** (1 / 20))
    assert found.regret_p95 == 1.0
    assert found.slower_share == pytest.approx(1 / 20)
    assert found.speedup == pytest.approx((2**19 / 1.1) ** (1 / 20))
    assert regret.noise_floor(rows).regret_geomean == pytest.approx(1.02)
    with pytest.raises(ValueError, match="no problem"):
        regret.verdict([], lambda problem: "a")


def test_an_exact_choice_is_compared_with_what_is_exact_where_stock_is_loose():
    ratios = {"stock": (1.0, 1.0), "matrix-free": (0.5, 0.5), "fused": (0.9, 0.9), "fused@1": (0.8, 0.8)}
    loose = Problem(op="exact_log_prob", m=3000, n=3000, d=2, variant="rbf/cg", grad="theta")
    for problem, name, expected in (
        (loose, "fused", 0.9 / 0.8),
        (loose, "fused@1", 1.0),
        (loose, "stock", 2.0),
        (loose.replace(variant="rbf/cholesky"), "fused", 1.8),
    ):
        row = regret.Row(problem=problem, seconds=1.0, ratios={**ratios, AGAIN: (1.0, 1.0)})
        found = regret.verdict([row], lambda problem, name=name: name)
        assert found.regret_geomean == pytest.approx(expected)
        assert found.speedup == pytest.approx(1 / ratios[name][0])
    small = loose.replace(m=2000, n=2000)  # the largest ones are solved to a residual, which costs less than stock
    rows = [regret.Row(problem=p, seconds=1.0, ratios=ratios) for p in (small, small.replace(variant="rbf/cholesky"))]
    assert apart(rows) == (rows[1:], rows[:1])
