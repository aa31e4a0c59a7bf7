"""measuring.py: random problems off the grid that offer a choice, the same for the same seed."""

from __future__ import annotations

import pytest

from autokern.core.problem import Problem
from autokern.core.registry import get, registered
from autokern.system import host
from autokern.tuning import measuring
from autokern.tuning.measuring import contenders, draw


@pytest.mark.parametrize("op", [op.name for op in registered()])
def test_problems_of_each_op_offer_a_choice_within_the_limits(op):
    found = draw(get(op), 40, ["float64", "float32"], "cpu", "1")
    grid = [p for dtype in ("float64", "float32") for p in get(op).grid("full", dtype, "cpu")]
    assert len(found) == len(set(found)) <= 40
    assert bool(found) == any(len(contenders(p)) > 1 for p in grid)
    shapes = {(p.variant, p.grad, p.m == p.n, p.batch > 1) for p in grid}
    for problem in found:
        assert (problem.op, problem.device) == (op, "cpu")
        assert len(contenders(problem)) > 1
        assert problem.batch <= measuring._MOST_BATCH
        assert problem.d >= 2 or "ard" not in problem.words
        work = get(op).features(problem)
        assert max(work.flops / 2e10, work.bytes / 1e9) <= 1
        square = problem.m == problem.n
        assert {(problem.variant, problem.grad, s, problem.batch > 1) for s in (square, False)} & shapes
    if all(p.m >= p.n for p in grid):
        assert all(p.m >= p.n for p in found)


def test_the_same_seed_gives_the_same_and_a_study_measures_nothing_that_was_calibrated():
    op = get("kernel_matmul")
    one, again, other = (draw(op, 60, ["float64"], "cpu", seed) for seed in ("a", "a", "b"))
    assert one == again
    assert len(set(one) & set(other)) < 10


def test_a_tiny_grid_gives_few_problems_and_ends(make_op):
    op = make_op("toy", grid=lambda level, dtype, device: [Problem(op="toy", m=3, n=3, dtype=dtype, device=device)])
    op.candidate("stock")(lambda a: a)
    assert draw(op, 10, ["float64"], "cpu", "1") == []
    op.candidate("other")(lambda a: a)
    found = draw(op, 10, ["float64", "float32"], "cpu", "1")
    assert set(found) == {Problem(op="toy", m=3, n=3, dtype=dtype) for dtype in ("float64", "float32")}


def test_what_does_not_fit_the_memory_is_not_drawn(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda device: 2**22)
    found = draw(get("cholesky"), 30, ["float64"], "cpu", "1")
    assert all(c.name == "stock" or c.memory(p) <= 2**21 for p in found for c in contenders(p))


def test_an_accelerator_is_asked_larger_problems_than_a_processor(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda device: 2**34)
    op = get("kernel_matmul")
    here, there = ([op.features(p).flops for p in draw(op, 200, ["float32"], d, "1")] for d in ("cpu", "cuda"))
    assert max(here) <= 2e10 < max(there) <= 2e11
