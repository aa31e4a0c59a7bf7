"""A prior that is read after its density, and after a step, is that of the density, as in stock."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from support.models import ExactModel

import autokern

pytestmark = pytest.mark.usefixtures("one_thread")
N = 40
SERVING = [("objective", "arrays"), ("exact_log_prob", "arrays"), ("exact_log_prob", "fused")]
each_that_serves = pytest.mark.parametrize("candidate", SERVING, ids=":".join)


class Regression(ExactModel):
    def __init__(self, kind=GaussianLikelihood, n=N, kernel=None):
        x = torch.linspace(0, 1, n, dtype=torch.float64).unsqueeze(-1)
        noise = (torch.full((n,), 0.1, dtype=torch.float64),) if kind is FixedNoiseGaussianLikelihood else ()
        super().__init__(x, (4 * x[:, 0]).sin(), kernel or ScaleKernel(MaternKernel(1.5)), kind(*noise))
        self.double().train()


def by_mll(model, prior):
    return ExactMarginalLogLikelihood(model.likelihood, model)(prior, model.train_targets)


def adam(model):
    torch.optim.Adam(model.parameters(), lr=0.3).step()


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
