"""Replays of evaluations must never serve what the library would not compute now."""

import pytest
import torch
from botorch.acquisition import LinearMCObjective
from botorch.acquisition.objective import GenericMCObjective
from botorch.models import SingleTaskGP
from botorch.optim.closures import get_loss_closure_with_grads
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.mlls import LeaveOneOutPseudoLikelihood
from support.acquisitions import DOUBLE, asked, improvement, points, wrapper
from support.outcomes import assert_close

import autokern
from autokern.core.replay.operations import Replay
from autokern.hooks import later as hooks
from autokern.hooks.later import repeated

X = points(d=3, seed=1)
Y = (3 * X).sin().sum(-1, keepdim=True)
WEIGHTS = [1.0]


@pytest.fixture(autouse=True)
def replays(monkeypatch):
    """Replay every evaluation after the fifth, and count replays."""
    hooks.look()
    for name, value in {"_GAIN": 1e9, "_MISSES": 10**9, "_EVERY": 10**9}.items():
        monkeypatch.setattr(repeated, name, value)
    monkeypatch.setattr(repeated._History, "spent", lambda self: 0.0)
    count, run = [], Replay.run
    monkeypatch.setattr(Replay, "run", lambda self: count.append(1) or run(self))
    with autokern.enabled():
        yield count


def by_stock(run):
    autokern.disable()
    try:
        return run()
    finally:
        autokern.enable()


CHANGES = {
    "nothing": lambda acq: None,
    "best value": lambda acq: setattr(acq, "best_f", torch.tensor(0.9, dtype=DOUBLE)),
    "pending points": lambda acq: acq.set_X_pending(points(2) + 0.1),
    "lengthscale": lambda acq: setattr(acq.model.covar_module, "lengthscale", 0.1),
    "targets": lambda acq: acq.model.set_train_data(targets=acq.model.train_targets + 1, strict=False),
    "base samples": lambda acq: setattr(acq.sampler, "base_samples", 2 * acq.sampler.base_samples),
    "objective": lambda acq: setattr(acq.objective, "weights", torch.full((1,), 3.0, dtype=DOUBLE)),
    "data": lambda acq: acq.best_f.data.fill_(0.9),
    "list": lambda acq: WEIGHTS.__setitem__(0, 3.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_served_after_a_change_from_outside(change, replays):
    objective = LinearMCObjective(torch.ones(1, dtype=DOUBLE))
    if change == "list":
        objective = GenericMCObjective(lambda samples, X=None: samples[..., 0] * WEIGHTS[0])
    acq = improvement(best_f=0.5, objective=objective)
    evaluate = wrapper(acq, 2)
    asked(evaluate, range(7), 2)
    assert len(replays) == 4
    CHANGES[change](acq)
    (ours,) = asked(evaluate, [9], 2)
    by_stock(lambda: asked(evaluate, [9], 2))
    (theirs,) = by_stock(lambda: asked(wrapper(acq, 2), [9], 2))
    WEIGHTS[0] = 1.0
    assert change == "list" or len(replays) == 4 + (change in ("nothing", "memory"))
    assert_close([*map(torch.as_tensor, ours)], [*map(torch.as_tensor, theirs)], rtol=1e-9, atol=1e-12)


class Own(RBFKernel):
    """A kernel of the user's, with an attribute of its class."""

    gain = 1.0

    def forward(self, *args, **params):
        return RBFKernel.forward(self, *args, **params) * self.gain


class Unread(LeaveOneOutPseudoLikelihood):
    """A likelihood of the user's, which arrays do not compute."""


def closure_of_a_fit(kernel=None):
    torch.manual_seed(0)
    gp = SingleTaskGP(X, Y, covar_module=kernel)
    mll = Unread(gp.likelihood, gp)
    return mll, get_loss_closure_with_grads(mll, dict(mll.named_parameters()))


def first(closure):
    return next(iter(closure.parameters.values()))


CHANGED_FITS = {
    "nothing": lambda mll, closure: None,
    "targets": lambda mll, closure: mll.model.set_train_data(targets=mll.model.train_targets + 1, strict=False),
    "inputs": lambda mll, closure: [mll.model.set_train_data(X * k, strict=False) for k in (0.4, 0.5, 0.3)],
    "frozen": lambda mll, closure: first(closure).requires_grad_(False),
    "forward": lambda mll, closure: setattr(closure, "forward", lambda: 2 * first(closure).sum()),
    "parameters": lambda mll, closure: closure.parameters.pop(next(iter(closure.parameters))),
    "hook": lambda mll, closure: first(closure).register_hook(lambda slope: 2 * slope),
    "memory": lambda mll, closure: setattr(first(closure), "data", first(closure).data + 0.1),
    "prior": lambda mll, closure: setattr(mll.model.covar_module.lengthscale_prior.base_dist, "loc", torch.ones(1)),
}
CHANGED_CLASSES = {"gain": 1.5, "forward": lambda self, x1, x2, **params: x1 @ x2.mT}


@pytest.mark.parametrize("change", [*CHANGED_FITS, *CHANGED_CLASSES])
def test_no_loss_is_served_after_a_change_from_outside(change, replays, monkeypatch):
    mll, closure = closure_of_a_fit(ScaleKernel(Own()) if change in CHANGED_CLASSES else None)
    for _ in range(7):
        closure()
    assert len(replays) == 5  # with one that is timed
    if change in CHANGED_FITS:
        CHANGED_FITS[change](mll, closure)
    else:
        monkeypatch.setattr(Own, change, CHANGED_CLASSES[change])
    loss, ours = closure()
    ours = [None if slope is None else slope.clone() for slope in ours]
    assert len(replays) == 5 + (change in ("nothing", "memory"))
    again, theirs = by_stock(closure)
    assert_close([loss.detach(), *ours], [again.detach(), *theirs], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_called_each_time(hook):
    _, closure = closure_of_a_fit()
    calls = []
    getattr(first(closure), hook)(lambda slope: calls.append(1))
    for _ in range(9):
        closure()
    assert len(calls) == 9


def test_gradients_of_data_are_summed_up_as_in_stock():
    mll, closure = closure_of_a_fit()
    data = X.clone().requires_grad_(True)
    mll.model.set_train_data(data, strict=False)
    closure()
    once = data.grad.clone()
    for _ in range(8):
        closure()
    torch.testing.assert_close(data.grad, 9 * once)
