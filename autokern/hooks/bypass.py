"""Whether a hook must stay out: each wrapper asks one of these functions, once per call, and runs stock if it is true.

The questions are from the narrowest to the widest: of linear algebra, of kernels, of whole models.
"""

from __future__ import annotations

import gpytorch
from linear_operator import settings as library

from autokern.hooks.install import is_enabled
from autokern.runtime.dispatch import bypassed

__all__ = ["stay_out", "stay_out_of_kernels", "stay_out_of_models"]


def stay_out() -> bool:
    """Whether a wrapper must run the library's own function untouched."""
    return not is_enabled() or bypassed() or library.trace_mode.on() or library.verbose_linalg.on()


def stay_out_of_kernels() -> bool:
    """The same for the functions of gpytorch, which has a trace mode of its own."""
    return gpytorch.settings.trace_mode.on() or stay_out()


def stay_out_of_models() -> bool:
    """The same for densities and predictions, whose covariance is computed in parts where it is checkpointed."""
    return bool(gpytorch.beta_features.checkpoint_kernel.value()) or stay_out_of_kernels()
