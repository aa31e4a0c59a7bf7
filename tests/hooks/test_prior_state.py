"""A prior that is read after its density, and after a step, is that of the density, as in stock."""

from __future__ import annotations

import copy
import pickle

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import LinearKernel, MaternKernel, MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, MultitaskMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from support.models import ExactModel

import autokern
from autokern.core.registry import get

pytestmark = pytest.mark.usefixtures("one_thread")
N = 40
CANDIDATES = [("objective", "arrays"), *(("exact_log_prob", name) for name in get("exact_log_prob").names())]
each_candidate = pytest.mark.parametrize("candidate", CANDIDATES, ids=":".join)
SERVING = [("objective", "arrays"), ("exact_log_prob", "arrays"), ("exact_log_prob", "fused")]
each_that_serves = pytest.mark.parametrize("candidate", SERVING, ids=":".join)


class Regression(ExactModel):
    def __init__(self, kind=GaussianLikelihood, n=N, kernel=None):
        x = torch.linspace(0, 1, n, dtype=torch.float64).unsqueeze(-1)
        noise = (torch.full((n,), 0.1, dtype=torch.float64),) if kind is FixedNoiseGaussianLikelihood else ()
        super().__init__(x, (4 * x[:, 0]).sin(), kernel or ScaleKernel(MaternKernel(1.5)), kind(*noise))
        self.double().train()


def by_likelihood(model, prior):
    return model.likelihood(prior).log_prob(model.train_targets) / len(model.train_targets)


def by_mll(model, prior):
    return ExactMarginalLogLikelihood(model.likelihood, model)(prior, model.train_targets)


def adam(model):
    torch.optim.Adam(model.parameters(), lr=0.3).step()


def written(model):
    for parameter in model.parameters():
        parameter.data.add_(0.4)


def read(model, prior, density):
    covariance = prior.lazy_covariance_matrix
    samples = torch.ones(2, len(prior.mean), dtype=torch.float64)
    return [
        prior.covariance_matrix,
        covariance.matmul(samples.mT),
        model.likelihood(prior).covariance_matrix,
        density(model, prior),
        prior.variance,
        covariance[:3, :3].to_dense(),
        prior.rsample(base_samples=samples),
    ]


