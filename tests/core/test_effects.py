"""What calling an object may do beside computing."""

import collections
import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable
from types import MappingProxyType
from typing import Any
from unittest import mock

import botorch
import gpytorch
import numpy as np
import pytest
import torch
from support.models import ExactModel

from autokern.cli import lines
from autokern.core import releases, replay
from autokern.core.releases import is_installed

TARGET = torch.ones(3)
CALLS: list[int] = []
KNOWN = {"a": 1.0}
COUNT = 0


def effect(*of: Any) -> str | None:
    """Return what calling these objects may do beside computing."""
    found = replay.held(*of)
    return found if isinstance(found, str) else None


def own(kind: type = ExactModel) -> Any:
    x = torch.rand(4, 2)
    return kind(x, x.sum(-1))


class Counting(ExactModel):
    def forward(self, x: torch.Tensor) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class Below(Counting):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)


class Adding(ExactModel):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) + 1.0


class Copying(ExactModel):
    def forward(self, x: torch.Tensor) -> Any:
        return __class__(x, x.sum(-1))(x)  # type: ignore[name-defined]


class Plain:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def weighted(x: torch.Tensor, weight: float = 2.0) -> torch.Tensor:
    return (x * weight - TARGET).square().sum(-1)


def summed(x: torch.Tensor) -> Any:
    bend = torch.nn.functional.softplus(x)  # a cell of this call, which the generator reads
    return sum(torch.asinh(bend * y) / bend for y in (x, 2 * x))


def partly_constant(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), gpytorch.settings.fast_computations(log_prob=False):
        size = x.norm()
    return x / size


