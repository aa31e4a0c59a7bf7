"""BoTorch closures in one piece: the same losses, gradients and fits, and stock where anything is unknown."""

import gpytorch
import pytest
import torch
from botorch.models import MixedSingleTaskGP, SingleTaskGP
from botorch.models.transforms import Normalize, Warp
from botorch.models.utils.gpytorch_modules import (
    get_gaussian_likelihood_with_gamma_prior,
    get_matern_kernel_with_gamma_prior,
)
from botorch.optim.closures import get_loss_closure, get_loss_closure_with_grads
from botorch.optim.closures.core import BatchedNDarrayOptimizationClosure, ForwardBackwardClosure
from botorch.optim.fit import fit_gpytorch_mll_scipy
from gpytorch.means import ConstantMean
from support.botorch_models import KNOWN, ROUGH, closure, data, of_categories, of_tasks, single
from support.botorch_models import MODELS as COMMON
from support.outcomes import assert_close, serving

import autokern

MODELS = {
    **{name: make for name, make in COMMON.items() if name not in {*ROUGH, "one point"}},
    "gamma priors": single(
        covar_module=get_matern_kernel_with_gamma_prior(3),
        likelihood=get_gaussian_likelihood_with_gamma_prior(),
        outcome_transform=None,
    ),
    "three outputs, known noise, normalised inputs": single(
        3, train_Yvar=KNOWN.expand(15, 3), input_transform=Normalize(3)
    ),
    "batch of two outputs": lambda: SingleTaskGP(
        data()[0].expand(3, 15, 3), torch.stack([(k + 1) * data(outputs=2)[1].sin() for k in range(3)])
    ),
    "values of tasks": of_tasks((5, -1, 2), train_Yvar=KNOWN),
    "tasks in front": of_tasks((0, 1), column=0, rank=1, task_covar_prior=None),
    "different noise of tasks": of_tasks((0, 1), train_Yvar=torch.linspace(0.02, 0.05, 15).double()[:, None]),
    "nothing but categories": lambda: MixedSingleTaskGP(of_categories()[0][:, 2:], data()[1], cat_dims=[0]),
    "two outputs of categories": lambda: MixedSingleTaskGP(of_categories()[0], data(outputs=2)[1], cat_dims=[1, 2]),
}


@pytest.fixture
def enabled():
    with autokern.enabled(), autokern.using(force={"objective": "arrays"}):
        yield


def arrays(least=1):
    return serving("objective", "arrays", least)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_losses_and_gradients_are_the_same(make):
    _, parameters, evaluate = closure(make())
    loss, grads = evaluate()
    grads = [g.clone() for g in grads]
    with arrays():
        found, slopes = evaluate()
    assert_close(found, loss.detach(), rtol=1e-12, atol=1e-12)
    assert_close(slopes, grads, rtol=1e-9, atol=1e-10)
    assert all(p.grad is slope for p, slope in zip(parameters.values(), slopes, strict=True))


def fitted(name):
    """The loss, as stock computes it, where a search that goes on to the minimum ends: each output has its own."""
    torch.manual_seed(0)
    mll, _, evaluate = closure(MODELS[name]())
    several = getattr(mll.model, "_aug_batch_shape", ())
    options = {"factr": 5, "pgtol": 1e-9} if several else {"ftol": 1e-15, "gtol": 1e-9, "maxiter": 3000}
    fit_gpytorch_mll_scipy(mll, options=options)
    mll.train()
    with autokern.using(force={"objective": "stock"}):
        return evaluate()[0].sum().item()


@pytest.mark.filterwarnings("ignore:`scipy_minimize` terminated")  # no digit is left to gain
@pytest.mark.parametrize("name", ["usual", "known noise", "normalised inputs", "two outputs"])
def test_a_fit_ends_where_stock_ends(name, one_thread):
    expected = fitted(name)
    with arrays(9):
        found = fitted(name)
    assert found == pytest.approx(expected, rel=1e-7, abs=1e-7)


OUTPUTS = [name for name, make in MODELS.items() if "outputs" in name]


