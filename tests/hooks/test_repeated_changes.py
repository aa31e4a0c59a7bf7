"""Replays of evaluations must never serve what the library would not compute now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import autokern

botorch = pytest.importorskip("botorch")

from botorch.acquisition import LinearMCObjective, qLogExpectedImprovement  # noqa: E402
from botorch.acquisition.objective import GenericMCObjective  # noqa: E402
from botorch.generation import gen  # noqa: E402
from botorch.models import SingleTaskGP  # noqa: E402
from botorch.optim.closures import get_loss_closure_with_grads  # noqa: E402
from botorch.sampling import SobolQMCNormalSampler  # noqa: E402
from gpytorch.kernels import RBFKernel, ScaleKernel  # noqa: E402
from gpytorch.mlls import LeaveOneOutPseudoLikelihood  # noqa: E402

from autokern.core.replay.recording import Replay  # noqa: E402
from autokern.hooks import later as hooks  # noqa: E402
from autokern.hooks.later import repeated  # noqa: E402

X = torch.rand(10, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = (3 * X).sin().sum(-1, keepdim=True)
SHAPE = torch.Size([4, 2, 3])
WEIGHTS = [1.0]


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Replay every evaluation after the fifth, and count replays."""
    hooks.look()
    for name, value in {"_GAIN": 1e9, "_MISSES": 10**9, "_EVERY": 10**9}.items():
        monkeypatch.setattr(repeated, name, value)
    monkeypatch.setattr(repeated._History, "spent", lambda self: 0.0)
    count, run = [0], Replay.run

    def counted(self: Replay) -> None:
        count[0] += 1
        run(self)

    monkeypatch.setattr(Replay, "run", counted)
    with autokern.enabled():
        yield count


def model() -> SingleTaskGP:
    return SingleTaskGP(X, Y).eval()


def sampler() -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([8]), seed=3)


def loss_of(acquisition: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the loss as `gen_candidates_scipy` makes it."""
    scope: dict[str, Any] = {"__name__": gen.__name__}
    exec("def made(acquisition_function):\n    return lambda x: -acquisition_function(x)", scope)
    return scope["made"](acquisition)


def evaluator(acquisition: Any) -> Callable[[int], tuple[Any, np.ndarray]]:
    loss, wrapper = loss_of(acquisition), gen._get_f_np_wrapper(SHAPE, torch.device("cpu"), torch.float64, True)
    return lambda seed: wrapper(np.random.default_rng(seed).random((4, 6)), loss, None, [0, 1, 2, 3])


def by_stock(acquisition: Any, seed: int) -> tuple[Any, np.ndarray]:
    autokern.disable()
    try:
        return evaluator(acquisition)(seed)
    finally:
        autokern.enable()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda acq: None,
    "best value": lambda acq: setattr(acq, "best_f", torch.tensor(0.9, dtype=torch.float64)),
    "pending points": lambda acq: acq.set_X_pending(X[:2] + 0.1),
    "lengthscale": lambda acq: setattr(acq.model.covar_module, "lengthscale", 0.1),
    "targets": lambda acq: acq.model.set_train_data(targets=acq.model.train_targets + 1, strict=False),
    "base samples": lambda acq: setattr(acq.sampler, "base_samples", 2 * acq.sampler.base_samples),
    "objective": lambda acq: setattr(acq.objective, "weights", torch.full((1,), 3.0, dtype=torch.float64)),
    "data": lambda acq: acq.best_f.data.fill_(0.9),
    "list": lambda acq: WEIGHTS.__setitem__(0, 3.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_served_after_a_change_from_outside(change: str, replays: list[int]) -> None:
    objective: Any = LinearMCObjective(torch.ones(1, dtype=torch.float64))
    if change == "list":
        objective = GenericMCObjective(lambda samples, X=None: samples[..., 0] * WEIGHTS[0])
    acquisition = qLogExpectedImprovement(model(), best_f=0.5, sampler=sampler(), objective=objective)
    evaluate = evaluator(acquisition)
    for seed in range(7):
        evaluate(seed)
    before = replays[0]
    assert before == 4
    CHANGES[change](acquisition)
    ours, theirs = evaluate(9), by_stock(acquisition, 9)
    WEIGHTS[0] = 1.0
    assert change == "list" or replays[0] == before + (change == "nothing")
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("off", ["disabled", "anomalies"])
def test_nothing_is_served_where_autokern_stays_out(off: str, replays: list[int]) -> None:
    evaluate = evaluator(qLogExpectedImprovement(model(), best_f=0.5, sampler=sampler()))
    for seed in range(7):
        evaluate(seed)
    before = replays[0]
    if off == "disabled":
        autokern.disable()
        evaluate(8)
        autokern.enable()
    else:
        with torch.autograd.set_detect_anomaly(True):
            evaluate(8)
    assert replays[0] == before


class Own(RBFKernel):
    """A kernel of the user's, with an attribute of its class."""

    gain = 1.0

    def forward(self, *args: Any, **params: Any) -> Any:
        return RBFKernel.forward(self, *args, **params) * self.gain


def closure_of_a_fit(kernel: Any = None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    gp = SingleTaskGP(X, Y, covar_module=kernel)
    mll = LeaveOneOutPseudoLikelihood(gp.likelihood, gp)
    return mll, get_loss_closure_with_grads(mll, dict(mll.named_parameters()))


def first(closure: Any) -> torch.Tensor:
    return next(iter(closure.parameters.values()))


CHANGED_FITS: dict[str, Callable[[Any, Any], Any]] = {
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


@pytest.mark.parametrize("change", CHANGED_FITS)
def test_no_loss_is_served_after_a_change_from_outside(change: str, replays: list[int]) -> None:
    mll, closure = closure_of_a_fit()
    for _ in range(7):
        closure()
    assert replays[0] == 5  # with one that is timed
    CHANGED_FITS[change](mll, closure)
    loss, ours = closure()
    ours = [None if slope is None else slope.clone() for slope in ours]
    assert replays[0] == 5 + (change == "nothing")
    autokern.disable()
    again, theirs = closure()
    autokern.enable()
    torch.testing.assert_close(loss.detach(), again.detach(), rtol=1e-10, atol=1e-12)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "value"), [("gain", 1.5), ("forward", lambda self, x1, x2, **params: x1 @ x2.mT)])
def test_no_loss_is_served_after_a_change_of_your_class(name: str, value: Any, monkeypatch: Any) -> None:
    _, closure = closure_of_a_fit(ScaleKernel(Own()))
    for _ in range(7):
        closure()
    monkeypatch.setattr(Own, name, value)
    loss = closure()[0].item()
    autokern.disable()
    assert loss == pytest.approx(closure()[0].item(), rel=1e-10)
    autokern.enable()


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_called_each_time(hook: str) -> None:
    _, closure = closure_of_a_fit()
    calls: list[int] = []
    getattr(first(closure), hook)(lambda slope: calls.append(1))
    for _ in range(9):
        closure()
    assert len(calls) == 9


def test_gradients_of_data_are_summed_up_as_in_stock() -> None:
    mll, closure = closure_of_a_fit()
    data = X.clone().requires_grad_(True)
    mll.model.set_train_data(data, strict=False)
    closure()
    once = data.grad.clone()
    for _ in range(8):
        closure()
    torch.testing.assert_close(data.grad, 9 * once)
