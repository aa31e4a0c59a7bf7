"""`MultiDeviceKernel` on a machine without devices to share its matrix: the kernel in it computes.

torch leaves the devices of a `DataParallel` module empty where there is no accelerator, and gpytorch's kernel then
fails. Stock candidates call it too, so it serves wherever hooks are installed. Where there are devices, gpytorch's own
code runs.
"""

from __future__ import annotations

from typing import Any

from gpytorch.kernels import MultiDeviceKernel
from gpytorch.settings import lazily_evaluate_kernels

from autokern.hooks.install import hook, is_enabled, stock_of

__all__: list[str] = []

_stock = stock_of(MultiDeviceKernel, "forward")


@hook(MultiDeviceKernel, "forward")
def _forward(self: Any, x1: Any, x2: Any, diag: bool = False, **kwargs: Any) -> Any:
    if type(self) is not MultiDeviceKernel or self.device_ids or not is_enabled():
        return _stock(self, x1, x2, diag=diag, **kwargs)
    if self.module.active_dims is None:
        return self.module.forward(x1, x2, diag=diag, **kwargs)
    with lazily_evaluate_kernels(False):
        return self.module(x1, x2, diag=diag, **kwargs)
