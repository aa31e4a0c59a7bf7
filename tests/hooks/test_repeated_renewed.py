"""Losses of models whose modules keep what an evaluation computed: a replay renews it, or the library evaluates."""

import numpy as np
import pytest
import torch
from botorch.models import SingleTaskGP, SingleTaskVariationalGP
from botorch.models.contextual import LCEAGP
from botorch.models.kernels.orthogonal_additive_kernel import OrthogonalAdditiveKernel
from botorch.models.transforms.input import Warp
from botorch.optim.closures import get_loss_closure_with_grads
from gpytorch.kernels import InducingPointKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, StudentTLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO
from gpytorch.variational import UnwhitenedVariationalStrategy
from support.acquisitions import DOUBLE, points
from support.outcomes import count

import autokern
from autokern.hooks import gpytorch

pytestmark = pytest.mark.usefixtures("third_recorded")


class Reading(OrthogonalAdditiveKernel):
    """Uses the value of its last evaluation in the next one."""

    __module__ = OrthogonalAdditiveKernel.__module__

    def normalizer(self, eps=1e-6):
        before = getattr(self, "_normalizer", None)
        found = super().normalizer(eps)
        return found if before is None else 0.5 * found + 0.5 * before.detach()


def made(kind):
    x = points(12, 3)
    model = SingleTaskGP(x, x.sin().sum(-1, keepdim=True), covar_module=kind(dim=3, second_order=True, dtype=DOUBLE))
    mll = ExactMarginalLogLikelihood(model.likelihood, model.train())
    return model.covar_module, mll, get_loss_closure_with_grads(mll, dict(mll.named_parameters()))


def evaluated(mll, closure, number=9):
    for step in range(number):
        with torch.no_grad():
            for at, parameter in enumerate(mll.parameters()):
                parameter.fill_(0.1 * step + 0.2 * at + 0.1)
        loss, gradients = closure()
        yield [loss.item(), *(g.clone() for g in gradients)]


def steps(kernel, *of):
    for found in evaluated(*of):
        yield [*found, kernel._normalizer.detach()]  # no copy


def agree(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        for found, expected in zip(one, other, strict=True):
            size = np.abs(np.asarray(expected)).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9 * size)


def by_stock(kind):
    with autokern.using(force={"objective": "stock", "posterior": "stock"}):
        return list(steps(*made(kind)))


@pytest.mark.parametrize(("kind", "replays"), [(OrthogonalAdditiveKernel, 4), (Reading, 0)])
def test_loss_gradients_and_what_the_kernel_keeps_are_stock_s(kind, replays):
    before = count("optimised function", "replay")
    kernel, *rest = made(kind)
    ours = list(steps(kernel, *rest))
    assert count("optimised function", "replay") - before == replays
    agree(ours, by_stock(kind))
    assert kernel._normalizer.requires_grad
    with pytest.raises(RuntimeError, match="second time"):  # the library has freed that graph as well
        kernel._normalizer.sum().backward()


def test_predictions_after_replays_use_what_the_last_evaluation_left():
    ours, theirs = [], []
    for found in (ours, theirs):
        order = {} if found is ours else {"objective": "stock", "posterior": "stock"}
        with autokern.using(force=order):
            kernel, mll, closure = made(OrthogonalAdditiveKernel)
            list(steps(kernel, mll, closure))
            posterior = mll.model.eval().posterior(points(4, 3, seed=7))
            found.append([posterior.mean.detach(), posterior.variance.detach()])
    agree(ours, theirs)


def test_a_tensor_that_the_program_has_taken_is_not_written():
    kernel, mll, closure = made(OrthogonalAdditiveKernel)
    before = count("optimised function", "replay")
    taken = steps(kernel, mll, closure, 12)
    held = [(kernel._normalizer, kernel._normalizer.detach().clone()) for _ in taken]
    assert all(torch.equal(*pair) for pair in held)
    assert count("optimised function", "replay") - before == 7


def test_another_value_in_place_of_a_kept_tensor_is_overwritten_as_by_the_library():
    kernel, mll, closure = made(OrthogonalAdditiveKernel)
    ours = []
    for found in steps(kernel, mll, closure):
        ours.append(found)
        kernel._normalizer = torch.ones(3, 1, 1, dtype=DOUBLE)
    agree(ours, by_stock(OrthogonalAdditiveKernel))


def of_warped(change, order):
    x = points(12, 3)
    model = SingleTaskGP(x, x.sin().sum(-1, keepdim=True), input_transform=Warp(d=3, indices=[0, 1, 2]))
    mll = ExactMarginalLogLikelihood(model.likelihood, model.train())
    scaled, found, before = model.input_transform._normalize, [], count("optimised function", "replay")
    with autokern.using(force=order):
        for one in evaluated(mll, get_loss_closure_with_grads(mll, dict(mll.named_parameters()))):
            found.append([*one, scaled._coefficient.clone(), scaled._offset.clone()])
            change(scaled)
    return found, count("optimised function", "replay") - before


