"""Kernels and noise of every kind that readings know: values and gradients of the library's."""

import math
import types
from pathlib import Path

import pytest
import torch
from botorch.models.kernels.downsampling import DownsamplingKernel
from botorch.models.kernels.linear_truncated_fidelity import LinearTruncatedFidelityKernel
from botorch.models.kernels.positive_index import PositiveIndexKernel
from botorch.models.utils.priors import BetaPrior
from gpytorch.kernels import CosineKernel, IndexKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods.hadamard_gaussian_likelihood import HadamardGaussianLikelihood
from support.array_kernels import KERNELS, mixture, of_kernel, tasks
from support.densities import D
from support.readings import agree, made

from autokern.density.exact_objective import Reading
from autokern.kernels import array_formulas as formulas
from autokern.kernels import array_parts
from autokern.model import kernel_parts
from autokern.model.arrays import UnreadError


@pytest.mark.parametrize(("n", "many"), [(1, array_parts._MANY), (2, 0), (13, 0), (40, array_parts._MANY)])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name, n, many, monkeypatch):
    monkeypatch.setattr(array_parts, "_MANY", many)  # the number of elements from which torch computes
    mll = of_kernel(name, made, n=n)
    reading = agree(mll, digits=10.0)
    with torch.no_grad():  # the next step of an optimiser
        for p in mll.parameters():
            p.mul_(0.8)
    agree(mll, reading, digits=10.0)


def test_a_kernel_is_read_after_what_the_guide_adds(monkeypatch):
    guide = (Path(__file__).parents[2] / "docs" / "contributing.md").read_text()

    def block(file):
        return guide.partition(f"# in autokern/{file}\n")[2].partition("```")[0]

    kernel = ScaleKernel(CosineKernel(active_dims=[1]))
    monkeypatch.setattr(kernel_parts, "_READ", kernel_parts._READ.copy())
    del kernel_parts._READ[CosineKernel]
    with pytest.raises(UnreadError, match="a kernel CosineKernel"):
        Reading(made(kernel, n=13))
    space = dict(vars(formulas))
    exec(block("kernels/array_formulas.py"), space)
    monkeypatch.setitem(formulas.FORMULAS, "cosine", space["_cosine"])
    kernel_parts._READ.update(eval(f"{{{block('model/kernel_parts.py')}}}", vars(kernel_parts)))
    agree(made(kernel, n=13), digits=10.0)


def test_fidelities_that_change_or_that_are_none():
    mll = made(LinearTruncatedFidelityKernel([2], dimension=D))
    reading = agree(mll)
    mll.model.covar_module.fidelity_dims[0] = 1
    assert not reading.holds()
    agree(mll)
    for dims in ([], [-1], [D], [0, 0, 1], list(range(D))):
        mll.model.covar_module.fidelity_dims = dims
        with pytest.raises(UnreadError, match="fidelities that are no columns"):
            Reading(mll)
    with pytest.raises(UnreadError, match="a fidelity of several columns"):
        Reading(made(DownsamplingKernel()))


def test_a_mixture_finer_than_all_differences_has_gradients_of_zero():
    """Points that meet pull at no scale; as differences of large sums their pull would be noise, which Adam follows."""
    mll = made(mixture(2, active_dims=[0]), n=9)
    x = 1000 * mll.model.train_inputs[0]
    x[1] = x[0]
    mll.model.set_train_data(x, strict=False)
    mll.model.covar_module.mixture_scales = 20.0
    parameters = dict(mll.named_parameters())
    _, gradients = Reading(mll).evaluate(parameters)
    found = dict(zip(parameters, gradients, strict=True))
    assert (found["model.covar_module.raw_mixture_scales"].abs() < 1e-12).all()
    assert (found["model.covar_module.raw_mixture_means"].abs() < 1e-9).all()
    assert (found["model.covar_module.raw_mixture_weights"].abs() > 1e-6).all()


def test_correlations_with_a_prior():
    kernel = PositiveIndexKernel(4, 2, task_prior=BetaPrior(2.5, 1.5), active_dims=[2])
    mll = tasks(made(RBFKernel(active_dims=[0]) * kernel), (2, 4))
    reading = agree(mll)
    kernel.IndexKernelPrior._dirichlet.concentration.mul_(1.1)
    agree(mll, reading)


def test_what_is_no_task():
    mll = made(RBFKernel(active_dims=[0]) * IndexKernel(3, active_dims=[2]))
    for value in (3.0, -1.0, math.nan):
        x = mll.model.train_inputs[0].clone()
        x[:, 2] = 1.0
        x[4, 2] = value
        mll.model.set_train_data(x, strict=False)
        assert Reading(mll).evaluate(dict(mll.named_parameters())) is None


@pytest.mark.parametrize("values", [(0, 1, 2), (0, 2, 5)])
def test_noise_of_tasks(values):
    """What is no number of a task has no noise, as in the library."""
    mll = made(ScaleKernel(RBFKernel()), likelihood=HadamardGaussianLikelihood(3, task_feature_index=3))
    x = mll.model.train_inputs[0].clone()
    x[:, 3] = torch.tensor(values, dtype=x.dtype)[torch.arange(13) % 3]
    mll.model.set_train_data(x, strict=False)
    stock = mll.forward
    mll.forward = types.MethodType(lambda self, *args: stock(*args, x), mll)
    expected = -mll(mll.model(x), mll.model.train_targets)
    expected.backward()
    del mll.forward
    slopes = [p.grad.clone() for p in mll.parameters()]
    loss, grads = Reading(mll).evaluate(dict(mll.named_parameters()))
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-12)
    torch.testing.assert_close(list(grads), slopes, rtol=1e-9, atol=1e-11)
