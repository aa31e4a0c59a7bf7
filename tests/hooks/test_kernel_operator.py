"""The operator that is multiplied tile by tile, in every way in which operators are used, against dense."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.tiling import (
    BATCH,
    FOR_OPERATORS,
    KERNELS,
    NONE,
    SOME,
    assert_as_dense,
    assert_near,
    dense_of,
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
    "rows": lambda op: op[3:9],
    "columns": lambda op: op[:, 2:11],
    "block": lambda op: op[2:7, 1:9],
    "block on the diagonal": lambda op: op[2:9, 2:9],
    "every second": lambda op: op[::2, 1::3],
    "product of a block": lambda op: op[2:9, 4:] @ random(op.shape[-1] - 4, 2, seed=4),
    "one row": lambda op: op[4],
    "one column": lambda op: op[:, 3],
    "one entry": lambda op: op[3, 5].unsqueeze(0),
    "chosen rows": lambda op: op[torch.tensor([3, 1, 1])],
    "chosen entries": lambda op: op[torch.tensor([3, 1, 1]), torch.tensor([0, 1, 7])],
    "chosen block": lambda op: op[torch.tensor([3, 1, 1]).unsqueeze(-1), torch.tensor([0, 1])],
    "rows of a slice": lambda op: op[1:8][2:4, :5],
    "unsqueezed": lambda op: op.unsqueeze(0),
    "expanded": lambda op: op.expand(2, *op.shape),
    "product of an expanded one": lambda op: op.expand(2, *op.shape) @ random(2, op.shape[-1], 2, seed=4),
    "repeated": lambda op: op.repeat(2, 1, 1),
}
SQUARE = {
    "diagonal": lambda op: op.diagonal(dim1=-1, dim2=-2),
    "with a diagonal": lambda op: op.add_diagonal(torch.arange(1.0, op.shape[-1] + 1).double()),
    "with jitter": lambda op: op.add_jitter(0.1),
    "product with jitter": lambda op: op.add_jitter(0.1) @ random(op.shape[-1], 2, seed=4),
    "factor": lambda op: op.add_jitter(0.1).cholesky(),
    "with more rows": lambda op: op.add_jitter(1.0).cat_rows(
        1e-2 * torch.ones(1, op.shape[-1]).double(),
        torch.ones(1, 1).double(),
        generate_roots=False,
        generate_inv_roots=False,
    ),
    "root": lambda op: op.add_jitter(0.1).root_decomposition(),
}


@pytest.mark.thin("read", "m")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
@each_size
def test_reads_are_those_of_the_dense_matrix(read, m):
    assert_as_dense(read, m=m)


@pytest.mark.parametrize("read", SQUARE.values(), ids=SQUARE)
def test_reads_of_square_ones(read):
    assert_as_dense(read)


OF_BATCHES = {
    "one": lambda op: op[1],
    "last": lambda op: op[-1],
    "slice": lambda op: op[1:],
    "rows of one": lambda op: op[0, 3:5],
    "block of all": lambda op: op[:, 3:5, 2:9],
    "block on the diagonal": lambda op: op[..., 3:9, 3:9],
    "chosen": lambda op: op[torch.tensor([1, 0, 1])],
    "chosen of each": lambda op: op[torch.tensor([1, 0]), torch.tensor([3, 4]), torch.tensor([5, 6])],
    "chosen rows": lambda op: op[:, torch.tensor([1, 2]), :],
    "one row of each": lambda op: op[:, 3],
    "entry of each": lambda op: op[:, 3, 4],
    "sum": lambda op: op.sum(-3),
    "unsqueezed": lambda op: op.unsqueeze(-3),
    "expanded": lambda op: op.expand(3, *op.shape),
    "repeated": lambda op: op.repeat(2, 1, 1),
    "permuted": lambda op: op.unsqueeze(0).permute(1, 0, 2, 3),
    "transposed": lambda op: op.mT,
    "diagonal": lambda op: op.diagonal(dim1=-1, dim2=-2),
    "with jitter": lambda op: op.add_jitter(0.1),
}


@pytest.mark.thin("read", "own")
@pytest.mark.parametrize("read", OF_BATCHES.values(), ids=OF_BATCHES)
@pytest.mark.parametrize("own", [NONE, BATCH], ids=["shared", "own"])
def test_reads_of_batches(read, own):
    assert_as_dense(read, batch=BATCH, own=own)


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


@each_size
def test_other_dtypes(m):
    op = operator(SOME, 23, m)[0].detach()
    single = op.float()
    assert single.dtype == torch.float32
    found = single @ random(op.shape[-1], 2, seed=4, dtype=torch.float32)
    assert found.dtype == torch.float32
    assert_near(found, op @ random(op.shape[-1], 2, seed=4), torch.float32)
    assert single.double().dtype == torch.float64


def test_gradients_switched_on_later_go_to_the_tensors_of_the_operator():
    op = operator(SOME)[0].detach().requires_grad_(True)
    (op @ random(23, 2, seed=4)).sum().backward()
    other = op.detach().requires_grad_(True)
    dense_of(other).matmul(random(23, 2, seed=4)).sum().backward()
    for one, two in zip(op.representation(), other.representation(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        if one.grad is not None:
            assert_near(one.grad, two.grad, torch.float64, 10)


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