CHANGES = {
    "none": lambda scaled: None,
    "in place": lambda scaled: scaled._coefficient.mul_(2.0),
    "another": lambda scaled: setattr(scaled, "_offset", torch.full((1, 3), 0.3, dtype=DOUBLE)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_buffers_that_each_evaluation_makes_anew_with_the_same_numbers_are_as_in_stock(change):
    theirs, _ = of_warped(change, {"objective": "stock", "exact_log_prob": "stock"})
    ours, replays = of_warped(change, {})
    agree(ours, theirs)
    assert replays


def standardised(x):
    y = x.sin().sum(-1, keepdim=True)
    return (y - y.mean()) / y.std()


def of_variational(size, order, like=None, moves=False, **options):
    """Losses and gradients, and of what the model keeps a divergence and a tensor that the program takes."""
    torch.manual_seed(0)
    x = points(12, 3)
    y = standardised(x)
    model = SingleTaskVariationalGP(x, y, likelihood=like and like(), inducing_points=points(4, 3, seed=3), **options)
    model.model.train_targets = y[:, 0]
    mll, found = VariationalELBO(model.likelihood, model.model, num_data=12).train(), []
    data = torch.utils.data.TensorDataset(x, y[:, 0])
    loader = torch.utils.data.DataLoader(data, size, shuffle=True) if size else None
    closure = get_loss_closure_with_grads(mll, dict(mll.named_parameters()), data_loader=loader)
    before, strategy = count("optimised function", "replay"), model.model.variational_strategy
    with autokern.using(force=order):
        for _ in range(24):
            loss, gradients = closure()
            with torch.no_grad():
                for parameter in mll.parameters():
                    parameter.data = parameter + 0.01 if moves else parameter.add_(0.01).data
            taken = strategy.variational_distribution.lazy_covariance_matrix.to_dense()
            assert taken.requires_grad
            found.append([loss.detach(), *(g.clone() for g in gradients), strategy.kl_divergence().detach(), taken])
    return [[t.detach() for t in one] for one in found], count("optimised function", "replay") - before


VARIATIONAL = {
    "plain": (0, {}),
    "inducing points that are not learned": (0, {"learn_inducing_points": False}),
    "another likelihood": (0, {"like": StudentTLikelihood}),
    "unwhitened": (0, {"variational_strategy": UnwhitenedVariationalStrategy}),
    "parameters that get other memory": (0, {"moves": True}),
    "parts of the data": (6, {}),
    "parts of several sizes": (5, {}),
}


def test_views_that_a_model_keeps_of_parameters_are_those_of_the_library():
    options = {"moves": True, "variational_strategy": UnwhitenedVariationalStrategy}
    agree(of_variational(0, {}, **options)[0], of_variational(0, {"objective": "stock"}, **options)[0])


@pytest.mark.parametrize(("size", "options"), VARIATIONAL.values(), ids=VARIATIONAL.keys())
def test_losses_of_variational_models_and_what_these_keep_are_stock_s(size, options, monkeypatch):
    monkeypatch.setattr(gpytorch, "_ENOUGH_VARIATIONAL", 0.0)
    ours, replays = of_variational(size, {}, **options)
    assert replays >= 8
    agree(ours, of_variational(size, {"objective": "stock"}, **options)[0])


def of_contexts(order):
    torch.manual_seed(0)
    x = points(12, 6)
    model = LCEAGP(x, standardised(x), None, {"a": [0, 1], "b": [2, 3], "c": [4, 5]})
    mll = ExactMarginalLogLikelihood(model.likelihood, model.train())
    weights, before = model.covar_module.emb_layers[0].weight, count("optimised function", "replay")
    with autokern.using(force=order):
        each = evaluated(mll, get_loss_closure_with_grads(mll, dict(mll.named_parameters())), 14)
        found = [[*one, weights.detach().clone()] for one in each]
    return found, count("optimised function", "replay") - before


def test_parameters_whose_norms_an_evaluation_limits_are_as_in_stock():
    ours, replays = of_contexts({})
    theirs, _ = of_contexts({"objective": "stock"})
    agree(ours, theirs)
    assert replays == 9
    assert theirs[0][-1].norm() < theirs[-1][-1].norm() == pytest.approx(3**0.5, rel=1e-6)


def of_inducing_points(order):
    x = points(12, 3)
    likelihood = GaussianLikelihood().double()
    kernel = InducingPointKernel(ScaleKernel(RBFKernel()), points(4, 3, seed=3), likelihood)
    mll = ExactMarginalLogLikelihood(likelihood, SingleTaskGP(x, standardised(x), None, likelihood, kernel)).train()
    closure, before = (
        get_loss_closure_with_grads(mll, dict(mll.named_parameters())),
        count("optimised function", "replay"),
    )
    with autokern.using(force=order):
        found = []
        for _ in range(9):
            loss, gradients = closure()
            (term,) = mll.model.added_loss_terms()
            found.append([loss.detach(), *(g.clone() for g in gradients), term.loss().detach()])
            with torch.no_grad():
                torch._foreach_add_(list(mll.parameters()), 0.01)
    return found, count("optimised function", "replay") - before


def test_losses_that_a_kernel_adds_are_stock_s():
    ours, replays = of_inducing_points({})
    agree(ours, of_inducing_points({"objective": "stock"})[0])
    assert replays == 4
