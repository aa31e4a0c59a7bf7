"""Tensors that others hold: changed in place between forward and backward pass, and cotangents that vmap batches."""

import pytest
import torch
from gpytorch.kernels import RBFKernel
from support.tiling import random

from autokern.core.autograd import _Computed
from autokern.kernels import matmul
from autokern.kernels import matrix as matrices
from autokern.kernels import tree as trees
from autokern.kernels.tiles import Plan
from autokern.ops.inv_quad_logdet import closed_form
from autokern.prediction.inverse_factor import RowBlocks

pytestmark = pytest.mark.usefixtures("enabled")


def batched(function, inputs, count=3):
    """Compare batched cotangents with single ones, by either vmap, once and nested, with and without a graph."""
    out = function()
    v = random(count, *out.shape, seed=9)
    for graph in (False, True):
        single = [torch.autograd.grad(out, inputs, g, retain_graph=True, create_graph=graph) for g in v]
        expected = [torch.stack(column) for column in zip(*single, strict=True)]

        def grad(g, graph=graph):
            return torch.autograd.grad(out, inputs, g, retain_graph=True, create_graph=graph)

        old = torch.autograd.grad(out, inputs, v, is_grads_batched=True, retain_graph=True, create_graph=graph)
        nested = torch.vmap(torch.vmap(grad))(v[None])
        for found in (old, torch.vmap(grad)(v), [t[0] for t in nested]):
            for one, truth in zip(found, expected, strict=True):
                torch.testing.assert_close(one, truth)


def test_cotangents_of_products():
    x, rhs = random(20, 2).requires_grad_(), random(20, 3, seed=4).requires_grad_()
    tree = trees.read(RBFKernel().double(), x)
    batched(lambda: matmul.matmul(tree, None, rhs, Plan(16)), [x, rhs])
    batched(lambda: matrices.matrix(tree, None, True, "again"), [x])


def test_backward_passes_of_one_quadratic_form_may_meet(monkeypatch):
    """Two threads could find the factor that only one of them may overwrite."""
    half, solve, within = random(6, 6), torch.linalg.solve_triangular, []
    k, rhs = (half @ half.mT + torch.eye(6, dtype=torch.float64)).requires_grad_(), random(6, 1)
    value = sum(part.sum() for part in closed_form(k, None, rhs))

    def slope():
        return torch.autograd.grad(value, k, retain_graph=True)[0]

    def amid(*args, **options):
        if not within:
            within.append(None)
            within[0] = slope()
        return solve(*args, **options)

    monkeypatch.setattr(torch.linalg, "solve_triangular", amid)
    found = slope()
    torch.testing.assert_close(found, within[0])
    torch.testing.assert_close(found, slope())


def test_backward_passes_of_one_known_value_may_meet():
    """One could release the gradients between the other's check and use of them."""

    class Context:
        gradients, saved_tensors, shapes = [torch.tensor(3.0)], (), [torch.Size()]

        @property
        def needs_input_grad(self):
            self.gradients = None
            return False, False, False, True

    context = Context()
    with torch.no_grad():
        assert _Computed.backward(context, torch.tensor(2.0))[3].item() == 6.0
        with pytest.raises(RuntimeError, match="second time"):
            _Computed.backward(context, torch.tensor(2.0))


def test_cotangents_of_strips():
    matrix = torch.linalg.cholesky(torch.eye(600, dtype=torch.float64) * 2)
    blocks, b = RowBlocks(matrix), random(4, 600).requires_grad_()
    batched(lambda: blocks.right_transposed(b), [b])
    batched(lambda: blocks.right(b), [b])
