"""Log densities of covariances that are given as matrices, and solves with their factors.

Small arrays are passed to SciPy's LAPACK bindings: at some tens of rows a call takes a third of NumPy's time, and NumPy
lacks potri, the inverse from a factor. Only SciPy's extension module `_flapack` is loaded, since importing
`scipy.linalg` takes as long as some thousand densities. At some hundred rows torch's MKL takes half their time, but not
on an AMD EPYC: there SciPy's OpenBLAS takes 0.75 to 0.9 of MKL's.

Several tasks observed at the same points have the covariance ``Kx (x) Kt + I (x) S``. In the basis P of the tasks in
which ``P' S P = 1`` and ``P' Kt P`` is diagonal, the tasks are independent (Rakitsch et al. 2013, "It is all in the
noise", section 2): instead of one matrix of all points and tasks, an ``(n, n)`` matrix is factorised per task.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from autokern.core.autograd import computed, each_cotangent, readable
from autokern.core.errors import suppressed
from autokern.density.factors import factorised, inverted
from autokern.kernels.array_parts import Array
from autokern.model.libraries import psd_safe_cholesky
from autokern.system import host, memory, threads

LOG_2_PI = math.log(2 * math.pi)
Found = tuple[float, list[Array]] | None
Solver = Callable[[torch.Tensor], torch.Tensor]
_INDEPENDENT = 1e-6  # least share of a task's noise that is independent of other tasks' noise: below, rounding prevails
_MANY = 160  # rows from which torch's calls pay
_factorised, _inverted = threads.limited(factorised, 1), threads.limited(inverted, 1)


def fits(n: int, like: Any) -> bool:
    """Whether three ``(n, n)`` matrices of the dtype and device of `like` fit: covariance, factor and a copy."""
    return memory.fits(3 * n * n * like.dtype.itemsize, like.device)


class _Solved(torch.autograd.Function):
    """A solve with a factor, differentiable without another factor: ``d(K^-1 b) = K^-1 (db - dK K^-1 b)``."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor, solve: Solver, rhs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(matrix, rhs)
        ctx.solve = solve
        return solve(rhs)

    @staticmethod
    @each_cotangent
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        matrix, rhs = ctx.saved_tensors
        by_rhs = solved(matrix, ctx.solve, grad)
        by_matrix = None
        if ctx.needs_input_grad[0]:
            by_matrix = -(by_rhs @ solved(matrix, ctx.solve, rhs).mT)
            by_matrix = (0.5 * (by_matrix + by_matrix.mT)).sum_to_size(matrix.shape)
        return by_matrix, None, by_rhs.sum_to_size(rhs.shape) if ctx.needs_input_grad[2] else None


def solved(matrix: torch.Tensor, solve: Solver, rhs: torch.Tensor) -> torch.Tensor:
    """Return ``matrix^-1 rhs``, differentiable to any order; `solve` need not be differentiable."""
    return cast("torch.Tensor", _Solved.apply(matrix, solve, rhs))


class Density(NamedTuple):
    """A log density, and its gradients by the covariance and the residual times a factor, empty if not wanted."""

    value: Any  # a number, or one for each model of a batch
    by_matrix: Array
    by_residual: Array


def density(k: Array, residual: Array, factor: float, graded: bool = True) -> Density | None:
    """Return the log density and its gradients times `factor` by potrf, potrs and potri; None if `k` has no factor.

    `k` is symmetric, row-major and is overwritten; both arrays are float64, and may have one batch axis. Only if
    `graded` are gradients computed.
    """
    found = _solution(k, residual)
    if found is None:
        return None
    upper, a = found
    logdet = 2.0 * np.add.reduce(np.log(upper.diagonal(0, -2, -1)), -1)
    squares = float(residual @ a) if a.ndim == 1 else np.add.reduce(residual * a, -1)
    value = -0.5 * (squares + logdet + a.shape[-1] * LOG_2_PI)
    if not graded:
        return Density(value, k[:0], a[:0])
    inverse = _inverse(upper)
    if k.ndim == 2 and len(k) >= _MANY:
        column = torch.from_numpy(a)
        torch.from_numpy(inverse).addr_(column, column, beta=-0.5 * factor, alpha=0.5 * factor)
    else:
        inverse -= a[..., None] * a[..., None, :]
        inverse *= -0.5 * factor
    return Density(value, inverse, a * -factor)


