"""Losses of models whose modules keep what an evaluation computed: a replay renews it, or the library evaluates."""

import functools

import numpy as np
import pytest
import torch
from botorch.models import SingleTaskGP, SingleTaskVariationalGP
from botorch.models.contextual import LCEAGP
from botorch.models.kernels.orthogonal_additive_kernel import OrthogonalAdditiveKernel
from botorch.models.robust_relevance_pursuit_model import RobustRelevancePursuitSingleTaskGP
from botorch.models.transforms.input import Warp
from botorch.optim.closures import get_loss_closure_with_grads
from gpytorch.kernels import InducingPointKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, StudentTLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO
from gpytorch.variational import UnwhitenedVariationalStrategy
from support.acquisitions import DOUBLE, kronecker, points
from support.losses import Unread, replays

import autokern
from autokern.hooks import gpytorch

pytestmark = pytest.mark.usefixtures("third_recorded")
STOCK = {"objective": "stock", "exact_log_prob": "stock", "posterior": "stock"}
SIDES = ({}, STOCK)


class Reading(OrthogonalAdditiveKernel):
    """Uses the value of its last evaluation in the next one."""

    __module__ = OrthogonalAdditiveKernel.__module__

    def normalizer(self, eps=1e-6):
        before = getattr(self, "_normalizer", None)
        found = super().normalizer(eps)
        return found if before is None else 0.5 * found + 0.5 * before.detach()


def standardised(x):
    y = x.sin().sum(-1, keepdim=True)
    return (y - y.mean()) / y.std()


def closed(model, mll=None, loader=None):
    mll = (mll or ExactMarginalLogLikelihood(model.likelihood, model)).train()
    return get_loss_closure_with_grads(mll, dict(mll.named_parameters()), data_loader=loader)


def additive(kind=OrthogonalAdditiveKernel):
    """Such a model's closure, and how its normaliser is read, without a copy."""
    x = points(12, 3)
    model = SingleTaskGP(x, standardised(x), covar_module=kind(dim=3, second_order=True, dtype=DOUBLE))
    return closed(model), lambda: [model.covar_module._normalizer.detach()], model


def filled(parameter, step, at):
    parameter.fill_(0.1 * step + 0.2 * at + 0.1)


def grown(parameter, step, at):
    parameter.add_(0.01)


def moved(parameter, step, at):
    """It gets other memory."""
    parameter.data = parameter + 0.01


def evaluated(closure, read, number=9, move=filled):
    """Losses and gradients of some steps, with what is read after the evaluation and after the parameters changed."""
    for step in range(number):
        loss, gradients = closure()
        assert all(g is p.grad for g, p in zip(gradients, closure.parameters.values(), strict=True) if g is not None)
        found = [loss.item(), *(g.clone() for g in gradients), *read()]
        with torch.no_grad():
            for at, parameter in enumerate(closure.parameters.values()):
                move(parameter, step, at)
        yield [*found, *read()]


def agree(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        for found, expected in zip(one, other, strict=True):
            size = np.abs(np.asarray(expected)).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9 * size)


def warped(change=lambda scaled: None):
    """Buffers that each evaluation makes anew, with the same numbers unless they are changed."""
    x = points(12, 3)
    model = SingleTaskGP(x, standardised(x), input_transform=Warp(d=3, indices=[0, 1, 2]))
    scaled = model.input_transform._normalize

    def read():
        found = [scaled._coefficient.clone(), scaled._offset.clone()]
        change(scaled)
        return found

    return closed(model), read


def contexts():
    """Parameters whose norms an evaluation limits."""
    x = points(12, 6)
    model = LCEAGP(x, standardised(x), None, {"a": [0, 1], "b": [2, 3], "c": [4, 5]})
    return closed(model), lambda: [model.covar_module.emb_layers[0].weight.detach().clone()]


def robust():
    """A likelihood that keeps the training points, by which it later knows them again."""
    x = points(12, 3)
    model = RobustRelevancePursuitSingleTaskGP(x, standardised(x)).to_standard_model()
    kept = model.likelihood.noise_covar
    kept.expand_support([0, 5])

    def read():
        assert kept._cached_train_inputs is model.train_inputs[0]
        return []

    return closed(model), read


def inducing():
    """A loss that a kernel adds."""
    x, likelihood = points(12, 3), GaussianLikelihood().double()
    kernel = InducingPointKernel(ScaleKernel(RBFKernel()), points(4, 3, seed=3), likelihood)
    model = SingleTaskGP(x, standardised(x), None, likelihood, kernel)
    return closed(model), lambda: [term.loss().detach() for term in model.added_loss_terms()]


