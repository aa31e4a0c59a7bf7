"""linear_operator's own tests of operators, for kernel matrices that are multiplied tile by tile."""

from __future__ import annotations

import unittest

import pytest
import torch
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase
from support.tiling import KERNELS, NONE, dense_of, operator

pytestmark = [
    pytest.mark.usefixtures("only_tiles"),
    pytest.mark.filterwarnings("ignore"),  # of the library's, about what it tests on purpose
]


class _Own:
    """Makes the operators that are tested, and their truth."""

    seed = 0
    form = "scaled rbf"
    batch, own, m = NONE, NONE, None

    def create_linear_op(self):
        op, _, _ = operator(KERNELS[self.form], 8, self.m, self.batch, self.own, torch.float32)
        return op.detach().requires_grad_(True)

    def evaluate_linear_op(self, linear_op):
        return dense_of(linear_op)


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


class TestRectangular(_Own, RectangularLinearOperatorTestCase, unittest.TestCase):
    m, form = 5, "sum of products"


class TestRectangularBatch(TestRectangular):
    batch = torch.Size([2])