@pytest.mark.thin("candidate")
@each_candidate
@pytest.mark.parametrize("density", [by_mll, by_likelihood])
@pytest.mark.parametrize("kind", [GaussianLikelihood, FixedNoiseGaussianLikelihood])
@pytest.mark.parametrize("change", [adam, written])
@pytest.mark.parametrize("first", range(7))
def test_a_prior_after_a_step_is_that_of_the_density(candidate, density, kind, change, first):
    """What is read first may leave something for what is read next."""

    def found():
        model = Regression(kind)
        prior = model(*model.train_inputs)
        density(model, prior).neg().backward(retain_graph=True)
        change(model)
        reading = read(model, prior, density)[first]
        return [reading, *read(model, prior, density)]

    expected = found()
    with autokern.enabled(), autokern.using(force=dict([candidate])):
        for one, other in zip(found(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


class Tasks(gpytorch.models.ExactGP):
    def __init__(self, kernel):
        x = torch.linspace(0, 1, N, dtype=torch.float64).unsqueeze(-1)
        super().__init__(x, torch.cat([(4 * x).sin(), (3 * x).cos()], -1), MultitaskGaussianLikelihood(num_tasks=2))
        self.mean_module = MultitaskMean(ConstantMean(), num_tasks=2)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.covar_module = MultitaskKernel(kernel, num_tasks=2)
        self.double().train()

    def forward(self, x):
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


PAIR = torch.Size([2])


class Batch(gpytorch.models.ExactGP):
    def __init__(self, likelihood, shape=PAIR):
        x = torch.linspace(0, 1, N, dtype=torch.float64).unsqueeze(-1)
        super().__init__(x, torch.stack([(4 * x[:, 0]).sin(), (3 * x[:, 0]).cos()]), likelihood)
        self.mean_module = ConstantMean(batch_shape=shape)
        self.covar_module = ScaleKernel(MaternKernel(1.5, batch_shape=shape), batch_shape=shape)
        self.double().train()

    forward = Regression.forward


SEVERAL = {
    "tasks": lambda: Tasks(RBFKernel()),
    "tasks, linear": lambda: Tasks(LinearKernel()),
    "batch": lambda: Batch(GaussianLikelihood(batch_shape=PAIR)),
    "batch, fixed noise": lambda: Batch(
        FixedNoiseGaussianLikelihood(torch.full((2, N), 0.1, dtype=torch.float64), batch_shape=PAIR)
    ),
}


@pytest.mark.filterwarnings("ignore:Negative variance")
@pytest.mark.parametrize("make", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("change", [adam, written])
@pytest.mark.parametrize("first", ["density", "covariance", "observations", "variance"])
def test_a_prior_of_several_tasks_or_models_after_a_step_is_stocks(make, change, first):
    """Of several tasks, the library's own operators refer to the factor of their covariance, and see the step."""

    def found():
        model = make()
        prior, mll = model(*model.train_inputs), ExactMarginalLogLikelihood(model.likelihood, model)
        read = {
            "density": lambda: mll(prior, model.train_targets),
            "covariance": lambda: prior.covariance_matrix,
            "observations": lambda: model.likelihood(prior).log_prob(model.train_targets),
            "variance": lambda: prior.variance,
        }
        mll(prior, model.train_targets).sum().neg().backward(retain_graph=True)
        change(model)
        return [read[first](), *(each() for each in read.values())]

    expected = found()
    with autokern.enabled():
        for one, other in zip(found(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@each_that_serves
def test_gradients_of_what_is_read_after_a_step_are_those_of_the_density(candidate):
    """Stock's are not: what it saves for the backward pass is written to."""

    def gradients(change):
        model = Regression()
        prior = model(*model.train_inputs)
        by_mll(model, prior).neg().backward()
        change(model)
        total = prior.covariance_matrix.square().sum()
        return torch.autograd.grad(total, [*model.covar_module.parameters()], create_graph=True)

    with autokern.enabled(), autokern.using(force=dict([candidate])):
        expected = gradients(lambda model: None)
        for one, other in zip(gradients(adam), expected, strict=True):
            torch.testing.assert_close(one, other)


def loss_and_prior():
    model = Regression()
    prior = model(*model.train_inputs)
    return model, prior, by_mll(model, prior)


@each_that_serves
def test_a_covariance_that_is_read_before_the_density_is_part_of_its_graph(candidate):
    def gradient(early):
        model = Regression()
        prior = model(*model.train_inputs)
        covariance = prior.covariance_matrix if early else None
        loss = by_mll(model, prior)
        covariance = prior.covariance_matrix if covariance is None else covariance
        return torch.autograd.grad(loss, [covariance])[0]

    expected = gradient(early=True)
    with autokern.enabled(), autokern.using(force=dict([candidate])):
        torch.testing.assert_close(gradient(early=True), expected)
        if candidate[1] != "stock":
            with pytest.raises(RuntimeError, match="used in the graph"):
                gradient(early=False)


def test_copies_of_a_prior_keep_its_values():
    with autokern.enabled(), autokern.using(force={"objective": "arrays"}):
        model, prior, loss = loss_and_prior()
        expected = prior.covariance_matrix.detach()
        model, prior, loss = loss_and_prior()
        loss.backward()
        adam(model)
        covariance = prior.lazy_covariance_matrix
        covariance.requires_grad_(False)
        for found in (copy.deepcopy(covariance), pickle.loads(pickle.dumps(covariance)), covariance):
            torch.testing.assert_close(found.to_dense(), expected)


def scaled(model):
    model.train_inputs[0].mul_(2.0)


def replaced(model):
    model.covar_module.base_kernel.raw_lengthscale = torch.nn.Parameter(torch.ones(1, 1, dtype=torch.float64))


@pytest.mark.parametrize("change", [scaled, replaced])
def test_a_prior_whose_values_are_gone_is_refused(change):
    with autokern.enabled(), autokern.using(force={"objective": "arrays"}):
        model, prior, _ = loss_and_prior()
        change(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            prior.covariance_matrix
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            by_mll(model, prior)


def test_chains_leave_their_parameters_too():
    def found():
        model = Regression(n=450, kernel=ScaleKernel(MaternKernel(1.5)) + ScaleKernel(RBFKernel()))
        prior = model(*model.train_inputs)
        by_mll(model, prior).neg().backward()
        adam(model)
        return prior.covariance_matrix.detach()

    expected = found()
    with autokern.enabled(), autokern.using(force={"exact_log_prob": "fused"}):
        torch.testing.assert_close(found(), expected)
