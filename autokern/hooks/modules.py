"""Hooks into gpytorch's modules: what would change nothing is left out.

BoTorch puts a model into evaluation mode at each posterior, and its analytic acquisition functions convert it to the
dtype and device of the points. Both walk through all modules and set what is set already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gpytorch
import torch
from gpytorch.constraints import Interval
from gpytorch.likelihoods.noise_models import FixedGaussianNoise
from gpytorch.models import ExactGP

from autokern.hooks.bypass import stay_out
from autokern.hooks.install import hook

_stock_train = gpytorch.Module.train


@hook(gpytorch.Module, "train")
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


_stock_apply = ExactGP._apply


@hook(ExactGP, "_apply")
def _apply(self: Any, fn: Any) -> Any:
    if getattr(fn, "__code__", None) in _CONVERSIONS and not stay_out() and _is_converted(self, fn):
        return self
    return _stock_apply(self, fn)


_CONVERSIONS = [c for c in torch.nn.Module.to.__code__.co_consts if getattr(c, "co_name", "") == "convert"]
"""The code by which `torch.nn.Module.to` converts one tensor, and nothing else."""
_APPLIES = (torch.nn.Module._apply, Interval._apply, FixedGaussianNoise._apply, _stock_apply, _apply)


def _is_converted(model: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether a conversion returns each tensor of a model itself."""
    future = torch.__future__
    if future.get_overwrite_module_params_on_conversion() or future.get_swap_module_params_on_conversion():
        return False
    if type(model.train_inputs) is not tuple or type(model)._apply not in _APPLIES:
        return False
    return all(tensor is not None and convert(tensor) is tensor for tensor in _tensors(model))


def _tensors(model: Any) -> Iterator[torch.Tensor | None]:
    """Yield what a conversion converts; None for what is not known."""
    yield from model.train_inputs
    yield model.train_targets
    stack = [model]
    while stack:
        module = stack.pop()
        own = module.__dict__
        if type(module)._apply not in _APPLIES or "_apply" in own:
            yield None
        if type(module) is FixedGaussianNoise:
            yield module.noise
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            if tensor is not None:
                yield tensor
                if tensor.is_leaf and tensor.grad is not None:
                    yield tensor.grad
        stack += [part for part in own["_modules"].values() if part is not None]
