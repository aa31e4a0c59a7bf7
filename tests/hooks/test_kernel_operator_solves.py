"""The operator that is multiplied tile by tile, in solves, determinants and products of operators, against dense."""

from __future__ import annotations

import linear_operator
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from linear_operator import settings
from support.tiling import BATCH, FOR_OPERATORS, KERNELS, NONE, assert_near, dense_of, operator, random, used

import autokern
from autokern.core.errors import MemoryBudgetError
from autokern.hooks import kernel_operator
from autokern.hooks.kernel_operator import MatrixFreeKernelOperator, matrix_free

pytestmark = FOR_OPERATORS


@pytest.mark.parametrize("size", [1, 1000], ids=["large", "small"])
@pytest.mark.parametrize("batch", [NONE, BATCH], ids=str)
def test_elementwise_products_are_exact_and_differentiable(size, batch):
    """The library would multiply roots, of rank 100 where it takes matrices for large."""
    n = 150

    def made():
        parts = [operator(KERNELS[name], n, None, batch, seed=k) for k, name in enumerate(("matern 1/2", "two shapes"))]
        return [part[0] for part in parts], [leaf for part in parts for leaf in part[1]]

    (first, second), leaves = made()
    root = linear_operator.operators.RootLinearOperator(random(n, 2, seed=8))
    diagonal = linear_operator.operators.DiagLinearOperator(random(n, seed=8))
    with autokern.enabled(), settings.max_cholesky_size(size):
        both = first * second
        assert type(both) is MatrixFreeKernelOperator
        assert both._same
        found = [both @ random(n, 2, seed=4), *(p.to_dense() for p in (first * root, root * first, first * diagonal))]
    a, b = dense_of(first), dense_of(second)
    expected = [(a * b) @ random(n, 2, seed=4)]  # the matrices of `found` are kept in the operators
    expected += [a * root.to_dense(), a * root.to_dense(), a * diagonal.to_dense()]
    for one, other in zip(found, expected, strict=True):
        assert_near(one.detach(), other.detach(), torch.float64, 10)
    ours = torch.autograd.grad(sum(t.sum() for t in found), leaves, retain_graph=True)
    theirs = torch.autograd.grad(sum(t.sum() for t in expected), leaves)
    for one, other in zip(ours, theirs, strict=True):
        assert_near(one, other, torch.float64, 1e3)


@pytest.mark.slow
def test_nothing_is_formed_by_products_rows_diagonals_and_solves(monkeypatch):
    kernel, x = ScaleKernel(MaternKernel(1.5)).double(), random(900, 2)

    form = kernel_operator.matrix

    def refuse(tree, *args):
        assert tree.points[0].shape[-2] < 900, "the matrix was formed"
        return form(tree, *args)

    monkeypatch.setattr(kernel_operator, "matrix", refuse)
    op = matrix_free(kernel, x, x).add_jitter(1e-1)
    with settings.max_cholesky_size(10), settings.cg_tolerance(1e-3), settings.min_preconditioning_size(100):
        quadratic, determinant = op.inv_quad_logdet(random(900, 1), logdet=True)
        (quadratic + determinant).backward()
    assert kernel.outputscale.isfinite()
    assert op.diagonal(dim1=-1, dim2=-2).shape == (900,)
    assert op[5].shape == (900,)
    assert used() == {"tiled"}


@pytest.mark.slow
def test_a_matrix_that_does_not_fit_is_refused_by_name():
    kernel, x = RBFKernel(), torch.rand(8000, 2)
    with autokern.enabled(), autokern.using(memory="100MiB"):
        with pytest.raises(MemoryBudgetError, match=r"8000 x 8000.*0\.238 GiB.*AUTOKERN_MEMORY"):
            matrix_free(kernel, x, x).to_dense()
        assert matrix_free(kernel, x, x).matmul(torch.ones(8000, 1)).shape == (8000, 1)
