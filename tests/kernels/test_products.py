"""Products tile by tile, and what is pulled back through them, against the plain formula in float64."""

from __future__ import annotations

import pytest
import torch
from support.tiling import (
    KERNELS,
    NONE,
    PLANS,
    assert_near,
    assert_right,
    distinct,
    prepared,
    product,
    random,
    read,
    truth,
)

from autokern.kernels import matmul
from autokern.kernels import matrix as matrices
from autokern.kernels import tree as trees
from autokern.kernels.tiles import Plan
from autokern.system import threads

each_kernel = pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
either_side = pytest.mark.parametrize("same", [True, False], ids=["same", "cross"])


@pytest.fixture(autouse=True)
def _two(monkeypatch):
    """Two share the work, whatever this machine has."""
    monkeypatch.setattr(threads, "members", lambda device: 2)


def arguments(make, n=43, m=37, t=3, same=True, dtype=torch.float64, batch=NONE, d=3):
    kernel = prepared(make, batch, dtype)
    x1 = random(n, d, dtype=dtype).requires_grad_()
    x2 = x1 if same else random(m, d, seed=2, dtype=dtype).requires_grad_()
    return kernel, x1, x2, random(x2.shape[-2], t, seed=3, dtype=dtype).requires_grad_()


# --- values and gradients ---------------------------------------------------------------------------------------------


def formed(tree, others):
    return matrices.matrix(tree, others, others is None, "again")


@pytest.mark.thin
@each_kernel
@either_side
@each_dtype
def test_the_matrix_itself_and_its_gradients(make, same, dtype):
    kernel, x1, x2, _ = arguments(make, same=same, dtype=dtype)
    found = formed(*read(kernel, x1, x2))
    identity = torch.eye(found.shape[-1], dtype=dtype)
    expected, (exact, *exact_tensors) = truth(kernel, x1, x2, identity)
    assert_near(found.detach(), expected.detach(), dtype)
    if same:
        assert found.diagonal().unique().numel() == 1
        torch.testing.assert_close(found, found.mT)
    weights = random(*found.shape, seed=7, dtype=dtype)  # not symmetric
    ours = torch.autograd.grad(found, distinct(x1, x2, *kernel.parameters()), weights)
    theirs = torch.autograd.grad(expected, distinct(*exact_tensors[:2], *exact.parameters()), weights.double())
    for one, other in zip(ours, theirs, strict=True):
        assert_near(one, other, dtype, 10)


# --- batches ----------------------------------------------------------------------------------------------------------

BATCHES = [
    ((2,), (2,), (2,), (2,)),
    ((3, 2), (2,), (), ()),
    ((), (), (2,), ()),
    ((), (), (), (2,)),
    ((2, 1), (3,), (1, 3), ()),
    ((), (), (3, 1), (2,)),
    ((1,), (1,), (1,), (1,)),
]


@pytest.mark.thin("batch", "name")
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", ["scaled rbf", "sum of products", "two shapes", "constants first"])
def test_batches_broadcast(batch, name):
    first, second, columns, own = batch
    kernel = prepared(KERNELS[name], torch.Size(own))
    x1, x2 = random(*first, 19, 3).requires_grad_(), random(*second, 18, 3, seed=2).requires_grad_()
    assert_right(kernel, x1, x2, random(*columns, 18, 2, seed=3).requires_grad_(), Plan(16))
    assert_right(kernel, x1, x1, random(*columns, 19, 2, seed=3).requires_grad_(), Plan(16))


@pytest.mark.parametrize(("n", "m", "t"), [(0, 5, 2), (5, 0, 2), (5, 5, 0), (0, 0, 2), (0, 0, 0)])
@each_plan
def test_what_is_empty_is_what_dense_gives(n, m, t, plan):
    assert_right(*arguments(KERNELS["sum of products"], n, m, t, same=False), plan)
    kernel, x1, x2, _ = arguments(KERNELS["sum of products"], n, m, t, same=False)
    assert formed(*read(kernel, x1, x2)).shape == (n, m)


@pytest.mark.parametrize("where", ["points", "columns", "kernel"])
def test_an_empty_batch_is_what_dense_gives(where):
    kernel = prepared(KERNELS["two shapes"], torch.Size([0] if where == "kernel" else []))
    x = random(*([0] if where == "points" else []), 5, 3).requires_grad_()
    rhs = random(*([0] if where == "columns" else []), 5, 2).requires_grad_()
    assert_right(kernel, x, x, rhs, Plan(16))
    assert product(kernel, x, x, rhs, Plan(16)).shape == (0, 5, 2)


# --- layouts, and what is wanted --------------------------------------------------------------------------------------


def test_backward_twice_is_the_same_and_after_a_change_an_error():
    kernel, x1, x2, rhs = arguments(KERNELS["sum of products"], same=False)
    out = product(kernel, x1, x2, rhs, Plan(16))
    leaves = distinct(x1, x2, rhs, *kernel.parameters())
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))
    with torch.no_grad():
        rhs.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# --- order of sums ----------------------------------------------------------------------------------------------------


@each_plan
@either_side
def test_two_runs_are_equal_to_the_bit(plan, same):
    def run():
        kernel, x1, x2, rhs = arguments(KERNELS["sum of products"], n=150, m=130, same=same, dtype=torch.float32)
        out = product(kernel, x1, x2, rhs, plan)
        return [out, *torch.autograd.grad(out.square().sum(), distinct(x1, x2, rhs, *kernel.parameters()))]

    for one, other in zip(run(), run(), strict=True):
        assert one.equal(other)


# --- derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.thin("make", "same")
@each_kernel
@either_side
def test_first_and_second_derivatives_by_finite_differences(make, same, monkeypatch):
    monkeypatch.setattr(threads, "members", lambda device: 1)  # thousands of products that last no time
    kernel, x1, x2, rhs = arguments(make, n=18, m=17, t=2, same=same)
    tree = trees.read(kernel, x1.detach())
    others = None if same else trees.read(kernel, x2.detach()).points
    form, tensors = trees.apart(tree, others)
    tensors = [t.detach().clone().requires_grad_() for t in (rhs, *tensors)]

    def run(rhs, *rest):
        return matmul.matmul(*form.pair(rest), rhs, Plan(16))

    def matrix(*rest):
        return formed(*form.pair(rest))

    options = {"fast_mode": True}
    assert torch.autograd.gradcheck(run, tensors, **options)
    assert torch.autograd.gradcheck(matrix, tensors[1:], **options)
    assert torch.autograd.gradgradcheck(run, tensors, atol=1e-4, **options)
    assert torch.autograd.gradgradcheck(matrix, tensors[1:], atol=1e-4, **options)
