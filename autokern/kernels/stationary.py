"""The families of covariances: RBF, Matérn, periodic and rational quadratic; importing this module registers them.

Tiles replace numbers by their exponentials and roots in place, by the fastest functions for the CPU. torch calls MKL
for both if it is built with it. On AMD EPYC, MKL's exponential takes 2.5 (double precision) and 4 times (single) as
long as torch's own `exp2`, and MKL's root in double precision twice as long as torch's own `rsqrt`. The results differ
by rounding.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import msgspec
import torch
from gpytorch.kernels import Kernel, MaternKernel, PeriodicKernel, RBFKernel, RQKernel, keops

from autokern.kernels.family import TINY, Family, Shape, Spare
from autokern.system import host

_LOG2_E = math.log2(math.e)
_ZERO = 2e-15  # distances up to this count as zero, where the infinite slope of the Matérn 1/2 is replaced by zero


@functools.cache
def _is_slow() -> bool:
    """Whether MKL computes elementary functions on an AMD CPU, for which it has no fast code."""
    return torch.backends.mkl.is_available() and "AMD" in host.cpu_model()


def exp_(t: torch.Tensor) -> torch.Tensor:
    """Replace numbers by their exponentials."""
    return t.mul_(_LOG2_E).exp2_() if t.is_cpu and _is_slow() else t.exp_()


def decay(a: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write ``exp(-a)`` into `out`, which may be `a`."""
    return torch.mul(a, -_LOG2_E, out=out).exp2_() if a.is_cpu and _is_slow() else torch.neg(a, out=out).exp_()


