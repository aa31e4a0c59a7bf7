"""Where autokern stays out of the way: modes that are not its business, and arguments that it cannot read."""

from __future__ import annotations

import warnings

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from support.models import ExactModel, loss_of
from torch.utils.checkpoint import checkpoint

import autokern
from autokern.runtime import dispatch

pytestmark = pytest.mark.usefixtures("one_thread")
FORCED = {"kernel_matrix": "gemm", "exact_log_prob": "fused"}


def regression(n=30):
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return ExactModel(x, x.sum(-1).sin(), ScaleKernel(RBFKernel(ard_num_dims=2))).double()


def loss(model):
    return loss_of(ExactMarginalLogLikelihood(model.likelihood, model))


def calls():
    return sum(sum(counts.values()) for counts in dispatch.stats().values())


def test_nothing_is_dispatched_under_autocast():
    with autokern.enabled(), autokern.using(force=FORCED), warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            under = loss(regression())
        assert calls() == 0
        loss(regression())
        assert calls() > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(under, loss(regression()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_what_it_computed_whatever_was_decided_meanwhile(reentrant):
    def gradients(meanwhile):
        model = regression()
        kernel, x = model.covar_module, model.train_inputs[0].clone().requires_grad_()
        k = checkpoint(lambda x: kernel(x).to_dense(), x, use_reentrant=reentrant)
        meanwhile()
        return _pulled(k, x, kernel)

    expected = gradients(lambda: None)
    with autokern.enabled():
        for seed in range(6):
            with autokern.using(force=f"random:{seed}"):
                found = gradients(lambda: None)
            torch.testing.assert_close(found, expected)
        with autokern.using(force={"kernel_matrix": "gemm"}):
            block = autokern.using(force={"kernel_matrix": "broadcast"})
            found = gradients(block.__enter__)
            block.__exit__(None, None, None)
        torch.testing.assert_close(found, expected)


def _pulled(k, x, kernel):
    k.square().sum().backward()
    return [x.grad, *(p.grad for p in kernel.parameters())]


def test_saved_tensors_that_are_kept_elsewhere_are_those_of_stock():
    def packed():
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
            loss(regression()).backward()
        return seen

    expected = packed()
    with autokern.enabled(), autokern.using(force=FORCED):
        assert packed() == expected
