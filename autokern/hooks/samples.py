"""Hook into `MultivariateNormal.rsample`: small joint distributions are sampled from base samples by plain tensors.

The library multiplies operators and their roots, each with a representation, caches, and an autograd node in Python:
for a few points, some ten times the arithmetic. Posterior covariances, also with outcome transforms and independent
outputs, are formed here by the same operations on tensors. Stock draws from any other covariance, after a failed
Cholesky factorisation, and from the second draw of an operator on, for which it caches a root.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import settings
from linear_operator.operators import (
    BlockDiagLinearOperator,
    CatLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    LinearOperator,
    MatmulLinearOperator,
    _linear_operator,
)

from autokern.core.errors import unless_it_fails
from autokern.hooks.bypass import stay_out
from autokern.hooks.install import hook, stock_of
from autokern.model import memoized
from autokern.model.relied import ALGEBRA, MEMORY

_MOST = 64
"""Size of a joint distribution above which arithmetic dominates the operators' overhead."""
_KINDS = (MultivariateNormal, MultitaskMultivariateNormal)
_RELIES = (
    *ALGEBRA, *MEMORY, "linear_operator.functions._matmul:Matmul",
    *(
        f"linear_operator.operators.{name}"
        for name in (
            "_linear_operator:LinearOperator._choose_root_method", "_linear_operator:LinearOperator.root_decomposition",
            "_linear_operator:LinearOperator.matmul", "_linear_operator:LinearOperator._bilinear_derivative",
            "dense_linear_operator:DenseLinearOperator._matmul",
            "block_diag_linear_operator:BlockDiagLinearOperator", "block_linear_operator:BlockLinearOperator",
            "cat_linear_operator:CatLinearOperator", "matmul_linear_operator:MatmulLinearOperator",
            "root_linear_operator:RootLinearOperator", "triangular_linear_operator:TriangularLinearOperator",
        )
    ),
)  # fmt: skip
_NO_SHAPE = torch.Size()
_stock = stock_of(MultivariateNormal, "rsample")
_root, _factor = LinearOperator.root_decomposition, stock_of(_linear_operator, "psd_safe_cholesky")


@hook(MultivariateNormal, "rsample", relies=_RELIES)
def _rsample(self: Any, sample_shape: Any = _NO_SHAPE, base_samples: Any = None) -> Any:
    found = None if base_samples is None or type(self) not in _KINDS or stay_out() else _drawn(self, base_samples)
    return _stock(self, sample_shape, base_samples) if found is None else found


@unless_it_fails
def _drawn(distribution: Any, base: torch.Tensor) -> torch.Tensor | None:
    """Return the samples, equal to stock's; None where stock must run."""
    mean, covariance = distribution.loc, distribution.lazy_covariance_matrix if distribution._islazy else None
    if covariance is None or base.shape[-mean.dim() :] != mean.shape or mean.shape[-1] > _MOST:
        return None
    blocks = type(covariance) is BlockDiagLinearOperator
    inner = covariance._args[0] if blocks else covariance
    if not _by_cholesky(covariance) or (blocks and memoized.names(inner)):
        return None
    matrix = _formed(inner)
    if matrix is None or matrix.shape[: -3 if blocks else -2] != mean.shape[:-1]:
        return None
    if matrix.shape[-1] == 1:
        root = (matrix.clamp_min(0.0) if mean.shape[-1] > 1 else matrix).sqrt()
    else:
        root, failed = torch.linalg.cholesky_ex(matrix)
        if failed.any():
            return None
        root = root.contiguous()
    memoized.mark(covariance, "drawn")
    flat = base.view(-1, *mean.shape).permute(*range(1, mean.dim() + 1), 0)
    apart = flat.view(*mean.shape[:-1], *matrix.shape[-3:-1], -1) if blocks else flat
    product = (root @ apart).view(flat.shape)
    drawn: torch.Tensor = (product + mean.unsqueeze(-1)).permute(-1, *range(mean.dim())).contiguous()
    return drawn.view(base.shape)


def _by_cholesky(covariance: Any) -> bool:
    """Whether stock would compute a Cholesky factor by its own functions, and has cached neither factor nor draw."""
    if type(covariance).root_decomposition is not _root or _linear_operator.psd_safe_cholesky is not _factor:
        return False
    kept = memoized.names(covariance) or "root_decomposition" in covariance.__dict__
    return not kept and bool(settings.max_cholesky_size.value() >= covariance.shape[-1])


def _formed(operator: Any) -> torch.Tensor | None:
    """Return the tensor of a dense, concatenated or diagonally scaled operator, None for any other."""
    kind, parts = type(operator), operator._args
    if kind is DenseLinearOperator:
        tensor: torch.Tensor = parts[0]
        return tensor
    if kind is CatLinearOperator and operator.cat_dim == -3:
        each = [one for part in parts if (one := _formed(part)) is not None]
        return torch.cat(each, dim=-3) if len(each) == len(parts) else None
    if kind is not MatmulLinearOperator:
        return None
    left, right = parts
    if type(right) is DiagLinearOperator:
        inner = _formed(left)
        return None if inner is None else inner * right._args[0].unsqueeze(-2)
    if type(left) is DiagLinearOperator:
        inner = _formed(right)
        return None if inner is None else left._args[0].unsqueeze(-1) * inner
    return None
