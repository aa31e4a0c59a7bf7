"""Training steps of large models by each candidate that is made for them, against exact ones in double precision."""

import copy

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from support.models import ExactModel, step
from support.trees import KERNELS

import autokern

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("error")]
PRECONDITIONED, ON_A_LINE = {"exact_log_prob": "preconditioned"}, {"exact_log_prob": "state-space"}


def made(kernel, n=1100, d=2, dtype=torch.float64):
    draw = torch.Generator().manual_seed(n)
    x = torch.rand(n, d, generator=draw, dtype=torch.float64).to(dtype)
    y = (6 * x.sum(-1)).sin() + 0.1 * torch.randn(n, generator=draw, dtype=torch.float64).to(dtype)
    model = ExactModel(x, y, kernel).to(dtype).train()
    model.likelihood.noise = 0.05
    return model


def moved(model):
    """After steps of an optimiser, whose second is large."""
    for by in (0.0, -0.3, 0.7):
        with torch.no_grad():
            for parameter in model.covar_module.parameters():
                parameter.add_(by)
        yield


def replaced(model):
    """After its kernel has got other parts."""
    for part in (MaternKernel(0.5), RBFKernel() + MaternKernel(0.5), MaternKernel(0.5, active_dims=[1])):
        model.covar_module.base_kernel = part.double()
        yield


def compared(model):
    """Loss and gradients by the candidate that serves, and exact ones."""
    exact = copy.deepcopy(model).double()
    with gpytorch.settings.fast_computations(False, False, False):
        expected = step(exact)
    with autokern.enabled():
        return step(model), expected


CASES = {
    "fused": (lambda: made(KERNELS["matern52"](), 1000), None, moved, 1e-11, 1e-8),
    "fused of a sum": (lambda: made(KERNELS["sum"](), 1000), None, moved, 1e-11, 1e-8),
    "preconditioned": (lambda: made(None), PRECONDITIONED, moved, 1e-4, 1e-3),
    "preconditioned in float32": (lambda: made(None, dtype=torch.float32), PRECONDITIONED, moved, 1e-4, 1e-2),
    "preconditioned with other parts": (lambda: made(None), PRECONDITIONED, replaced, 1e-3, 5e-2),
    "state-space": (lambda: made(KERNELS["matern12"](), 1200, 1), None, moved, 1e-10, 1e-7),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_of_training_are_exact_ones(name):
    make, force, changes, bound, slope = CASES[name]
    model, state, count = make(), torch.random.get_rng_state(), 0
    for _ in changes(model):
        with autokern.using(force=force):
            (loss, found), (exact, truth) = compared(model)
        assert loss.item() == pytest.approx(exact.item(), abs=bound)
        size = torch.cat([one.flatten() for one in truth]).norm()
        for one, other in zip(found, truth, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=0, atol=slope * size.item())
        count += 1
    assert autokern.stats()["exact_log_prob"] == {name.partition(" ")[0]: count}
    assert torch.random.get_rng_state().equal(state)


OTHERS = {
    "a product": (lambda: MaternKernel(2.5) * MaternKernel(1.5), 1),
    "a smooth part": (lambda: MaternKernel(2.5) + RBFKernel(), 1),
    "two dimensions": (lambda: MaternKernel(2.5), 2),
    "a leaf that takes the dimension twice": (lambda: MaternKernel(active_dims=(0, 0)) + MaternKernel(), 1),
}


@pytest.mark.parametrize(("kernel", "d"), OTHERS.values(), ids=OTHERS)
def test_other_models_than_those_on_a_line_are_left_to_others(kernel, d):
    with autokern.using(force=ON_A_LINE):
        (loss, found), (exact, truth) = compared(made(kernel(), 500, d))
    assert "state-space" not in autokern.stats()["exact_log_prob"]
    torch.testing.assert_close(loss, exact, rtol=1e-10, atol=0)
    torch.testing.assert_close(found, truth, rtol=1e-7, atol=1e-7)
