"""Densities under any matrix are the library's, and SciPy's package is never imported for them alone."""

import importlib.machinery
import importlib.util
import os
import sys

import numpy as np
import pytest
import torch
from linear_operator.operators import DenseLinearOperator, InterpolatedLinearOperator
from scipy.linalg import _flapack as scipys
from support.densities import by, of
from support.models import loss_of
from support.programs import PATH, said

import autokern
from autokern.density import matrices
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


@pytest.mark.slow
def test_scipy_is_not_imported_by_autokern_nor_by_a_step():
    program = """
import sys, torch, gpytorch
before = "scipy.linalg" in sys.modules
import autokern.auto, autokern
from support.models import ExactModel, step
x = torch.rand(20, 2)
step(ExactModel(x, x.sum(-1)))
left = before or not any(name.startswith("scipy") for name in sys.modules)
from autokern.density import matrices
from autokern.system import threads
alone = matrices._extension()
import scipy.linalg
import numpy as np
assert scipy.linalg._flapack.dpotrf is alone.dpotrf
assert np.allclose(scipy.linalg.cholesky(4 * np.eye(2)), 2 * np.eye(2))
from threadpoolctl import threadpool_info
several = [one for one in threadpool_info() if one["internal_api"] == "openblas"]
assert len(threads._libraries()) == sum(one["threading_layer"] == "pthreads" for one in several)
print(left)
"""
    assert said(program, PYTHONPATH=os.pathsep.join(PATH))[-1] == "True"


def test_a_scipy_of_another_layout_is_imported(monkeypatch):
    assert matrices._extension.__wrapped__() is scipys
    monkeypatch.delitem(sys.modules, "scipy.linalg._flapack")
    found = (lambda name: None), (lambda name: importlib.machinery.ModuleSpec(name, None, is_package=True))
    for spec in found:
        with monkeypatch.context() as patch:
            patch.setattr(importlib.util, "find_spec", spec)
            assert hasattr(matrices._extension.__wrapped__(), "dpotri")
    alone = matrices._extension.__wrapped__()
    k = np.cov(np.random.default_rng(9).normal(size=(9, 50)))
    np.testing.assert_array_equal(alone.dpotrf(k)[0], scipys.dpotrf(k)[0])
