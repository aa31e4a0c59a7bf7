"""The operator that is multiplied tile by tile, in every way in which operators are used, against dense."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.tiling import (
    FOR_OPERATORS,
    SOME,
    assert_as_dense,
    assert_near,
    each_batch,
    each_kernel,
    each_size,
    operator,
    random,
    used,
)

from autokern.hooks.kernel_operator import MatrixFreeKernelOperator

pytestmark = FOR_OPERATORS


@each_kernel
@each_size
def test_products_and_their_gradients(make, m):
    assert_as_dense(lambda op: op @ random(op.shape[-1], 3, seed=4), make=make, m=m)
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
    "cloned": lambda op: op.clone(),
    "detached": lambda op: op.detach(),
    "rebuilt": lambda op: op.representation_tree()(*op.representation()),
    "evaluated": lambda op: op.evaluate_kernel(),
    "moved": lambda op: op.to(torch.device("cpu")),
    "to double": lambda op: op.double(),
}


@pytest.mark.thin("how", "batch own m")
@pytest.mark.parametrize("how", COPIES.values(), ids=COPIES)
@each_batch
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


def test_parts_transposes_and_elementwise_products_are_pickled_too():
    op = operator(SOME)[0]
    for part in (op[2:9, 2:9], op[2:9], operator(SOME, 23, 19)[0].mT, op._mul_matrix(op)):
        assert_near(pickle.loads(pickle.dumps(part)).to_dense(), part.to_dense().detach(), op.dtype)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, None)])
def test_no_points(shape):
    op, leaves, dense = operator(SOME, *shape)
    out = op @ random(op.shape[-1], 2, seed=4)
    assert out.equal(dense.to_dense() @ random(op.shape[-1], 2, seed=4))
    assert op.to_dense().shape == dense.shape
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), leaves))
