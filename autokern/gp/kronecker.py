"""The log density of several tasks observed at the same points, in NumPy, as one autograd function.

The covariance is ``Kx (x) Kt + I (x) S``. In the basis P of the tasks in which ``P' S P = 1`` and ``P' Kt P`` is
diagonal, the tasks are independent (Rakitsch et al. 2013, "It is all in the noise", section 2): instead of one matrix
of all points and tasks, an ``(n, n)`` matrix is factorised per task. Second derivatives differentiate `plain`.
"""

from __future__ import annotations

import numpy as np
import torch

from autokern.core.autograd import computed, readable
from autokern.gp import likelihood, small

__all__ = ["log_prob", "matrix", "plain"]


def log_prob(
    kx: torch.Tensor, kt: torch.Tensor, noise: torch.Tensor, mean: torch.Tensor, value: torch.Tensor
) -> torch.Tensor | None:
    """Return the log density of a value, None if a factorisation fails or the density is not finite.

    `kx` ``(n, n)`` and `kt` ``(t, t)`` are the covariances of points and tasks, `noise` ``(t, t)`` that of the
    observations at one point; mean and value are ``(n, t)``.
    """
    tensors = kx, kt, noise, mean, value
    if not readable(*tensors):
        return None
    with np.errstate(all="ignore"):
        found = _computed(*(t.detach().numpy().astype(np.float64) for t in tensors))
    if found is None:
        return None
    density, arrays = found
    return computed(density, [torch.from_numpy(a).to(kx.dtype) for a in arrays], plain, *tensors)


def _computed(
    kx: small.Array, kt: small.Array, noise: small.Array, mean: small.Array, value: small.Array
) -> tuple[float, list[small.Array]] | None:
    """Return the log density and its derivatives by all arguments."""
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
        found = small.density(k, np.ascontiguousarray(residual[:, task]), 1.0)
        if found is None:
            return None
        total += found.value
        solved[:, task] = -found.by_residual
        by_weight[task], by_one[task] = np.vdot(found.by_matrix, kx), found.by_matrix.trace()
        by_kx += found.by_matrix * weight
    if not np.isfinite(total):
        return None

    def between(products: small.Array, alone: small.Array) -> small.Array:
        products *= 0.5
        products.flat[:: len(kt) + 1] = alone
        out: small.Array = basis @ products @ basis.T
        return out

    by_kt = between(solved.T @ (kx @ solved), by_weight)
    by_noise = between(solved.T @ solved, by_one)
    by_mean = solved @ basis.T
    return total, [by_kx, by_kt, by_noise, by_mean, -by_mean]


def plain(
    kx: torch.Tensor, kt: torch.Tensor, noise: torch.Tensor, mean: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Return the log density by torch from the matrix of all points and tasks."""
    k = matrix(kx, kt, noise)
    return likelihood.of_matrix(k, k.new_zeros(1), (value - mean).flatten())


def matrix(kx: torch.Tensor, kt: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return the covariance ``(n t, n t)`` of all points and tasks, noise included."""
    eye = torch.eye(len(kx), dtype=kx.dtype, device=kx.device)
    return torch.kron(kx.contiguous(), kt.contiguous()) + torch.kron(eye, noise.contiguous())