def _by_torch(k: Array) -> bool:
    """Whether torch's LAPACK is faster: for several matrices, and, where MKL suits the CPU, for a large one."""
    return k.ndim > 2 or (len(k) >= _MANY and torch._C.has_mkl and "AMD" not in host.cpu_model())


def _solution(k: Array, residual: Array) -> tuple[Array, Array] | None:
    """Return the upper factor of a matrix, perhaps in its place, and the solution; None if it has no factor."""
    if _by_torch(k):
        lower, status = _factorised(torch.from_numpy(k))
        upper, info = lower.mT.numpy(), status.any()
    else:
        upper, info = _extension().dpotrf(k.T, lower=0, clean=1, overwrite_a=1)
    if info:
        return None
    if k.ndim == 2:
        return upper, _extension().dpotrs(upper, residual, lower=0)[0]
    return upper, torch.cholesky_solve(torch.from_numpy(residual).unsqueeze(-1), lower).squeeze(-1).numpy()


def _inverse(upper: Array) -> Array:
    """Return the symmetric inverse from a factor, which is overwritten."""
    if _by_torch(upper):
        return cast("Array", _inverted(torch.from_numpy(upper).mT).mT.numpy())
    half, _ = _extension().dpotri(upper, lower=0, overwrite_c=1)  # fails with a zero on the diagonal only
    inverse: Array = half + half.T  # the other triangle of each is zero
    inverse.flat[:: len(half) + 1] = half.diagonal()
    return inverse


def leave_one_out(k: Array, residual: Array, factor: float, graded: bool = True) -> Density | None:
    """Return the sum of the log densities of each value given all others, as `density` returns the joint one.

    With ``P = k^-1`` and ``a = P residual``, value i has the error ``a_i / P_ii`` and the variance ``1 / P_ii``
    (Rasmussen and Williams 2006, equations 5.10 to 5.13).
    """
    found = _solution(k, residual)
    if found is None:
        return None
    upper, a = found
    inverse = _inverse(upper)
    precision = inverse.diagonal(0, -2, -1)
    errors = a / precision
    value = 0.5 * (np.log(precision) - a * errors - LOG_2_PI).sum(-1)
    if not graded:
        return Density(value, k[:0], a[:0])
    by_residual = (inverse @ errors[..., None])[..., 0] * -factor
    by_matrix = (inverse * (1 / precision + errors**2)[..., None, :]) @ inverse
    by_matrix *= -0.5 * factor
    both = 0.5 * by_residual[..., None] * a[..., None, :]
    by_matrix -= both
    by_matrix -= both.swapaxes(-1, -2)
    return Density(value, by_matrix, by_residual)


@functools.cache
def _extension() -> Any:
    """Return SciPy's LAPACK extension: the imported one, or else loaded alone, or else with all of `scipy.linalg`."""
    name = "scipy.linalg._flapack"
    found: Any = sys.modules.get(name)
    if found is None:
        with suppressed(Exception):  # another file layout, or a missing library: the full import is only slower
            scipy: Any = importlib.util.find_spec("scipy")
            own: Any = PathFinder.find_spec(name, [os.path.join(scipy.submodule_search_locations[0], "linalg")])
            found = importlib.util.module_from_spec(own)
            own.loader.exec_module(found)
        if "scipy.linalg" not in sys.modules:
            sys.modules.pop(name, None)
    found = found if hasattr(found, "dpotri") else importlib.import_module(name)
    threads.look_for_openblas(getattr(found, "__file__", ""))
    return found


