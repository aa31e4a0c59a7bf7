"""Hooks into gpytorch's kernels: the covariance matrices of known kernels, and the batch shape of all kernels.

Kernels are hooked at `forward`, which ScaleKernel and others call on their base kernel directly. Exact types only (a
subclass may change the formula); diagonals and batches over input dimensions are unsupported.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel, MaternKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel
from torch.nn import Module

from autokern.core.releases.known import relied
from autokern.hooks.bypass import stay_out_of_kernels
from autokern.hooks.install import Property, hook, stock_of
from autokern.kernels.tree import are_few, family_name
from autokern.model import marginal
from autokern.runtime.dispatch import in_force, route

_dispatch = route("kernel_matrix", looked=True)
_stock_shape = stock_of(Kernel, "batch_shape")
_WALKS = "sub_kernels", "named_sub_kernels"
_known = relied(*(f"{Kernel.__module__}:Kernel.{name}" for name in ("batch_shape", *_WALKS)))


def _near(x1: torch.Tensor, x2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shift float32 points by one of them, along each dimension where the subtraction is exact.

    Far from the origin, points in units of the lengthscale lose digits. In stock, training and cross covariances have
    the same error; here each may be served by another candidate. The difference of two numbers within a factor of two
    is exact (Sterbenz 1974, theorem 4.3.1), so no distance changes.
    """
    single = x1.dtype is torch.float32 and x2.dtype is torch.float32
    if not single or min(x1.dim(), x2.dim()) < 2 or not (x1.numel() and x2.numel()):
        return x1, x2
    several = (x1,) if x2 is x1 else (x1, x2)
    if not all(_may_move(x.detach()) for x in several):
        return x1, x2
    with torch.no_grad():
        origin = x1[(0,) * (x1.dim() - 1)]
        spread = torch.stack([(x - origin).abs().flatten(0, -2).amax(0) for x in several])
        origin = torch.where(2 * spread.amax(0) <= origin.abs(), origin, 0.0)
        if not origin.any():
            return x1, x2
    first = x1 - origin
    return first, first if x2 is x1 else x2 - origin


def _may_move(x: torch.Tensor) -> bool:
    """Whether along some dimension all values are within a factor of three, which an exact shift requires."""
    ends = [end.tolist() for end in x.flatten(0, -2).aminmax(dim=0)]
    return any((low > 0 and high <= 3 * low) or (high < 0 and low >= 3 * high) for low, high in zip(*ends, strict=True))


def _is_left(kernel: Any, x1: Any, x2: Any) -> bool:
    """Whether points are so few that the library serves; in float64, in which `_near` moves no points."""
    few = x1.dim() == x2.dim() == 2 and are_few(len(x1), len(x2), torch.is_grad_enabled())
    few = few and x1.dtype is torch.float64 and x1.is_cpu
    return few and not getattr(kernel, "_batch_shape", True) and in_force().forced("kernel_matrix") is None


def _hooked(kind: type) -> None:
    stock = stock_of(kind, "forward")

    @hook(kind, "forward", relies=None)
    def forward(self: Any, x1: Any, x2: Any, *args: Any, **params: Any) -> Any:
        plain = type(self) is kind and not args and marginal.trivial(params)
        if not plain or stay_out_of_kernels() or _is_left(self, x1, x2) or family_name(self) is None:
            return stock(self, x1, x2, *args, **params)
        return _dispatch(self, *_near(x1, x2))


for _kind in (RBFKernel, MaternKernel, RQKernel, PeriodicKernel, ScaleKernel):
    _hooked(_kind)


def _batch_shape(self: Any) -> Any:
    """Return a kernel's batch shape, by one walk if all kernels in it have the same; else by the library."""
    shape: Any = getattr(self, "_batch_shape", None)
    plain = type(shape) is torch.Size and not torch.compiler.is_compiling() and _known.holds()
    return shape if plain and _all_have(self, shape) else _stock_shape.fget(self)


def _all_have(kernel: Any, shape: torch.Size) -> bool:
    """Whether all kernels in a kernel have this batch shape, and are found by the library, too."""
    modules, seen = [kernel], {kernel}
    for module in modules:  # which grow
        kind, own = type(module), module.__dict__
        if kind.named_modules is not Module.named_modules or "named_modules" in own or "_modules" not in own:
            return False
        if isinstance(module, Kernel):
            usual = kind.sub_kernels is Kernel.sub_kernels and kind.named_sub_kernels is Kernel.named_sub_kernels
            if not usual or kind.batch_shape is not Kernel.batch_shape or not own.keys().isdisjoint(_WALKS):
                return False
            if getattr(module, "_batch_shape", None) != shape:
                return False
        for one in own["_modules"].values():
            if one is not None and one not in seen:
                seen.add(one)
                modules.append(one)
    return True


hook(Kernel, "batch_shape", relies=None)(Property(_batch_shape, _stock_shape.fset))
