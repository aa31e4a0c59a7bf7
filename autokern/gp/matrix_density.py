"""The log density of a small Gaussian whose covariance is any matrix, as a function of autograd, by arrays.

The gradient by the matrix is there when the value is; what the matrix is made of is autograd's matter. Second
derivatives go through the plain formula.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from linear_operator.operators import DenseLinearOperator

from autokern.core.autograd import computed, readable
from autokern.gp import likelihood, small
from autokern.gp.marginal import Marginal

__all__ = ["log_prob", "matrix"]


def matrix(marginal: Marginal) -> torch.Tensor | None:
    """Return the covariance without noise if it is a matrix to the library.

    What is lazy is evaluated for good, as the library would: by the user's own kernel, say, which may raise.
    """
    operator: Any = marginal.lazy.evaluate_kernel()
    return operator.tensor if operator.__class__ is DenseLinearOperator else None


def log_prob(k: torch.Tensor, noise: torch.Tensor, mean: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """Return the log density of a value, None where the covariance has no factor or the density is no number.

    `k` is on the CPU and without noise; `noise` is ``(1,)`` or ``(n,)``.
    """
    tensors = k, noise, mean, value
    if not readable(*tensors):
        return None
    with np.errstate(all="ignore"):
        noisy, more, middle, point = (t.detach().numpy().astype(np.float64) for t in tensors)
        noisy = np.ascontiguousarray(noisy)
        noisy.flat[:: len(noisy) + 1] += more
        found = small.density(noisy, point - middle, 1.0)
    if found is None or not np.isfinite(found.value):
        return None
    by_noise = found.by_matrix.diagonal().copy()
    if len(more) != len(by_noise) or len(more) == 1:
        by_noise = by_noise.sum(keepdims=True)
    arrays = found.by_matrix, by_noise, -found.by_residual, found.by_residual
    return computed(found.value, [torch.from_numpy(a).to(k.dtype) for a in arrays], _plainly, *tensors)


def _plainly(k: torch.Tensor, noise: torch.Tensor, mean: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return likelihood.of_matrix(k, noise, value - mean)