def nested(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([weighted(x) for _ in range(2)]).sum(0)


def counted(x: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return x


def closed() -> Callable[[torch.Tensor], torch.Tensor]:
    calls = 0

    def f(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x

    return f


def hooked() -> torch.nn.Module:
    model = own()
    model.covar_module.base_kernel.register_forward_hook(lambda *args: None)
    return model


def writing(x: torch.Tensor) -> torch.Tensor:
    x[..., 0] = 1.0
    return x


@pytest.mark.parametrize(
    "free",
    [
        weighted, nested, functools.partial(weighted, weight=3.0), torch.exp, torch.nn.Linear(2, 1), own(),
        lambda samples, X=None: -(samples - TARGET).square().sum(-1), [weighted, 3.0, {"a": nested}],
        gpytorch.kernels.RBFKernel(), lambda x: KNOWN["a"] * x, lambda x: torch.where(x > 0, x, -x).max(),
        own().forward, own(Adding), summed, partly_constant,
    ],
)  # fmt: skip
def test_objects_that_only_compute(free: Any) -> None:
    assert effect(free) is None


def test_decorators_of_the_libraries_are_theirs_and_what_they_decorate_is_read() -> None:
    """Whatever module `functools.wraps` names; BoTorch's decorator of acquisitions raises errors."""
    decorated = pytest.importorskip("botorch").utils.t_batch_mode_transform(expected_q=1)
    assert effect(decorated(weighted)) is None
    assert "writing" in str(effect(decorated(writing)))


def through_alias(x: torch.Tensor) -> torch.Tensor:
    calls = CALLS
    calls += [1]
    return x


def collecting() -> Callable[[torch.Tensor], Any]:
    seen: set[int] = set()
    return lambda x: (seen.add(1), x)[1]


class Logging(torch.nn.Module):
    log = CALLS.append

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log(1)
        return x


class Delegating(torch.nn.Module):
    plain = Plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x)


class Factor(float):
    def __mul__(self, other: Any) -> Any:
        CALLS.append(1)
        return other


class Noting:
    def __enter__(self) -> None:
        CALLS.append(1)

    def __exit__(self, *of: object) -> None:
        CALLS.append(2)


def within(manager: Any, *of: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def f(x: torch.Tensor) -> torch.Tensor:
        with manager(*of):
            return 2 * x

    return f


def profiled(x: torch.Tensor) -> torch.Tensor:
    with torch.profiler.record_function("part"):
        return 2 * x


FREED, HUGE, HALVES = torch.zeros(300), torch.ones(1).expand(4000, 4000), torch.empty(3, dtype=torch.bits8)
FREED.untyped_storage().resize_(0)
SEED, TALLY, FACTOR = torch.manual_seed, np.zeros(1), Factor(2.0)
ENGINE, ALIVE = torch.quasirandom.SobolEngine(2), Plain()


@functools.cache
def remembered(x: float) -> float:
    return x


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (counted, "counted"), (closed(), "closed"), (hooked(), "hook on a RBFKernel"), (writing, "STORE_SUBSCR"),
        (lambda x: (print(x), x)[1], "print"), (own(Counting), "STORE_ATTR"), (Plain(), "class Plain"),
        (own(Copying), "Copying'> is called"), (own(Below), "STORE_ATTR"),
        (collecting(), "add"), (through_alias, "INPLACE_"), (Logging(), ""), (Delegating(), ""), (CALLS.__iadd__, ""),
        (lambda x: torch.manual_seed(1), "manual_seed"), (lambda x: x.numpy(), "numpy"), ([weighted, print], "print"),
        (lambda x: compile(x, "", "exec"), "compile"), (functools.partial(weighted, weight=Plain()), "class Plain"),
        (lambda x: nested(counted(x)), "counted"), (lambda x: 1 + undefined, "undefined"),  # noqa: F821
        (eval, "eval"), (lambda x: [CALLS.append(y) for y in x], "append"), (iter([1]), "next value"),
        (collections.deque([1.0]), "deque"), (bytearray(3), "bytearray"), (MappingProxyType({}), "mappingproxy"),
        (lambda x: x + ENGINE.draw(1), "SobolEngine"), (lambda x: x * remembered(2.0), "lru_cache"),
        (collections.UserDict(a=1.0), "UserDict"), (collections.ChainMap({"a": 1.0}), "ChainMap"),
        (vars(ENGINE).values(), "dict_values"), (np.array([[1.0]], dtype=object), "ndarray"),
        (weakref.ref(ALIVE), "reference to a Plain"),
        (lambda x: (SEED(1), x)[1], ""), (lambda x: (TALLY.fill(1), x)[1], ""), (lambda x: (CALLS.sort(), x)[1], ""),
        (within(Noting), "Noting'> is called"), (within(Noting().__enter__), "Noting"), (profiled, "record_function"),
        (within(contextlib.nullcontext, Noting()), "Noting"), (within(threading.Lock), "lock"),
        (lambda x: FACTOR * x, ""), (lambda x: (CALLS.__iadd__([1]), x)[1], ""),
        (lambda x: x + FREED.shape[0], "without memory"), (lambda x: x + HUGE.sum(), "so many numbers"),
        (lambda x: x + HALVES.shape[0], "another dtype"),
        (lambda x: x * torch.get_num_threads(), "get_num_threads"),
        (lambda x: x + torch.initial_seed(), "initial_seed"),
        (lambda x: (torch.set_default_dtype(x.dtype), x)[1], ""),
        (lambda x, model: (model.set_train_data(x), x)[1], ""),
        (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "cond"),
        (lambda x: (botorch.logging.logger.warning("evaluated"), x)[1], "logging"),
        (type("Made", (botorch.acquisition.AcquisitionFunction,), {"forward": Counting.forward})(None), "STORE_ATTR"),
    ],
)  # fmt: skip
def test_what_may_be_noticed_is_named(other: Any, reason: str) -> None:
    found = effect(other)
    assert found is not None
    assert reason in found


def test_distributions_with_the_bases_and_functions_of_pyro_only_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    patch: dict[str, Any] = {"__name__": "pyro.distributions.torch_patch"}
    exec("def clear_cache(self): self._cached_x_y = None, None", patch)
    base = type("TorchDistribution", (Callable,), {"__module__": "pyro.distributions.torch_distribution"})
    prior = type("Prior", (gpytorch.priors.LogNormalPrior, base), {"__module__": gpytorch.priors.__name__})(0.0, 1.0)
    monkeypatch.setattr(torch.distributions.transforms.Transform, "clear_cache", patch["clear_cache"], raising=False)
    assert effect(prior) is None
    patch["__name__"] = "program"
    assert effect(prior) is not None


def test_libraries_that_lie_outside_of_the_environment_count_as_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = os.path.join(os.sep, "home", "user", "gpytorch", "gpytorch")
    assert not is_installed(os.path.join(checkout, "mlls.py"))
    is_installed.cache_clear()
    monkeypatch.setattr(releases, "_SITES", frozenset(["dist-packages"]))
    monkeypatch.setattr(gpytorch, "__path__", [*gpytorch.__path__, checkout])
    package = os.path.join(os.sep, "usr", "lib", "python3", "dist-packages", "numpy", "core.py")
    beside = os.path.join(os.path.dirname(torch.__path__[0]), "pyro", "distributions.py")
    for file in (package, beside, os.path.join(checkout, "mlls.py"), os.__file__, "<made>"):
        assert is_installed(file)
        assert lines._owner(file) == ""
    assert not is_installed(__file__)
    assert lines._owner(__file__) == "user"
    assert effect(own()) is None
    is_installed.cache_clear()


def appending(*args: Any, **options: Any) -> Any:
    return CALLS.append(1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda: mock.patch.object(gpytorch.kernels.RBFKernel, "forward"), "Mock"),
        (lambda: mock.patch("gpytorch.kernels.rbf_kernel.postprocess_rbf"), "Mock"),
        (lambda: mock.patch.object(gpytorch.kernels.RBFKernel, "forward", appending), "append"),
        (lambda: torch.nn.modules.module.register_module_forward_hook(lambda *args: None), "all modules"),
    ],
)
def test_mocks_patches_and_hooks_of_the_libraries_count(change: Any, told: str) -> None:
    with change():
        assert told in (effect(own()) or "")
    assert effect(own()) is None