def variational(size=0, like=None, **options):
    """Of what the model keeps a divergence and a tensor that the program takes."""
    x = points(12, 3)
    y = standardised(x)
    model = SingleTaskVariationalGP(x, y, likelihood=like and like(), inducing_points=points(4, 3, seed=3), **options)
    model.model.train_targets = y[:, 0]
    data, strategy = torch.utils.data.TensorDataset(x, y[:, 0]), model.model.variational_strategy
    loader = torch.utils.data.DataLoader(data, size, shuffle=True) if size else None

    def read():
        taken = strategy.variational_distribution.lazy_covariance_matrix.to_dense()
        assert taken.requires_grad
        return [strategy.kl_divergence().detach(), taken.detach()]

    return closed(model, VariationalELBO(model.likelihood, model.model, num_data=12), loader), read


UNWHITENED = {"variational_strategy": UnwhitenedVariationalStrategy}
CASES = {
    "a normaliser": (additive, 9, filled, 4),
    "one that reads what it keeps": (functools.partial(additive, Reading), 9, filled, 0),
    "buffers": (warped, 9, filled, 4),
    "buffers in place": (lambda: warped(lambda scaled: scaled._coefficient.mul_(2.0)), 9, filled, 4),
    "another buffer": (
        lambda: warped(lambda scaled: setattr(scaled, "_offset", torch.full((1, 3), 0.3, dtype=DOUBLE))), 9, filled, 4,
    ),
    "limited norms": (contexts, 14, filled, 9),
    "training points": (robust, 9, grown, 4),
    "an added loss": (inducing, 9, grown, 4),
    "kronecker": (lambda: (closed(kronecker()), list), 9, grown, 4),
    "variational": (variational, 24, grown, 19),
    "inducing points that are not learned": (
        lambda: variational(learn_inducing_points=False), 24, grown, 19,
    ),
    "another likelihood": (lambda: variational(like=StudentTLikelihood), 24, grown, 19),
    "unwhitened": (lambda: variational(**UNWHITENED), 24, grown, 19),
    "parameters that get other memory": (variational, 24, moved, 19),
    "views of parameters that get other memory": (lambda: variational(**UNWHITENED), 24, moved, 0),
    "parts of the data": (lambda: variational(6, covar_module=Unread()), 24, grown, 16),
    "parts of several sizes": (lambda: variational(5, covar_module=Unread()), 24, grown, 8),
}  # fmt: skip


@pytest.mark.parametrize(("make", "number", "move", "served"), CASES.values(), ids=CASES)
def test_losses_gradients_and_what_modules_keep_are_stock_s(make, number, move, served, monkeypatch):
    monkeypatch.setattr(gpytorch, "_ENOUGH_VARIATIONAL", 0.0)
    found, before = [], replays()
    for order in SIDES:
        torch.manual_seed(0)
        closure, read, *_ = make()
        with autokern.using(force=order):
            found.append(list(evaluated(closure, read, number, move)))
        assert replays() - before == served
    agree(*found)


def test_predictions_after_replays_use_what_the_last_evaluation_left():
    found = []
    for order in SIDES:
        with autokern.using(force=order):
            *of, model = additive()
            list(evaluated(*of))
            posterior = model.eval().posterior(points(4, 3, seed=7))
            found.append([posterior.mean.detach(), posterior.variance.detach()])
    agree(*found)


def test_a_tensor_that_the_program_has_taken_is_not_written_and_its_graph_is_freed_as_by_the_library():
    *of, model = additive()
    kernel, before = model.covar_module, replays()
    held = [(kernel._normalizer, kernel._normalizer.detach().clone()) for _ in evaluated(*of, 12)]
    assert all(torch.equal(*pair) for pair in held)
    assert replays() - before == 7
    assert kernel._normalizer.requires_grad
    with pytest.raises(RuntimeError, match="second time"):
        kernel._normalizer.sum().backward()


def test_another_value_in_place_of_a_kept_tensor_is_overwritten_as_by_the_library():
    *of, model = additive()
    ours = []
    for found in evaluated(*of):
        ours.append(found)
        model.covar_module._normalizer = torch.ones(3, 1, 1, dtype=DOUBLE)
    with autokern.using(force=STOCK):
        agree(ours, list(evaluated(*additive()[:2])))
