"""Densities under any matrix: values, gradients and second derivatives are the library's."""

from __future__ import annotations

import torch
from linear_operator.operators import DenseLinearOperator, InterpolatedLinearOperator
from support.densities import by, of
from support.models import loss_of

import autokern
from autokern.hooks.linear_operator import _looked_up as looked_up


def test_gradients_that_are_not_wanted():
    mll = of("dense")
    with autokern.enabled(), by("dense"):
        with torch.no_grad():
            loss_of(mll)
        mll.requires_grad_(False)
        loss_of(mll)
        assert "arrays" not in autokern.stats().get("dense_log_prob", {})
        mll.likelihood.noise_covar.raw_noise.requires_grad_()
        loss_of(mll).backward()
        assert autokern.stats()["dense_log_prob"]["arrays"] == 1
    found = mll.likelihood.noise_covar.raw_noise.grad.clone()
    mll.zero_grad()
    loss_of(mll).backward()
    torch.testing.assert_close(found, mll.likelihood.noise_covar.raw_noise.grad, rtol=1e-9, atol=1e-11)


def test_covariances_of_tasks_are_looked_up(monkeypatch):
    i, j = torch.tensor([[0], [2], [1], [2]]), torch.tensor([[1], [0]])
    table = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
    several = torch.tensor([[0, 1], [2, 1], [1, 1], [0, 0]])
    weights = torch.full((4, 1), 0.5, dtype=torch.float64)
    operators = [
        (InterpolatedLinearOperator(table, i, None, i, None), True),
        (InterpolatedLinearOperator(table, i, None, j, None), True),
        (InterpolatedLinearOperator(table, several, None, several, None), False),
        (InterpolatedLinearOperator(table, i, weights, i, None), False),
        (InterpolatedLinearOperator(table.expand(2, 3, 3), i.expand(2, 4, 1), None, i.expand(2, 4, 1), None), False),
    ]
    for operator, known in operators:
        dense = torch.rand(operator.shape[-2:], dtype=torch.float64, requires_grad=True)
        assert (looked_up(operator) is not None) == known
        expected = (DenseLinearOperator(dense) * operator).to_dense()
        slopes = torch.autograd.grad(expected.square().sum(), (table, dense))
        with autokern.enabled():
            for found in (DenseLinearOperator(dense) * operator, operator * DenseLinearOperator(dense)):
                assert type(found) is DenseLinearOperator
                torch.testing.assert_close(found.to_dense(), expected, rtol=0, atol=0)
                ours = torch.autograd.grad(found.to_dense().square().sum(), (table, dense))
                torch.testing.assert_close(ours, slopes, rtol=1e-13, atol=1e-13)
    assert looked_up(InterpolatedLinearOperator(table, i + 1, None, i, None)) is None  # there is no task 3
    assert looked_up(DenseLinearOperator(table)) is None
    monkeypatch.delattr("linear_operator.operators.InterpolatedLinearOperator")  # as in a release that renames it
    assert looked_up(operators[0][0]) is None
