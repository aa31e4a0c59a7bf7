"""Whether a hook must stay out: each wrapper asks one of these functions, once per call, and runs stock if it is true.

The questions are from the narrowest to the widest: of linear algebra, of kernels, of whole models.
"""

from __future__ import annotations

import gpytorch
import torch
from linear_operator import settings as library
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._device import DeviceContext

from autokern.core.op import inside
from autokern.hooks.install import is_enabled
from autokern.runtime.dispatch import transformed

__all__ = ["stay_out", "stay_out_of_kernels", "stay_out_of_models", "stay_out_of_operators"]

_modes = torch._C._len_torch_function_stack
_mode_at = torch._C._get_function_stack_at


def stay_out() -> bool:
    """Whether a wrapper must run the library's own function untouched."""
    return inside.active or stay_out_of_operators()


def stay_out_of_operators() -> bool:
    """The same for what is put off and chooses nothing: it is put off inside a candidate as well.

    A mode wants to see the calls of torch's functions, other than the one of a default device.
    """
    if not is_enabled() or transformed() or library.trace_mode.on() or library.verbose_linalg.on():
        return True
    return _modes() > 0 and any(type(_mode_at(place)) is not DeviceContext for place in range(_modes()))


def stay_out_of_kernels() -> bool:
    """The same for the functions of gpytorch, which has a trace mode of its own."""
    return gpytorch.settings.trace_mode.on() or stay_out()


def stay_out_of_models() -> bool:
    """The same for densities and predictions, whose covariance is computed in parts where it is checkpointed.

    A global hook of torch's wants to see the calls of modules.
    """
    checkpointed = bool(gpytorch.beta_features.checkpoint_kernel.value())
    seen = bool(_has_any_global_hook())  # type: ignore[no-untyped-call]
    return checkpointed or seen or stay_out_of_kernels()
