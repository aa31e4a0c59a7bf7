"""Roots and exponentials of matrices, in place, as the CPU computes them fastest.

torch leaves both to MKL where it has it. On AMD EPYC, MKL takes 2.5 (double precision) and 4 times (single) as long for
an exponential as torch's own `exp2`, and twice as long for a root in double precision as torch's own `rsqrt`. The
results differ by roundings of numbers of the size of one.
"""

from __future__ import annotations

import functools
import math

import torch

from autokern.system import host

_LOG2_E = math.log2(math.e)
_TINY = 1e-30
"""Keeps the reciprocal root of zero finite."""


@functools.cache
def _is_slow() -> bool:
    """Whether MKL computes elementary functions, on a CPU for which it has no fast code."""
    return torch.backends.mkl.is_available() and "AMD" in host.cpu_model()


def exp_(t: torch.Tensor) -> torch.Tensor:
    """Replace numbers by their exponentials."""
    return t.mul_(_LOG2_E).exp2_() if t.is_cpu and _is_slow() else t.exp_()


def decay(a: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write ``exp(-a)`` into `out`, which may be `a`."""
    if a.is_cpu and _is_slow():
        return torch.mul(a, -_LOG2_E, out=out).exp2_()
    return torch.neg(a, out=out).exp_()


def root_(u: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Replace finite numbers that are not negative by their roots, with `spare` as memory."""
    if u.dtype is torch.float64 and u.is_cpu and _is_slow():
        return u.mul_(torch.add(u, _TINY, out=spare).rsqrt_())
    return u.sqrt_()
