"""The operator that is multiplied tile by tile, in every way in which operators are used, against dense."""

import copy
import pickle
import unittest

import linear_operator
import pytest
import torch
from linear_operator import settings
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase
from support import tiling
from support.tiling import BATCH, KERNELS, NONE, SOME, assert_near, dense_of, each_size, operator, random, used

import autokern
from autokern.hooks.kernel_operator import MatrixFreeKernelOperator

pytestmark = tiling.FOR_OPERATORS


@tiling.each_kernel
@each_size
def test_products_and_their_gradients(make, m):
    op, leaves, dense = operator(make, 23, m)
    rhs, weights = random(op.shape[-1], 3, seed=4), random(23, 3, seed=9)
    found, expected = op @ rhs, dense.to_dense() @ rhs
    assert_near(found.detach(), expected.detach(), torch.float64, 1e4)  # gpytorch clamps distances at 1e-15
    for one, other in zip(*(torch.autograd.grad(out, leaves, weights) for out in (found, expected)), strict=True):
        assert_near(one, other, torch.float64, 1e5)
    assert used() == {"tiled"}


def test_second_derivatives_of_products():
    op, leaves, dense = operator(SOME)
    rhs, found = random(op.shape[-1], 3, seed=4), []
    for one in (op, dense):
        slopes = torch.autograd.grad((one @ rhs).square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(slope.square().sum() for slope in slopes), leaves))
    for one, other in zip(*found, strict=True):
        assert_near(one, other, torch.float64, 1e6)
    assert used() == {"tiled"}


def test_only_a_part_with_rows_and_columns_the_same_stays_symmetric():
    op, *_ = operator(SOME)
    chosen = torch.tensor([5, 1, 2])
    assert all(part._same for part in (op, op[2:9, 2:9], op.mT, op.unsqueeze(0), op.clone(), op.detach()))
    assert not any(part._same for part in (op[2:9], op[:, 1:], op[1:5, 2:6], op[2:9, 2:9][:, 1:]))
    assert op._getitem(chosen, chosen.clone())._same
    assert not op._getitem(chosen, chosen.flip(0))._same


COPIES = {
    "deep-copied": copy.deepcopy,
    "rebuilt": lambda op: op.representation_tree()(*op.representation()),
    "evaluated": lambda op: op.evaluate_kernel(),
}


@pytest.mark.thin("how", "batch own m")
@pytest.mark.parametrize("how", COPIES.values(), ids=COPIES)
@tiling.each_batch
@each_size
def test_copies_are_the_same(how, batch, own, m):
    op = operator(SOME, 23, m, batch, own)[0].detach()
    rhs = random(op.shape[-1], 2, seed=4)
    before = op @ rhs
    made = how(op)
    assert type(made) is MatrixFreeKernelOperator
    assert (made.shape, made.dtype, made._same) == (op.shape, op.dtype, op._same)
    assert (made @ rhs).equal(before)
    assert not made.requires_grad


def test_pickles_of_all_kinds_are_read_by_gpytorch_alone():
    op = operator(SOME)[0]
    for part in (op, op[2:9, 2:9], op[2:9], operator(SOME, 23, 19)[0].mT, op._mul_matrix(op)):
        data = pickle.dumps(part)
        assert b"autokern" not in data
        assert_near(pickle.loads(data).to_dense(), part.to_dense().detach(), op.dtype)


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


of_the_library = pytest.mark.filterwarnings("ignore")  # about what it tests on purpose


class _Own:
    """For linear_operator's own tests of operators: those that are tested, and their truth."""

    seed = 0
    form = "scaled rbf"
    batch, own, m = NONE, NONE, None

    def create_linear_op(self):
        op, _, _ = operator(KERNELS[self.form], 8, self.m, self.batch, self.own, torch.float32)
        return op.detach().requires_grad_(True)

    def evaluate_linear_op(self, linear_op):
        return dense_of(linear_op)


@of_the_library
class TestSquare(_Own, LinearOperatorTestCase, unittest.TestCase):
    pass


@pytest.mark.slow
class TestTwoShapes(TestSquare):
    form = "two shapes"


class TestBatch(TestSquare):
    batch = own = torch.Size([2])
    form = "sum of products"


class TestBatchOfHyperparameters(TestSquare):
    own = torch.Size([3])
    form = "matern 5/2"


@of_the_library
class TestRectangular(_Own, RectangularLinearOperatorTestCase, unittest.TestCase):
    m, form = 5, "sum of products"


class TestRectangularBatch(TestRectangular):
    batch = torch.Size([2])
