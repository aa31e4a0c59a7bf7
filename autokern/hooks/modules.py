"""Hooks into gpytorch's modules: what would change nothing is left out.

BoTorch puts a model into evaluation mode at each posterior, and its analytic acquisition functions convert it to the
dtype and device of the points. Both walk through all modules and set what is set already.
"""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from gpytorch.constraints import Interval
from gpytorch.likelihoods.noise_models import FixedGaussianNoise
from gpytorch.models import ExactGP

from autokern.hooks.bypass import stay_out
from autokern.hooks.install import hook, stock_of
from autokern.hooks.reading import unless_it_fails

_stock_train = stock_of(gpytorch.Module, "train")


@hook(gpytorch.Module, "train", relies=("torch.nn.modules.module:Module.train",))
def _train(self: Any, mode: bool = True) -> Any:
    if mode is False and self.__dict__.get("training") is False and not stay_out() and _rests(self):
        return self
    return _stock_train(self, mode)


_TRAINS = (torch.nn.Module.train, _stock_train, _train)


def _rests(root: Any) -> bool:
    """Whether all modules in one are in evaluation mode, and none has another idea of it."""
    stack = list(root._modules.values())
    while stack:
        module = stack.pop()
        if module is not None:
            own = module.__dict__
            if own.get("training") is not False or type(module).train not in _TRAINS or "train" in own:
                return False
            stack += own["_modules"].values()
    return True


_RELIES = (
    "torch.nn.modules.module:Module._apply", "torch.nn.modules.module:Module.to",
    "gpytorch.constraints.constraints:Interval._apply", "gpytorch.likelihoods.noise_models:FixedGaussianNoise._apply",
)  # fmt: skip
_stock_apply = stock_of(ExactGP, "_apply")


@hook(ExactGP, "_apply", relies=_RELIES)
def _apply(self: Any, fn: Any) -> Any:
    if getattr(fn, "__code__", None) in _CONVERSIONS and not stay_out() and _is_converted(self, fn):
        return self
    return _stock_apply(self, fn)


_CONVERSIONS = [c for c in torch.nn.Module.to.__code__.co_consts if getattr(c, "co_name", "") == "convert"]
"""The code by which `torch.nn.Module.to` converts one tensor, and nothing else."""
_APPLIES = (torch.nn.Module._apply, Interval._apply, FixedGaussianNoise._apply, _stock_apply, _apply)


@unless_it_fails
def _is_converted(model: Any, convert: Any) -> bool:
    """Whether a conversion would return each tensor of a model itself."""
    future = torch.__future__
    if future.get_overwrite_module_params_on_conversion() or future.get_swap_module_params_on_conversion():
        return False
    asked = dict(zip(convert.__code__.co_freevars, convert.__closure__, strict=True))
    device, dtype = asked["device"].cell_contents, asked["dtype"].cell_contents
    if asked["convert_to_format"].cell_contents is not None or (device is not None and device.type != "cpu"):
        return False
    tensors = [] if type(model.train_inputs) is not tuple else _tensors(model)
    return bool(tensors) and all(
        t.is_cpu and (t.dtype is dtype or dtype is None or not (t.is_floating_point() or t.is_complex()))
        for t in tensors
        if t is not None
    )


def _tensors(model: Any) -> list[torch.Tensor | None]:
    """Return what a conversion converts, nothing where that is not known."""
    found, stack = [*model.train_inputs, model.train_targets], [model]
    while stack:
        module = stack.pop()
        own, kind = module.__dict__, type(module)
        if kind._apply not in _APPLIES or "_apply" in own:
            return []
        if kind is FixedGaussianNoise:
            found.append(module.noise)
        parameters = own["_parameters"].values()
        found += parameters
        found += own["_buffers"].values()
        found += [p.grad for p in parameters if p is not None and p.is_leaf]
        stack += [part for part in own["_modules"].values() if part is not None]
    return found
