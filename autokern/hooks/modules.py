"""Hooks into gpytorch's modules: conversions without effect are skipped, `MultiDeviceKernel` works without a device.

BoTorch's analytic acquisition functions convert the model to the dtype and device of the points at each evaluation, by
a walk through all modules. Without an accelerator, a `DataParallel` module has no devices and gpytorch's
`MultiDeviceKernel` fails; its base kernel computes instead, inside of candidates too.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import MultiDeviceKernel
from gpytorch.likelihoods.noise_models import FixedGaussianNoise
from gpytorch.models import ExactGP
from gpytorch.settings import lazily_evaluate_kernels

from autokern.core.recovery import unless_it_fails
from autokern.hooks.bypass import stay_out
from autokern.hooks.install import hook, is_enabled, stock_of

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
"""The code of the inner function by which `torch.nn.Module.to` converts a tensor."""
_APPLIES = (torch.nn.Module._apply, Interval._apply, FixedGaussianNoise._apply, _stock_apply, _apply)


@unless_it_fails
def _is_converted(model: Any, convert: Any) -> bool:
    """Whether a conversion would leave every tensor of a model as it is."""
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
    """Return all tensors that a conversion visits, an empty list if a module converts them by code of its own."""
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


_stock_several = stock_of(MultiDeviceKernel, "forward")


@hook(MultiDeviceKernel, "forward")
def _several(self: Any, x1: Any, x2: Any, diag: bool = False, **kwargs: Any) -> Any:
    if type(self) is not MultiDeviceKernel or self.device_ids or not is_enabled():
        return _stock_several(self, x1, x2, diag=diag, **kwargs)
    if self.module.active_dims is None:
        return self.module.forward(x1, x2, diag=diag, **kwargs)
    with lazily_evaluate_kernels(False):
        return self.module(x1, x2, diag=diag, **kwargs)
