"""The operator that is multiplied tile by tile, in every way in which operators are used, against dense."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.tiling import (
    FOR_OPERATORS,
    KERNELS,
    SOME,
    assert_as_dense,
    assert_near,
    each_batch,
    each_kernel,
    each_size,
    operator,
    prepared,
    random,
    used,
)

from autokern.hooks.kernel_operator import MatrixFreeKernelOperator, matrix_free

pytestmark = FOR_OPERATORS

# --- products ---------------------------------------------------------------------------------------------------------


@each_kernel
@each_size
def test_products_and_their_gradients(make, m):
    assert_as_dense(lambda op: op @ random(op.shape[-1], 3, seed=4), make=make, m=m)
    assert used() == {"tiled"}


@pytest.mark.thin("batch own", "m")
@each_batch
@each_size
def test_products_of_batches(batch, own, m):
    assert_as_dense(lambda op: op @ random(op.shape[-1], 3, seed=4), batch=batch, own=own, m=m)
    assert_as_dense(lambda op: op @ random(2, op.shape[-1], 3, seed=4), batch=batch, own=own, m=m)
    assert_as_dense(lambda op: op.mT @ random(op.shape[-2], 3, seed=4), batch=batch, own=own, m=m)


# The library's own tests, in test_kernel_operator_library.py, take parts of every other kind.
READS = {
    "vector": lambda op: op @ random(op.shape[-1], seed=4),
    "from the left": lambda op: random(3, op.shape[-2], seed=4) @ op,
    "vector from the left": lambda op: random(op.shape[-2], seed=4) @ op,
    "transposed": lambda op: op.mT,
    "transposed product": lambda op: op._transpose_nonbatch() @ random(op.shape[-2], 2, seed=4),
    "dense": lambda op: op,
    "scaled": lambda op: (op * 1.5) @ random(op.shape[-1], 2, seed=4),
    "sum of two": lambda op: (op + op) @ random(op.shape[-1], 2, seed=4),
    "sum of rows": lambda op: op.sum(-2),
    "sum of columns": lambda op: op.sum(-1),
    "block on the diagonal": lambda op: op[2:9, 2:9],
    "every second": lambda op: op[::2, 1::3],
    "product of a block": lambda op: op[2:9, 4:] @ random(op.shape[-1] - 4, 2, seed=4),
    "rows of a slice": lambda op: op[1:8][2:4, :5],
    "product of an expanded one": lambda op: op.expand(2, *op.shape) @ random(2, op.shape[-1], 2, seed=4),
}


@pytest.mark.thin("read", "m")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
@each_size
def test_reads_are_those_of_the_dense_matrix(read, m):
    assert_as_dense(read, m=m)


def test_only_a_part_with_rows_and_columns_the_same_stays_symmetric():
    op, *_ = operator(SOME)
    chosen = torch.tensor([5, 1, 2])
    assert all(part._same for part in (op, op[2:9, 2:9], op.mT, op.unsqueeze(0), op.clone(), op.detach()))
    assert not any(part._same for part in (op[2:9], op[:, 1:], op[1:5, 2:6], op[2:9, 2:9][:, 1:]))
    assert op._getitem(chosen, chosen.clone())._same
    assert not op._getitem(chosen, chosen.flip(0))._same


# --- copies -----------------------------------------------------------------------------------------------------------

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


@pytest.mark.thin("make", "batch own m")
@each_kernel
@each_batch
@each_size
def test_pickles_are_read_by_gpytorch_alone(make, batch, own, m):
    op = operator(make, 23, m, batch, own)[0]
    data = pickle.dumps(op)
    assert b"autokern" not in data
    made = pickle.loads(data)
    assert (made.shape, made.dtype, made.requires_grad) == (op.shape, op.dtype, False)
    assert_near(made.to_dense(), op.to_dense().detach(), op.dtype)


def test_parts_transposes_and_elementwise_products_are_pickled_too():
    op = operator(SOME)[0]
    for part in (op[2:9, 2:9], op[2:9], operator(SOME, 23, 19)[0].mT, op._mul_matrix(op)):
        assert_near(pickle.loads(pickle.dumps(part)).to_dense(), part.to_dense().detach(), op.dtype)


def test_parts_that_want_no_gradient_get_none():
    kernel = prepared(KERNELS["scaled rbf"]).requires_grad_(False)
    x = random(23, 3)
    assert not (matrix_free(kernel, x, x) @ random(23, 2, seed=4)).requires_grad
    out = matrix_free(kernel, x.requires_grad_(), x) @ random(23, 2, seed=4)
    assert torch.autograd.grad(out.sum(), x)[0].any()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, None)])
def test_no_points(shape):
    op, leaves, dense = operator(SOME, *shape)
    out = op @ random(op.shape[-1], 2, seed=4)
    assert out.equal(dense.to_dense() @ random(op.shape[-1], 2, seed=4))
    assert op.to_dense().shape == dense.shape
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), leaves))


def test_sizes_that_do_not_fit_are_the_librarys_error():
    op, *_ = operator(SOME, 23, 19)
    with pytest.raises(RuntimeError, match=r"[Ss]ize"):
        op @ random(23, 2)
