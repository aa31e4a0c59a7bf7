"""What calling an object may do beside computing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gpytorch
import pytest
import torch

from autokern.core.effects import effect

TARGET = torch.ones(3)
CALLS: list[int] = []
KNOWN = {"a": 1.0}
COUNT = 0


class Own(gpytorch.models.ExactGP):
    def __init__(self) -> None:
        x = torch.rand(4, 2)
        super().__init__(x, x.sum(-1), gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: torch.Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Counting(Own):
    def forward(self, x: torch.Tensor) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class Plain:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def weighted(x: torch.Tensor, weight: float = 2.0) -> torch.Tensor:
    return (x * weight - TARGET).square().sum(-1)


def nested(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([weighted(x) for _ in range(2)]).sum(0)


def counted(x: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return x


def noted(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(len(x))
    return x


def closed() -> Callable[[torch.Tensor], torch.Tensor]:
    calls = 0

    def f(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x

    return f


def collecting() -> Callable[[torch.Tensor], torch.Tensor]:
    seen: set[int] = set()

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.add(len(x))
        return x

    return f


def longer(x: torch.Tensor) -> torch.Tensor:
    calls = CALLS
    calls += [1]
    return x


def hooked() -> torch.nn.Module:
    model = Own()
    model.covar_module.base_kernel.register_forward_hook(lambda *args: None)
    return model


def printing(x: torch.Tensor) -> torch.Tensor:
    print(x)
    return x


def writing(x: torch.Tensor) -> torch.Tensor:
    x[..., 0] = 1.0
    return x


@pytest.mark.parametrize(
    "free",
    [
        weighted, nested, functools.partial(weighted, weight=3.0), torch.exp, torch.nn.Linear(2, 1), Own(),
        lambda samples, X=None: -(samples - TARGET).square().sum(-1), [weighted, 3.0, {"a": nested}],
        gpytorch.kernels.RBFKernel(), lambda x: KNOWN["a"] * x, lambda x: torch.where(x > 0, x, -x).max(),
        Own().forward,
    ],
)  # fmt: skip
def test_objects_that_only_compute(free: Any) -> None:
    assert effect(free) is None


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (counted, "counted"), (noted, "append"), (closed(), "closed"), (hooked(), "hook on a RBFKernel"),
        (printing, "print"), (writing, "STORE_SUBSCR"), (Counting(), "STORE_ATTR"), (Plain(), "class Plain"),
        (collecting(), "a set"), (longer, "INPLACE_"),
        (lambda x: torch.manual_seed(1), "manual_seed"), (lambda x: x.numpy(), "numpy"), ([weighted, print], "print"),
        (lambda x: compile(x, "", "exec"), "compile"), (functools.partial(weighted, weight=Plain()), "class Plain"),
        (lambda x: nested(counted(x)), "counted"), (lambda x: 1 + undefined, "undefined"),  # noqa: F821
        (eval, "eval"), (lambda x: [noted(y) for y in x], "append"), (iter([1]), "next value"),
    ],
)  # fmt: skip
def test_what_may_be_noticed_is_named(other: Any, reason: str) -> None:
    assert reason in (effect(other) or "")


def test_a_hook_on_all_modules_counts() -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert "all modules" in (effect(Own()) or "")
    finally:
        handle.remove()


def test_a_patch_of_a_library_class_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = gpytorch.kernels.RBFKernel.forward
    monkeypatch.setattr(gpytorch.kernels.RBFKernel, "forward", lambda *a, **k: CALLS.append(1) or stock(*a, **k))
    assert "append" in (effect(Own()) or "")


def test_cycles_end() -> None:
    one: list[Any] = [weighted]
    one.append(one)
    assert effect(one) is None
