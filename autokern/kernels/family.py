"""Family: a stationary covariance function of the distance, its formula written once.

Autograd, compilers and KeOps run the formula itself, which uses only methods and operators that tensors and
KeOps' LazyTensors share. GEMM tiles use its closed forms, which tests compare with the formula. A new family is one
`Family` in `stationary`.

With the scaled squared distance ``s = sum_k (x_k - x'_k)^2 / lengthscale_k^2`` a family is a function of
``u = gamma * s``: the factor ``gamma`` is folded into the inputs, so that one GEMM yields ``u``.

A squared distance ``|x|^2 + |x'|^2 - 2 x.x'`` has an error of about ``eps |x|^2``. If that changes a covariance too
much (`Family.reach`), points are multiplied in double precision and the distances are rounded afterwards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
from gpytorch.kernels import Kernel

from autokern.core.autograd import each_cotangent
from autokern.core.releases.known import Relied, relied

TINY = 1e-30
"""Added under roots, so that quotients by a distance of zero are finite; they are multiplied by a zero difference."""

Epilogue = Callable[..., torch.Tensor]
Slopes = tuple[Epilogue, ...]
Spare = Callable[[torch.Tensor], torch.Tensor]  # returns an uninitialised matrix like its argument
OWN = frozenset(("forward", "covar_dist"))
"""Methods that define a kernel's values; an instance that overrides one is unsupported."""
DISTANCES = (
    "gpytorch.kernels.kernel:dist", "gpytorch.kernels.kernel:sq_dist", "gpytorch.kernels.rbf_kernel:postprocess_rbf",
    "gpytorch.functions.rbf_covariance:RBFCovariance", "gpytorch.functions.matern_covariance:MaternCovariance",
)  # fmt: skip
"""Functions of gpytorch that kernels call, besides their own classes."""
FAR = 1e-6
"""The error of k at distance zero above which products are taken in double precision.

Stock tolerates more: in a covariance that is differentiated it rounds the diagonal like the other entries, so that
repeated points stay equal. Our diagonal is exact, so entries of repeated points must be near it: with a noise of 1e-3
on repeated points, float32 densities had 1 to 4 times stock's error below this threshold, 100 times at 5e-5.
"""
_SEEN = 4 * torch.finfo(torch.float64).eps
_FAINT = 1e-12  # a squared distance that changes no kernel by more than 1e-6
_FAMILIES: dict[str, Family] = {}
_OF_KERNEL: dict[type, list[Family]] = {}


class Shape(msgspec.Struct, frozen=True):
    """A positive parameter of a formula besides the distance, such as the alpha of a rational quadratic."""

    read: Callable[[Kernel], torch.Tensor]  # returns a gpytorch kernel's parameter, shape ``(..., 1, 1)``
    slope: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # ``slope(k, shape)``: derivative at fixed ``u``


class Reach(NamedTuple):
    """Properties of points, found from their largest squared norm; the defaults are for points that were not read."""

    far: bool = False  # whether double precision is needed
    number: bool | None = None  # whether no coordinate is NaN; None if it was not read
    cut: float = 0.0  # |u| up to which kinked families round to a distance of zero; 0 for other families