@pytest.mark.parametrize("make", [MODELS[name] for name in OUTPUTS], ids=OUTPUTS)
def test_rows_of_states_for_each_output(make):
    def evaluated():
        torch.manual_seed(0)
        mll, parameters, _ = closure(make())
        evaluate = BatchedNDarrayOptimizationClosure(get_loss_closure(mll), parameters, mll.model._aug_batch_shape)
        state = evaluate.state * 0.9 + 0.01
        found = [evaluate(), evaluate(state), evaluate(state[[1]] * 0.9, batch_indices=[1])]
        return [torch.from_numpy(part) for pair in found for part in pair] + [p.grad for p in parameters.values()]

    expected = evaluated()
    with arrays(3):
        assert_close(evaluated(), expected, rtol=1e-9, atol=1e-10)


def of_means(monkeypatch, model):
    from botorch.models import multitask

    monkeypatch.setattr(multitask, "_compute_multitask_mean", lambda module, before, tasks, after: tasks[..., 0])


CHANGES = {
    "a mapping": lambda m, model: model._task_mapper[:2].copy_(torch.tensor([1.0, 0.0])),
    "another mapping": lambda m, model: setattr(model, "_task_mapper", model._task_mapper.clone()),
    "no validation": lambda m, model: setattr(model, "_validate_task_values", False),
    "another task": lambda m, model: model.train_inputs[0][:, -1].copy_(model.train_inputs[0][:, -1].flip(0)),
    "another noise": lambda m, model: setattr(model.likelihood, "task_feature_index", 0),
    "another mean": lambda m, model: setattr(model, "mean_module", ConstantMean().double()),
    "a mean of one task": lambda m, model: setattr(model.mean_module.base_means, "1", ConstantMean().double()),
    "a function": of_means,
    "a method": lambda m, model: m.setattr(
        type(model), "_split_inputs", lambda self, x: (x[:, :-1], x[:, -1:].clamp(max=1.0), x[:, :0])
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_model_of_tasks_that_changes(change, monkeypatch):
    torch.manual_seed(0)
    mll, _, evaluate = closure(of_tasks((0, 1, 3), rank=1, validate_task_values=False)())
    with arrays():
        evaluate()
    change(monkeypatch, mll.model)
    evaluate.parameters = {name: p for name, p in mll.named_parameters() if p.requires_grad}
    with autokern.enabled(), autokern.using(force={"objective": "arrays"}):
        found, grads = evaluate()
        found, grads = found.item(), [None if g is None else g.clone() for g in grads]
    expected, slopes = evaluate()
    assert found == pytest.approx(expected.item(), rel=1e-10)
    torch.testing.assert_close(grads, list(slopes), rtol=1e-8, atol=1e-9)


def test_closures_and_models_of_other_kinds_run_stock(enabled):
    mll, parameters, _ = closure(MODELS["usual"]())

    def loss():
        return -mll(mll.model(*mll.model.train_inputs), mll.model.train_targets)

    class Own(ForwardBackwardClosure):
        pass

    class Doubling(SingleTaskGP):
        def transform_inputs(self, X, input_transform=None):
            return 0.5 * X

    few = dict(list(parameters.items())[:1])
    for evaluate in (
        closure(Doubling(*data()))[-1],
        closure(SingleTaskGP(*data(), input_transform=Warp(3, list(range(3)))))[-1],
        ForwardBackwardClosure(loss, parameters),
        Own(get_loss_closure_with_grads(mll, parameters).forward, parameters),
        get_loss_closure_with_grads(mll, few),  # stock adds to the gradients of the others, too
    ):
        assert evaluate()[0].requires_grad


def test_hooks_of_gradients_and_modes_are_obeyed(enabled):
    mll, parameters, evaluate = closure(MODELS["usual"]())
    handles = [p.register_hook(torch.zeros_like) for p in parameters.values()]
    assert all(not g.any() for g in evaluate()[1])
    for handle in handles:
        handle.remove()
    mll.eval()
    with pytest.warns(gpytorch.utils.warnings.GPInputWarning):
        assert evaluate()[0].requires_grad
