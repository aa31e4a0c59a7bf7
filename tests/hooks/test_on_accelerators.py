"""Small exact models on an accelerator by arrays, with stock's numbers of the present values.

On a CPU the same tests look at arrays in the memory of the tensors.
"""

import contextlib

import gpytorch
import numpy as np
import pytest
import torch
from botorch.optim.closures.core import NdarrayOptimizationClosure
from gpytorch.kernels import MaternKernel, MultiDeviceKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from support.botorch_models import MODELS, closure
from support.exact_models import moments
from support.models import ExactModel, loss_of, points, step
from support.outcomes import assert_close, outcome, serving

import autokern
from autokern.model.parameters import Mirrors, fetched, placed

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
SIDES = ("stock", "arrays")
pytestmark = [
    pytest.mark.usefixtures("enabled"),
    pytest.mark.filterwarnings("ignore"),  # BoTorch recommends float64, and standardised outcomes
]


def fitted(device, name="usual", dtype=torch.float64):
    return MODELS[name]().to(device, dtype)


CASES = {
    "float32": ("usual", torch.float32),
    **{name: (name,) for name in ("usual", "two outputs", "known noise", "normalised inputs", "scaled")},
}


def evaluations(side, device, *of):
    """Losses and gradients at some vectors, and after changes that no vector tells of."""
    model = fitted(device, *of)
    mll, parameters, inner = closure(model)
    flat = NdarrayOptimizationClosure(inner, parameters)
    state, told = flat.state + 0.1, []
    changes = (
        lambda: next(iter(parameters.values())).data.add_(0.2),
        lambda: model.train_targets.mul_(1.5),
        lambda: mll.zero_grad(set_to_none=True),
    )
    with autokern.using(force={"objective": side}):
        for step in range(3):
            told += flat(state + 0.05 * step)
        with autokern.using(force={"objective": "stock"}):
            flat(state + 0.3)  # autograd writes gradients
        told += flat(state + 0.3)
        assert np.allclose(flat.state, state + 0.3)
        for change in changes:
            change()
            loss, gradients = inner()
            assert loss.device.type == device
            assert all(gradient.device.type == device for gradient in gradients)
            assert all(p.grad is gradient for p, gradient in zip(parameters.values(), gradients, strict=True))
            told += [loss.detach().cpu().numpy(), *(gradient.cpu().numpy() for gradient in gradients)]
    return told


@on_every_device
@pytest.mark.parametrize("case", CASES)
def test_closures_are_those_of_stock(case, device):
    loose = {"rtol": 2e-3, "atol": 1e-4} if case == "float32" else {"rtol": 1e-8, "atol": 1e-9}
    for one, other in zip(*(evaluations(side, device, *CASES[case]) for side in SIDES), strict=True):
        np.testing.assert_allclose(one, other, **loose)


def agree(run):
    """What arrays compute is what stock does."""
    assert_close(run("arrays"), run("stock"), rtol=1e-6, atol=1e-8)


@on_every_device
@pytest.mark.parametrize("n", [1, 2, 40])
def test_steps_and_their_second_derivatives_are_those_of_stock(n, device):
    def run(side):
        torch.manual_seed(1)
        x = points(n).to(device).requires_grad_()
        y = (4 * x.detach().sum(-1)).sin().requires_grad_()
        kernel = ScaleKernel(MaternKernel(2.5, ard_num_dims=2)) + ScaleKernel(RBFKernel() * PeriodicKernel())
        noisy = gpytorch.likelihoods.GaussianLikelihood(gpytorch.priors.GammaPrior(1.1, 0.05))
        model = ExactModel(x, y, kernel, noisy, gpytorch.means.LinearMean(2)).to(x)
        with autokern.using(force={"objective": side, "exact_log_prob": "stock"}):
            for _ in range(2):
                step(model)
                for parameter in model.parameters():
                    parameter.data.sub_(0.01 * parameter.grad)
            loss = loss_of(ExactMarginalLogLikelihood(model.likelihood, model))
            assert loss.device.type == device
            first = torch.autograd.grad(loss, [x, y, *model.parameters()], create_graph=True)
            total = sum(gradient.square().sum() for gradient in first)
            return loss, first, torch.autograd.grad(total, [*model.parameters()], materialize_grads=True)

    agree(run)


@on_every_device
@pytest.mark.parametrize("name", ["usual", "two outputs"])
@pytest.mark.parametrize("default", [False, True])
def test_posteriors_are_those_of_stock_and_of_the_present_values(name, default, device):
    def run(side):
        model = fitted(device, name).eval()
        x = points(5, 4, d=3).to(device).requires_grad_()

        def asked():
            posterior = model.posterior(x)
            return posterior.mean.square().sum() + posterior.variance.sum()

        with serving("posterior", side):
            with torch.device(device) if default else contextlib.nullcontext():  # a default device, or none
                value = asked()
            (first,) = torch.autograd.grad(value, x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
            slopes = torch.autograd.grad(asked(), [*model.covar_module.parameters()])
            for raw in (model.likelihood.noise_covar.raw_noise, model.covar_module.raw_lengthscale):
                raw.data.add_(0.3)
            model.prediction_strategy = None
            found = [value, first, second, *slopes, asked()]
        assert all(t.device.type == device for t in found)
        return found

    agree(run)


@on_every_device
def test_transfers_keep_values_and_shapes(device):
    numbers = [torch.rand(3, 2).mT, torch.rand(()), torch.rand(4, 0), torch.rand(1).expand(5)]
    for tensor, array in zip(numbers, fetched([t.to(device) for t in numbers]), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
    there = placed([*numbers, None], torch.device(device))
    assert there[-1] is None
    for tensor, other in zip(numbers, there, strict=False):
        assert other.device.type == device
        torch.testing.assert_close(other.cpu(), tensor, rtol=0, atol=0)


@pytest.mark.gpu
@needs_gpu
def test_mirrors_follow_their_tensors_unless_they_are_to_stay():
    first = torch.rand(3, 2, dtype=torch.float64, device="cuda").mT
    second = torch.tensor([True, False], device="cuda")
    follows, stays = Mirrors(), Mirrors(still=True)
    copies = [mirrors.of(t) for mirrors in (follows, stays) for t in (first, second)]
    assert follows.of(first) is copies[0]
    then = first.cpu().clone()
    first.add_(1.0)
    second.logical_not_()
    follows.pull()
    stays.pull()
    torch.testing.assert_close(copies[0], first.cpu(), rtol=0, atol=0)
    assert copies[1].tolist() == [False, True]
    torch.testing.assert_close(copies[2], then, rtol=0, atol=0)
    assert copies[3].tolist() == [True, False]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="with an accelerator, torch keeps the list of devices")
@pytest.mark.parametrize("n", [1, 12])
@pytest.mark.parametrize("inner", [False, True], ids=["whole", "inner"])
def test_a_model_over_several_devices_is_left_to_the_library(n, inner):
    """Its kernel works with accelerators only: without any, the library's own error is raised."""
    cpu, x = torch.device("cpu"), points(n)
    kernel = MultiDeviceKernel(RBFKernel() if inner else ScaleKernel(RBFKernel()), [cpu, cpu], output_device=cpu)
    model = ExactModel(x, x[:, 0], ScaleKernel(kernel) if inner else kernel).double()

    def outcomes():
        return outcome(lambda: step(model.train())), outcome(lambda: moments(model.eval()(x + 1)))

    found = outcomes()
    autokern.disable()
    assert found == outcomes()
    assert found[0][0][0] is AttributeError
