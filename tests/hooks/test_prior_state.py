"""A prior that is read after its density, and after a step, is that of the density, as in stock."""

import copy
import pickle

import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from support.models import ExactModel, points
from support.outcomes import assert_close

import autokern

pytestmark = pytest.mark.usefixtures("one_thread")
SERVING = [("objective", "arrays"), ("exact_log_prob", "arrays"), ("exact_log_prob", "fused")]
each_that_serves = pytest.mark.parametrize("candidate", SERVING, ids=":".join)


def by_mll(model, prior):
    return ExactMarginalLogLikelihood(model.likelihood, model)(prior, model.train_targets)


def loss_and_prior():
    x = points(40, d=1)
    model = ExactModel(x, (4 * x[:, 0]).sin(), ScaleKernel(MaternKernel(1.5))).double()
    prior = model(*model.train_inputs)
    return model, prior, by_mll(model, prior)


def adam(model):
    torch.optim.Adam(model.parameters(), lr=0.3).step()


@each_that_serves
def test_gradients_of_what_is_read_after_a_step_are_those_of_the_density(candidate):
    """Stock's are not: what it saves for the backward pass is written to."""

    def gradients(change):
        model, prior, loss = loss_and_prior()
        loss.neg().backward()
        change(model)
        total = prior.covariance_matrix.square().sum()
        return torch.autograd.grad(total, [*model.covar_module.parameters()], create_graph=True)

    with autokern.enabled(), autokern.using(force=dict([candidate])):
        assert_close(gradients(adam), gradients(lambda model: None))


@each_that_serves
def test_a_covariance_that_is_read_before_the_density_is_part_of_its_graph(candidate):
    def gradient(early):
        model, prior, loss = loss_and_prior()
        if early:
            prior = model(*model.train_inputs)
            covariance, loss = prior.covariance_matrix, by_mll(model, prior)
        return torch.autograd.grad(loss, [covariance if early else prior.covariance_matrix])[0]

    expected = gradient(early=True)
    with autokern.enabled(), autokern.using(force=dict([candidate])):
        assert_close(gradient(early=True), expected)
        with pytest.raises(RuntimeError, match="used in the graph"):
            gradient(early=False)


def test_copies_of_a_prior_keep_its_values():
    with autokern.enabled(), autokern.using(force={"objective": "arrays"}):
        expected = loss_and_prior()[1].covariance_matrix.detach()
        model, prior, loss = loss_and_prior()
        loss.backward()
        adam(model)
        covariance = prior.lazy_covariance_matrix
        covariance.requires_grad_(False)
        for found in (copy.deepcopy(covariance), pickle.loads(pickle.dumps(covariance)), covariance):
            assert_close(found.to_dense(), expected)


def test_a_prior_whose_points_were_written_is_refused():
    with autokern.enabled(), autokern.using(force={"objective": "arrays"}):
        model, prior, _ = loss_and_prior()
        model.train_inputs[0].mul_(2.0)
        for read in (lambda: prior.covariance_matrix, lambda: by_mll(model, prior)):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                read()
