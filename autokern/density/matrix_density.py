"""Log densities under covariances that are given as matrices, in NumPy, each as one autograd function.

`log_prob` is of one matrix and noise, `log_prob_of_tasks` of several tasks observed at the same points. There the
covariance is ``Kx (x) Kt + I (x) S``. In the basis P of the tasks in which ``P' S P = 1`` and ``P' Kt P`` is diagonal,
the tasks are independent (Rakitsch et al. 2013, "It is all in the noise", section 2): instead of one matrix of all
points and tasks, an ``(n, n)`` matrix is factorised per task. Second derivatives differentiate `plain`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from autokern.core.autograd import computed, readable
from autokern.density import gaussian
from autokern.density.lapack import density
from autokern.kernels.arrays.part import Array

_Found = tuple[float, list[Array]] | None


def log_prob(k: torch.Tensor, noise: torch.Tensor, mean: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """Return the log density of a value ``(n,)``; None if the factorisation fails or the density is not finite.

    `k` is any covariance ``(n, n)`` on the CPU, without noise; autograd differentiates how it was computed. `noise` is
    ``(1,)`` or ``(n,)``.
    """
    return _by_arrays(_alone, noisy, k, noise, mean, value)


def log_prob_of_tasks(
    kx: torch.Tensor, kt: torch.Tensor, noise: torch.Tensor, mean: torch.Tensor, value: torch.Tensor
) -> torch.Tensor | None:
    """Return the log density of a value, None if a factorisation fails or the density is not finite.

    `kx` ``(n, n)`` and `kt` ``(t, t)`` are the covariances of points and tasks, `noise` ``(t, t)`` that of the
    observations at one point; mean and value are ``(n, t)``.
    """
    return _by_arrays(_of_tasks, of_tasks, kx, kt, noise, mean, value)


def _by_arrays(
    evaluate: Callable[..., _Found], matrix: Callable[..., torch.Tensor], *tensors: torch.Tensor
) -> torch.Tensor | None:
    if not readable(*tensors):
        return None
    with np.errstate(all="ignore"):
        found = evaluate(*(t.detach().numpy().astype(np.float64) for t in tensors))
    if found is None or not np.isfinite(found[0]):
        return None
    gradients = [torch.from_numpy(a).to(tensors[0].dtype) for a in found[1]]
    return computed(found[0], gradients, functools.partial(plain, matrix), *tensors)


def _alone(k: Array, noise: Array, mean: Array, value: Array) -> _Found:
    k = np.ascontiguousarray(k)
    k.flat[:: len(k) + 1] += noise
    found = density(k, value - mean, 1.0)
    if found is None:
        return None
    by_noise = found.by_matrix.diagonal().copy()
    if len(noise) == 1:
        by_noise = by_noise.sum(keepdims=True)
    return found.value, [found.by_matrix, by_noise, -found.by_residual, found.by_residual]


def _of_tasks(kx: Array, kt: Array, noise: Array, mean: Array, value: Array) -> _Found:
    n = len(kx)
    if not all(np.isfinite(a).all() for a in (kt, noise)):
        return None
    try:
        lower = np.linalg.cholesky(noise)
    except np.linalg.LinAlgError:
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
        out: Array = basis @ products @ basis.T
        return out

    by_kt = between(solved.T @ (kx @ solved), by_weight)
    by_noise = between(solved.T @ solved, by_one)
    by_mean = solved @ basis.T
    return total, [by_kx, by_kt, by_noise, by_mean, -by_mean]


def plain(matrix: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Return the log density by torch, from the function of the covariances that returns the matrix with noise."""
    *covariances, mean, value = tensors
    k = matrix(*covariances)
    return gaussian.of_matrix(k, k.new_zeros(1), (value - mean).flatten())


def noisy(k: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return a covariance ``(n, n)`` with noise ``(1,)`` or ``(n,)``."""
    return k + torch.diag(noise.expand(len(k)))


def of_tasks(kx: torch.Tensor, kt: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return the covariance ``(n t, n t)`` of all points and tasks, noise included."""
    eye = torch.eye(len(kx), dtype=kx.dtype, device=kx.device)
    return torch.kron(kx.contiguous(), kt.contiguous()) + torch.kron(eye, noise.contiguous())