def root_(u: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Replace finite non-negative numbers by their roots; `spare` is scratch memory of the same shape."""
    if u.dtype is torch.float64 and u.is_cpu and _is_slow():
        return u.mul_(torch.add(u, TINY, out=spare).rsqrt_())
    return u.sqrt_()


# RBF (squared exponential): k = exp(-s / 2) (Rasmussen and Williams 2006, eq. 4.9)


def _exponential(u: Any) -> Any:
    return u.exp()


def _rbf_epilogue(u: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
    k = exp_(u)
    if slope is not None:
        slope.copy_(k)
    return k


RBF = Family(
    "rbf", -0.5, _exponential, _rbf_epilogue, (_exponential,) * 5, RBFKernel, slope_is_value=True,
    kernels=(RBFKernel, keops.RBFKernel), stock_passes=lambda d: 6.0, kept=lambda d: 3,
)  # fmt: skip

# Periodic: k = exp(-2 sum_i sin^2(pi (x_i - x'_i) / p_i) / lengthscale_i), as gpytorch defines it.
# ``4 sin^2((a - b) / 2)`` is the squared distance of two points on the unit circle at the angles a and b (MacKay 1998,
# "Introduction to Gaussian processes", eq. 47): a periodic kernel is an RBF of points laid on circles.


def _on_circles(kernel: Kernel, x: torch.Tensor) -> torch.Tensor:
    angle = x * (2 * math.pi) / kernel.period_length
    circle = torch.cat(((angle / 2).sin().square() * -2, angle.sin()), -1)  # touches the origin: small norms nearby
    scale = kernel.lengthscale.sqrt().expand_as(angle[..., :1, :])
    return circle / torch.cat((scale, scale), -1)


PERIODIC = msgspec.structs.replace(
    RBF, name="periodic", kernels=(PeriodicKernel, keops.PeriodicKernel), embed=_on_circles, differences=True,
    stock_passes=lambda d: 60.0 * d, kept=lambda d: 5 * d + 2,  # gpytorch forms all differences of points
)  # fmt: skip

# Matérn, of smoothness 1/2, 3/2 and 5/2 (Rasmussen and Williams 2006, eq. 4.17).
# With ``u = 2 nu s`` and ``a = sqrt(u)``: ``exp(-a)``, ``(1 + a) exp(-a)`` and ``(1 + a + u / 3) exp(-a)``.


def _root(u: Any) -> Any:
    return (u + TINY).sqrt()


def _decay(u: Any) -> Any:
    return (-_root(u)).exp()


def _value32(u: Any) -> Any:
    a = _root(u)
    return (a + 1) * (-a).exp()


def _value52(u: Any) -> Any:
    a = _root(u)
    return (a + 1 + u * (1 / 3)) * (-a).exp()


def _epilogue12(u: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
    a = u.add_(TINY).sqrt_()
    if slope is None:
        return decay(a, a)
    decay(a, slope)
    slope.div_(a).mul_(-0.5).masked_fill_(a <= _ZERO, 0.0)
    return decay(a, a)


def _epilogue32(u: torch.Tensor, slope: torch.Tensor | None, spare: Spare = torch.empty_like) -> torch.Tensor:
    e = spare(u) if slope is None else slope
    a = root_(u, e)
    decay(a, e)
    k = torch.addcmul(e, a, e, out=a)
    if slope is not None:
        slope.mul_(-0.5)
    return k


def _epilogue52(u: torch.Tensor, slope: torch.Tensor | None, spare: Spare = torch.empty_like) -> torch.Tensor:
    e = spare(u) if slope is None else slope
    a = root_(u, e)
    decay(a, e)
    if slope is None:
        a.addcmul_(a, a, value=1 / 3)
        return torch.addcmul(e, a, e, out=a)
    k = torch.addcmul(a, a, a, value=1 / 3, out=spare(u))
    torch.addcmul(e, k, e, out=k)
    slope.addcmul_(a, e).mul_(-1 / 6)
    return k


def _first12(u: torch.Tensor) -> torch.Tensor:
    a = _root(u)
    return torch.where(a > _ZERO, -0.5 * _decay(u) / a, 0.0)


def _second12(u: torch.Tensor) -> torch.Tensor:
    a = _root(u)
    return torch.where(a > _ZERO, _decay(u) * (1 + a) / (4 * a) / u.clamp_min(TINY), 0.0)


def _of(nu: float) -> dict[str, Any]:
    def matches(kernel: Kernel) -> bool:
        return bool(kernel.nu == nu)

    made = functools.partial(MaternKernel, nu)
    return {"kernels": (MaternKernel, keops.MaternKernel), "matches": matches, "plain": made, "make": made}


MATERN12 = Family("matern12", 1.0, _decay, _epilogue12, (_first12, _second12), kinked=True, **_of(0.5))
MATERN32 = Family(
    "matern32", 3.0, _value32, _epilogue32, (lambda u: -0.5 * _decay(u), lambda u: 0.25 * _decay(u) / _root(u)),
    wants_spare=True, stock_passes=lambda d: 13.0, kept=lambda d: 7, **_of(1.5),
)  # fmt: skip
MATERN52 = Family(
    "matern52", 5.0, _value52, _epilogue52,
    (lambda u: -(1 + _root(u)) * _decay(u) / 6, lambda u: _decay(u) / 12, lambda u: -_decay(u) / (24 * _root(u))),
    wants_spare=True, stock_passes=lambda d: 20.0, kept=lambda d: 7, **_of(2.5),
)  # fmt: skip

# Rational quadratic: k = (1 + s / (2 alpha))^-alpha (Rasmussen and Williams 2006, eq. 4.19).
# The factor ``1 / (2 alpha)`` is folded into the points, so that ``k = (1 + u)^-alpha``.


def _alpha(kernel: Kernel) -> torch.Tensor:
    alpha: torch.Tensor = kernel.alpha
    return alpha.unsqueeze(-1)


def _rq_value(u: Any, alpha: Any) -> Any:
    """Return ``(1 + u)^-alpha``, with the rounding of ``1 + u`` corrected to first order, as in log1p."""
    w = u + 1
    return (-alpha * (w.log() + (u - (w - 1)) / w)).exp()


def _rq_epilogue(u: torch.Tensor, slope: torch.Tensor | None, alpha: torch.Tensor) -> torch.Tensor:
    if slope is None:
        return exp_(u.log1p_().mul_(-alpha))
    torch.add(u, 1, out=slope)
    k = exp_(u.log1p_().mul_(-alpha))
    torch.div(k, slope, out=slope).mul_(-alpha)
    return k


RQ = Family(
    "rq", 1.0, _rq_value, _rq_epilogue, (), RQKernel, kernels=(RQKernel,), stock_passes=lambda d: 11.0,
    kept=lambda d: 5, shape=Shape(_alpha, lambda k, alpha: torch.xlogy(k, k) / alpha),
    embed=lambda kernel, x: x / (kernel.lengthscale * (2 * _alpha(kernel)).sqrt()),
)  # fmt: skip