class Family(msgspec.Struct, frozen=True):
    """A covariance ``k(u)`` with ``u = gamma * s``, where ``s`` is the scaled squared distance.

    `formula` uses only methods and operators (``(-u).exp()``, never ``torch.exp(-u)``), so that it accepts a Tensor or
    a LazyTensor. A LazyTensor divides by an integer in single precision: multiply by ``1 / 3`` instead. ``u`` has the
    sign of `gamma` or is zero, where autograd's derivative must be finite (`TINY` keeps roots off zero), because it is
    multiplied by a distance of zero. ``epilogue(u, slope)`` overwrites ``u`` and returns ``k``, in the memory of ``u``
    if `slope` is None; else `slope`, a tensor of the same shape, is filled with ``dk/du``. With a `shape`, formula
    and epilogue take it as their last argument.
    """

    name: str  # unique, as used in problems
    gamma: float  # factor of the squared distance
    formula: Callable[..., Any]
    epilogue: Epilogue
    slopes: Slopes  # ``dk/du``, ``d2k/du2``, ..., finite at ``u = 0``; () with a `shape`
    plain: Callable[..., Kernel]  # makes a gpytorch kernel that has this formula of embedded points
    slope_is_value: bool = False  # ``dk/du = k``, so that the backward pass needs only ``k``
    kinked: bool = False  # ``dk/du`` is infinite at ``u = 0``, so that rounding of a zero distance changes ``k``
    wants_spare: bool = False  # `epilogue` takes a keyword `spare`, a function that allocates a scratch matrix
    kernels: tuple[type, ...] = ()  # gpytorch's classes with this formula
    matches: Callable[[Kernel], bool] = lambda kernel: True  # whether an instance of these classes has this formula
    # points whose squared distance is ``s``
    embed: Callable[[Kernel, torch.Tensor], torch.Tensor] = lambda kernel, x: x / kernel.lengthscale
    shape: Shape | None = None  # a further parameter
    make: Callable[..., Kernel] | None = None  # creates a sample's kernel; the first of `kernels` by default
    differences: bool = False  # gpytorch's own code forms the differences of points, without centring them
    stock_passes: Callable[[int], float] = lambda d: 8.0  # about how often gpytorch passes over the matrix
    kept: Callable[[int], int] = lambda d: 6  # matrices that autograd keeps for a scaled kernel, its result included

    def __post_init__(self) -> None:
        _FAMILIES[self.name] = self
        for kernel in self.kernels:
            _OF_KERNEL.setdefault(kernel, []).append(self)

    @property
    def derivatives(self) -> Slopes:
        """The formula and its slopes: ``k``, ``dk/du``, ``d2k/du2``, ... as functions of ``u``."""
        return (self.formula, *self.slopes)

    def finish(
        self, u: torch.Tensor, slope: torch.Tensor | None, spare: Spare, shape: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return k by the epilogue, in the memory of u if the epilogue works in place; `spare` allocates a matrix."""
        more = () if shape is None else (shape,)
        return self.epilogue(u, slope, *more, **({"spare": spare} if self.wants_spare else {}))

    def reach(self, *norms: torch.Tensor) -> Reach:
        """Return the reach of points with these squared norms; one number is read back from the device."""
        maxima = [n.max() for n in norms if n.numel()]
        largest = abs(self.gamma) * torch.stack(maxima).sum().item() if maxima else 0.0
        single = norms[0].dtype is torch.float32
        if self.kinked:
            return Reach(single, not math.isnan(largest), _SEEN * largest)
        most = FAR / torch.finfo(torch.float32).eps
        return Reach(single and not largest * _steepness(self.name) <= most, not math.isnan(largest))

    def settled(
        self, u: torch.Tensor, seen: Reach, norms: Callable[[], torch.Tensor], diagonal: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Clamp u in place where rounding changed its sign; a given diagonal becomes 0, or NaN for NaN points.

        `norms` returns the sums of both points' squared norms, times gamma, by which far points round only their own u.
        """
        if diagonal is not None:
            diagonal.zero_() if seen.number else diagonal.mul_(0)
        if seen.cut > _FAINT:
            return u.masked_fill_(u <= norms().mul_(_SEEN).clamp_max_(torch.finfo(u.dtype).max), 0.0)
        if seen.cut > 0:
            return torch.threshold_(u, seen.cut, 0.0)
        return u.clamp_max_(0) if self.gamma < 0 else u.clamp_min_(0)

    def __call__(self, u: torch.Tensor, *shape: torch.Tensor) -> torch.Tensor:
        """Return ``k(u)``, differentiable to any order; ``u`` is unchanged."""
        return self.formula(u, *shape) if shape else _Chain.apply(u, self, 0)

    def __reduce__(self) -> tuple[Callable[[str], Family], tuple[str]]:
        return family, (self.name,)


@functools.cache
def _steepness(name: str) -> float:
    """Return ``|dk/du|`` at distance zero, 1 as an approximation for families with a shape."""
    zero = torch.zeros((), dtype=torch.float64, device="cpu")
    return 1.0 if family(name).shape is not None else abs(family(name).slopes[0](zero).item())


class _Chain(torch.autograd.Function):
    """A family's derivative of some order, differentiable to the next one; autograd differentiates the last."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, u: torch.Tensor, of: Family, order: int) -> torch.Tensor:
        ctx.save_for_backward(u)
        ctx.of, ctx.order = of, order  # type: ignore[attr-defined]
        return of.derivatives[order](u)

    @staticmethod
    @each_cotangent
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (u,) = ctx.saved_tensors
        of, order = ctx.of, ctx.order + 1
        return grad * (_Chain.apply(u, of, order) if order + 1 < len(of.derivatives) else _last(u, of)), None, None


def _last(u: torch.Tensor, of: Family) -> torch.Tensor:
    """Return the last closed-form derivative, differentiable by autograd at non-zero distances."""
    last = of.derivatives[-1]
    if of.slope_is_value:
        return last(u)
    apart = u.detach().abs() > TINY  # else a constant, as in gpytorch: the derivative of a root is infinite there
    return torch.where(apart, last(torch.where(apart, u, 1.0)), last(u.detach()))


def family(name: str) -> Family:
    """Return the family of this name."""
    return _FAMILIES[name]


def known_family(name: str) -> Family | None:
    """Return the family of this name, or None: a profile may name a family that is not registered."""
    return _FAMILIES.get(name)


@functools.cache
def code_of(kinds: frozenset[type]) -> Relied:
    """Return the functions on which kernels of these classes rely."""
    return relied(*kinds, *DISTANCES)


def formula_of(kernel: Kernel) -> Family | None:
    """Return the family of a kernel by its exact class, None if it has none or overrides a method of `OWN`."""
    if not OWN.isdisjoint(kernel.__dict__):
        return None
    return next((f for f in _OF_KERNEL.get(type(kernel), ()) if f.matches(kernel)), None)


def families(shaped: bool = False) -> list[Family]:
    """Return all families in the order of their names; with `shaped`, also those with a shape parameter."""
    return [_FAMILIES[name] for name in sorted(_FAMILIES) if shaped or _FAMILIES[name].shape is None]
