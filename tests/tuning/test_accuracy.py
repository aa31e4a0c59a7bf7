"""Errors of gradients: what rounding makes of one is no fault, what is wrong is."""

from __future__ import annotations

import pytest
import torch

from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.core.state import inside
from autokern.hooks import install
from autokern.tuning import measuring as accuracy
from autokern.tuning.measuring import Measurer, Trialled, trial

SMOOTH = [
    (300, 38, "matern52+rbf"),
    (300, 19, "periodic+rbf"),
    (165, 18, "matern32+rq"),
    (165, 3, "rbf"),
    (300, 39, "matern32"),
]
"""Points in two dimensions, seeds and families with a gradient that is small by cancellation."""


@pytest.fixture(params=SMOOTH, ids=lambda case: case[2])
def case(request):
    n, seed, families = request.param
    op = get("exact_log_prob")
    problem = Problem(op="exact_log_prob", m=n, n=n, d=2, grad="theta", variant=f"{families}/cholesky")
    args = op.sample(problem, torch.Generator().manual_seed(seed))
    inside.active = True
    yield op, problem, args, trial(op, op.stock.run, problem, args)()
    inside.active = False


@pytest.mark.parametrize("name", ["arrays", "fused"])
def test_a_gradient_that_is_small_by_cancellation_bans_nobody(case, name):
    op, problem, args, stock = case
    error = accuracy.gradient_errors(op, problem, args, stock)
    assert error(trial(op, op[name].run, problem, args)()) <= 1


@pytest.mark.parametrize("share", [1e-7, 1e-3])
def test_every_gradient_that_is_off_is_found(case, share):
    op, problem, args, stock = case
    error = accuracy.gradient_errors(op, problem, args, stock)
    found = trial(op, op["arrays"].run, problem, args)()
    for place in range(len(found.grads)):
        grads = [grad * (1 + share) if at == place else grad for at, grad in enumerate(found.grads)]
        assert error(Trialled(found.out, tuple(grads))) > 1
    broken = [torch.full_like(grad, torch.nan) for grad in found.grads]
    assert error(Trialled(found.out, tuple(broken))) > 1


def test_moves_are_of_one_eps_and_repeatable():
    op = get("cholesky")
    problem = Problem(op="cholesky", m=5, n=5, grad="a")
    args = op.sample(problem, torch.Generator().manual_seed(0))
    exact, moved, again = (accuracy.truth(op, problem, args, move).out for move in (None, 1, 1))
    assert torch.equal(moved, again)
    assert not torch.equal(moved, exact)
    torch.testing.assert_close(moved, exact, rtol=1e-13, atol=1e-14)
    single = accuracy.truth(op, problem.replace(dtype="float32"), args, 1).out
    assert 1e-9 < (single - exact).abs().max() < 1e-5


def test_a_calibration_bans_nobody_for_a_check_of_its_own():
    op = get("exact_log_prob")
    problem = Problem(op="exact_log_prob", m=1050, n=1050, d=3, grad="theta", variant="matern52/cg")
    measurer = Measurer("quick", [])
    with install.enabled():
        inside.active = True
        try:
            measurer.timings(op, problem, [op["stock"], op["fused"], op["mixed-inverse"]], 0.1)
        finally:
            inside.active = False
    assert measurer.banned == []
