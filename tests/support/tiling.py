"""What the tests of tiles share: kernels of every form with parameters off their defaults, truth, and bounds."""

import copy

import pytest
import torch
from gpytorch.kernels import ConstantKernel, MaternKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel

from autokern.hooks.kernel_operator import matrix_free
from autokern.kernels import embedded, matmul
from autokern.kernels import matrix as matrices
from autokern.kernels import tree as trees
from autokern.kernels.tiles import Plan
from autokern.runtime import dispatch

NONE = torch.Size()
KERNELS = {
    "rbf": lambda b: RBFKernel(batch_shape=b),
    "scaled rbf": lambda b: ScaleKernel(RBFKernel(ard_num_dims=3, batch_shape=b), batch_shape=b),
    "matern 1/2": lambda b: ScaleKernel(MaternKernel(0.5, ard_num_dims=3, batch_shape=b), batch_shape=b),
    "matern 3/2": lambda b: MaternKernel(1.5, ard_num_dims=3, batch_shape=b),
    "matern 5/2": lambda b: ScaleKernel(MaternKernel(2.5, batch_shape=b), batch_shape=b),
    "rq": lambda b: ScaleKernel(RQKernel(ard_num_dims=3, batch_shape=b), batch_shape=b),
    "periodic": lambda b: ScaleKernel(PeriodicKernel(ard_num_dims=3, batch_shape=b), batch_shape=b),
    "sum of products": lambda b: (
        ScaleKernel(
            RBFKernel(active_dims=(0, 2), batch_shape=b) * PeriodicKernel(active_dims=(1,), batch_shape=b),
            batch_shape=b,
        )
        + ConstantKernel(batch_shape=b)
        + MaternKernel(1.5, batch_shape=b) * ScaleKernel(RQKernel(batch_shape=b), batch_shape=b)
    ),
    "two shapes": lambda b: (
        RQKernel(batch_shape=b) * ScaleKernel(RQKernel(active_dims=(1,), batch_shape=b), batch_shape=b)
    ),
    "scale of scales": lambda b: ScaleKernel(ScaleKernel(RBFKernel(batch_shape=b), batch_shape=b), batch_shape=b),
    "scaled sum": lambda b: ScaleKernel(
        ScaleKernel(MaternKernel(2.5, batch_shape=b) + RBFKernel(batch_shape=b), batch_shape=b), batch_shape=b
    ),
    "constants first": lambda b: (
        ConstantKernel(batch_shape=b) * ConstantKernel(batch_shape=b) * MaternKernel(2.5, batch_shape=b)
        + ScaleKernel(ConstantKernel(batch_shape=b), batch_shape=b)
    ),
    "constants last": lambda b: (
        RBFKernel(batch_shape=b) * ScaleKernel(ConstantKernel(batch_shape=b), batch_shape=b)
        + ConstantKernel(batch_shape=b)
    ),
}  # fmt: skip
PLANS = {"symmetric": Plan(16), "from the left": Plan(16, symmetric=False), "one tile": Plan(512)}
FOR_OPERATORS = pytest.mark.usefixtures("only_tiles")
each_kernel = pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
either_side = pytest.mark.parametrize("same", [True, False], ids=["same", "cross"])
each_size = pytest.mark.parametrize("m", [None, 19], ids=["same", "cross"])
BATCH = torch.Size([2])
BATCHES = [(NONE, NONE), (BATCH, BATCH), (BATCH, NONE), (NONE, BATCH), (torch.Size([3, 1]), BATCH)]
each_batch = pytest.mark.parametrize(("batch", "own"), BATCHES, ids=str)
SOME = KERNELS["sum of products"]


def prepared(make, batch=NONE, dtype=torch.float64, seed=0):
    """A kernel with parameters off their defaults."""
    generator = torch.Generator().manual_seed(seed)
    kernel = make(batch).to(dtype)
    for parameter in kernel.parameters():
        parameter.data += 0.5 * torch.rand(parameter.shape, generator=generator).to(dtype)
    return kernel


def random(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def read(kernel, x1, x2):
    """A tree and the points of the columns; None where both sides are one tensor."""
    return trees.read(kernel, x1), None if x2 is x1 else trees.read(kernel, x2).points


def formed(tree, others):
    return matrices.matrix(tree, others, others is None, "again")


def product(kernel, x1, x2, rhs, plan):
    """The product by a plan, or by the matrix where there is none."""
    tree, others = read(kernel, x1, x2)
    if plan is not None:
        return matmul.matmul(tree, others, rhs, plan)
    matrix = formed(tree, others)
    if others is None and not kernel.batch_shape and x1.numel():
        assert matrix.diagonal(dim1=-2, dim2=-1).unique().numel() == 1
        torch.testing.assert_close(matrix, matrix.mT)
    return matrix @ rhs


def in_float64(*tensors):
    """Leaves of their own with the same values; one and the same stays one."""
    found: dict[int, torch.Tensor] = {}
    for t in tensors:
        found.setdefault(id(t), t.detach().double().requires_grad_(t.requires_grad))
    return [found[id(t)] for t in tensors]


def truth(kernel, x1, x2, rhs):
    """The product by plain steps in float64, and what it was made of."""
    kernel = copy.deepcopy(kernel).double()
    x1, x2, rhs = in_float64(x1, x2, rhs)
    return trees.dense(*read(kernel, x1, x2)) @ rhs, (kernel, x1, x2, rhs)


def distinct(*tensors):
    """Leaves that want gradients, each once."""
    return list({id(t): t for t in tensors if t.requires_grad}.values())


def assert_near(found, expected, dtype, factor=1.0):
    """Entries agree within what the largest of them allows."""
    assert found.shape == expected.shape
    scale = 1e-3 + (expected.abs().max().item() if expected.numel() else 0.0)
    bound = factor * scale * {torch.float64: 1e-11, torch.float32: 1e-3}[dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=bound)


def operator(make, n=23, m=None, batch=NONE, own=NONE, dtype=torch.float64, seed=0):
    """An operator, the leaves that it is made of, and gpytorch's own."""
    kernel = prepared(make, own, dtype, seed)
    x1 = random(*batch, n, 3, seed=seed + 1, dtype=dtype).requires_grad_()
    x2 = x1 if m is None else random(*batch, m, 3, seed=seed + 2, dtype=dtype).requires_grad_()
    return matrix_free(kernel, x1, x2), distinct(x1, x2, *kernel.parameters()), kernel(x1, x2)


def dense_of(op):
    """The matrix from what an operator is made of, by plain steps."""
    kernel, same = op._kernel, op.nontensor_params["same"]
    others = embedded.read(kernel, op.x1 if same else op.x2).points
    return trees.dense(embedded.read(kernel, op.x1), others)


def assert_right(kernel, x1, x2, rhs, plan, factor=1.0):
    """Values and all gradients are those of the formula."""
    dtype = rhs.dtype
    found = product(kernel, x1, x2, rhs, plan)
    expected, (exact, *exact_tensors) = truth(kernel, x1, x2, rhs)
    assert found.dtype is dtype
    assert_near(found.detach(), expected.detach(), dtype, factor)
    leaves = distinct(x1, x2, rhs, *kernel.parameters())
    if not leaves:
        return
    weights = random(*found.shape, seed=7, dtype=dtype)
    ours = torch.autograd.grad(found, leaves, weights)
    theirs = torch.autograd.grad(expected, distinct(*exact_tensors, *exact.parameters()), weights.double())
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype is dtype
        assert_near(one, other, dtype, 10 * factor)


def used():
    """Which candidates multiplied."""
    return set(dispatch.stats().get("kernel_matmul", {}))
