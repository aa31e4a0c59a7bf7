"""Whether a hook must stay out: each wrapper calls one of these functions once, and runs stock if it returns true.

Conditions add up from operators over linear algebra and kernels to whole models.
"""

from __future__ import annotations

import gpytorch
import torch
from linear_operator import settings as library
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

from autokern.core.state import inside
from autokern.hooks.install import is_enabled
from autokern.model.libraries import prediction
from autokern.runtime import dispatch
from autokern.runtime.dispatch import transformed
from autokern.system import host

_modes = torch._C._len_torch_function_stack
_mode_at = torch._C._get_function_stack_at


def stay_out() -> bool:
    """Whether a wrapper must run the library's own function untouched."""
    return inside.active or stay_out_of_operators()


def stay_out_of_operators() -> bool:
    """Whether a hook that only defers a computation must stay out; inside a candidate it stays active.

    A torch function mode must see torch's calls, so hooks stay out under any mode but that of a default device.
    """
    if not is_enabled() or transformed() or library.trace_mode.on() or library.verbose_linalg.on():
        return True
    return _modes() > 0 and any(type(_mode_at(place)) is not DeviceContext for place in range(_modes()))


def stay_out_of_kernels() -> bool:
    """Whether hooks of gpytorch must stay out: also in its trace mode, and under global hooks of modules."""
    seen = bool(_has_any_global_hook())  # type: ignore[no-untyped-call]
    return seen or gpytorch.settings.trace_mode.on() or stay_out()


def stay_out_of_models() -> bool:
    """Whether hooks of densities and predictions must stay out: checkpointed kernels need stock."""
    return bool(gpytorch.beta_features.checkpoint_kernel.value()) or stay_out_of_kernels()


def stay_out_of_predictions() -> bool:
    """Whether hooks of predictions, which rely on more functions of the library, must stay out."""
    return stay_out_of_models() or not prediction.holds()


def is_recorded() -> bool:
    """Whether the running computation is recorded for replays."""
    return type(_get_current_dispatch_mode()).__module__ == "autokern.core.replay.recording"


def may_replay() -> bool:
    """Whether a recording may be replayed; where the user orders candidates, the library's calls are dispatched."""
    order = dispatch.in_force()
    ordered = order.force or order.exclude or order.deterministic or order.random_seed is not None
    plain = torch.is_grad_enabled() and not torch.is_anomaly_enabled() and not host.multi_rank()
    return order.replay and not ordered and plain and not stay_out_of_models()