def log_density(k: torch.Tensor, noise: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return the log density of a residual under the covariance ``k + noise``, with jitter as the library adds it."""
    lower = psd_safe_cholesky(noisy(k, noise))
    white = torch.linalg.solve_triangular(lower, residual.unsqueeze(-1), upper=False).squeeze(-1)
    logdet = 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * (white.square().sum(-1) + logdet + residual.shape[-1] * LOG_2_PI)


def leave_one_out_density(k: torch.Tensor, noise: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return the value of `leave_one_out` under the covariance ``k + noise``, by torch."""
    inverse = torch.linalg.inv(noisy(k, noise))
    precision, a = inverse.diagonal(dim1=-2, dim2=-1), (inverse @ residual.unsqueeze(-1)).squeeze(-1)
    return 0.5 * (precision.log() - a.square() / precision - LOG_2_PI).sum(-1)


def log_prob(
    evaluate: Callable[..., Found], matrix: Callable[..., torch.Tensor], *tensors: torch.Tensor
) -> torch.Tensor | None:
    """Return the log density by `of_one` or `of_tasks` for `evaluate`; None if it fails or is not finite."""
    if not readable(*tensors):
        return None
    with np.errstate(all="ignore"):
        found = evaluate(*(t.detach().numpy().astype(np.float64) for t in tensors))
    if found is None or not np.isfinite(found[0]):
        return None
    gradients = [torch.from_numpy(a).to(tensors[0].dtype) for a in found[1]]
    return computed(found[0], gradients, functools.partial(plain, matrix), *tensors)


def of_one(k: Array, noise: Array, mean: Array, value: Array) -> Found:
    """Return the density under one covariance ``(n, n)``, with noise ``(1,)`` or ``(n,)``, and its gradients."""
    k = np.ascontiguousarray(k)
    k.flat[:: len(k) + 1] += noise
    found = density(k, value - mean, 1.0)
    if found is None:
        return None
    by_noise = found.by_matrix.diagonal().copy()
    if len(noise) == 1:
        by_noise = by_noise.sum(keepdims=True)
    return found.value, [found.by_matrix, by_noise, -found.by_residual, found.by_residual]


def of_tasks(kx: Array, kt: Array, noise: Array, mean: Array, value: Array) -> Found:
    """Return the density of ``(n, t)`` values by covariances of points, tasks and one point's noise, and gradients."""
    n = len(kx)
    if not all(np.isfinite(a).all() for a in (kt, noise)):
        return None
    try:
        lower = np.linalg.cholesky(noise)
    except np.linalg.LinAlgError:
        return None
    if (lower.diagonal() ** 2 < _INDEPENDENT * noise.diagonal()).any():
        return None
    whitening = np.linalg.inv(lower)
    eigenvalues, vectors = np.linalg.eigh(whitening @ kt @ whitening.T)
    basis = whitening.T @ vectors
    residual = (value - mean) @ basis
    total = -n * float(np.log(lower.diagonal()).sum())
    solved, by_kx = np.empty_like(residual), np.zeros_like(kx)
    by_weight, by_one = np.empty(len(kt)), np.empty(len(kt))
    for task, weight in enumerate(eigenvalues):
        k = kx * weight
        k.flat[:: n + 1] += 1.0
        found = density(k, np.ascontiguousarray(residual[:, task]), 1.0)
        if found is None:
            return None
        total += found.value
        solved[:, task] = -found.by_residual
        by_weight[task], by_one[task] = np.vdot(found.by_matrix, kx), found.by_matrix.trace()
        by_kx += found.by_matrix * weight

    def between(products: Array, alone: Array) -> Array:
        products *= 0.5
        products.flat[:: len(kt) + 1] = alone
        return basis @ products @ basis.T

    by_kt = between(solved.T @ (kx @ solved), by_weight)
    by_noise = between(solved.T @ solved, by_one)
    by_mean = solved @ basis.T
    return total, [by_kx, by_kt, by_noise, by_mean, -by_mean]


def plain(matrix: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Return the log density by torch; `matrix` returns the noisy covariance from the given covariances."""
    *covariances, mean, value = tensors
    k = matrix(*covariances)
    return log_density(k, k.new_zeros(1), (value - mean).flatten())


def noisy(k: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return a covariance ``(..., n, n)`` with noise ``(..., 1)`` or ``(..., n)``."""
    return k + torch.diag_embed(noise.expand(*noise.shape[:-1], k.shape[-1]))


def kronecker(kx: torch.Tensor, kt: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return the covariance ``(n t, n t)`` of `of_tasks`, noise included."""
    eye = torch.eye(len(kx), dtype=kx.dtype, device=kx.device)
    return torch.kron(kx.contiguous(), kt.contiguous()) + torch.kron(eye, noise.contiguous())