WEIGHT = 1.0


def by_global(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHT


def test_what_is_held_is_as_before_until_something_is_put_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [1.0]

    class Setting:
        _state = False

    def by_name(x: torch.Tensor, *, weight: float = 1.0) -> torch.Tensor:
        return x * weight

    model, reached, array, named = own(), own(), np.ones(2), {"plain": 1.0}
    model.reference = weakref.ref(Plain())
    monkeypatch.setattr(gpytorch.settings, "Setting", Setting, raising=False)
    held = replay.held(model, lambda x: x * weights[0], by_global, {"array": array}, named, by_name)
    assert not isinstance(held, str)
    kernel = model.covar_module.base_kernel

    def once(change: Callable[[], Any]) -> None:
        assert held.is_as_before()
        change()
        assert not held.is_as_before()
        held.renew()

    once(lambda: setattr(kernel, "lengthscale", 0.3))
    once(lambda: setattr(kernel, "active_dims", None) or setattr(kernel, "other", 1.5))
    once(lambda: weights.append(2.0))
    once(lambda: weights.__setitem__(0, 3.0))
    once(lambda: array.fill(2.0))
    once(lambda: named.__setitem__("wide", named.pop("plain")))
    once(lambda: (by_name.__kwdefaults__ or {}).__setitem__("weight", 2.0))
    once(lambda: monkeypatch.setitem(globals(), "WEIGHT", 2.0))
    once(lambda: setattr(Setting, "_state", True))
    once(lambda: setattr(kernel.raw_lengthscale, "data", torch.ones_like(kernel.raw_lengthscale)))
    once(lambda: setattr(kernel.raw_lengthscale, "data", kernel.raw_lengthscale.detach().clone()))
    once(lambda: kernel.raw_lengthscale.requires_grad_(False))
    assert held.is_as_before()
    model.reference = weakref.ref(Plain())  # dead, too: a transform of torch 2.11 makes one at each evaluation
    once(lambda: setattr(model, "reference", weakref.ref(reached)))
    once(lambda: setattr(model, "reference", weakref.ref(Plain())))
    assert held.is_as_before()


def test_cycles_end() -> None:
    one: list[Any] = [weighted]
    one.append(one)
    assert effect(one) is None
