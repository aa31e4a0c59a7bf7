"""Reads the distribution of noisy observations: mean, lazy kernel matrix and noise.

It also registers how tensors of operators, distributions and prediction strategies are found and replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.operators import (
    AddedDiagLinearOperator,
    ConstantDiagLinearOperator,
    ConstantMulLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    LinearOperator,
    SumLinearOperator,
)

from autokern.core.op import itself, rebuilt, tensors_in
from autokern.kernels import tree as trees
from autokern.kernels.tree import centre_of
from autokern.model import memoized, prior_state

DIAGONAL = (DiagLinearOperator, ConstantDiagLinearOperator)
"""Diagonal operators."""
SUMS = (SumLinearOperator, AddedDiagLinearOperator)


class Marginal(NamedTuple):
    """A Gaussian with the covariance ``kernel(x, x) + noise`` or ``matrix + noise``."""

    distribution: Any  # the caller's
    extra: torch.Tensor | None  # noise variances ``(..., 1)`` that its covariance does not include yet
    lazy: Any  # LazyEvaluatedKernelTensor or DenseLinearOperator, without noise
    noise: torch.Tensor  # all noise variances, ``(..., 1)`` or ``(..., n)``

    def noisy(self) -> Any:
        """Return the distribution with all noise."""
        distribution, noise = self.distribution, self.extra
        if noise is None:
            return distribution
        *batch, n = distribution.loc.shape
        noise = noise.expand(*torch.broadcast_shapes(noise.shape[:-1], torch.Size(batch)), 1)
        covariance = distribution.lazy_covariance_matrix + ConstantDiagLinearOperator(noise, n)
        return distribution.__class__(distribution.loc, covariance)


def read(distribution: Any, extra: torch.Tensor | None = None) -> Marginal | None:
    """Return a Gaussian as a `Marginal`, None unless its covariance is one plain lazy kernel matrix and noise."""
    found = _described(distribution, extra)
    return found if found is not None and is_plain(found.lazy) else None


def is_plain(lazy: Any) -> bool:
    """Whether a covariance is one lazy, symmetric kernel matrix that the library has not evaluated and cached yet.

    The parameters may have changed since the library cached an evaluation.
    """
    if lazy.__class__ is not LazyEvaluatedKernelTensor or lazy.x1 is not lazy.x2 or not lazy._is_grad_enabled:
        return False
    if memoized.is_kept(lazy, "kernel_eval") or prior_state.is_past(lazy):
        return False
    trivial = (None, False)  # compared by identity, as a value may be a tensor
    return not lazy.last_dim_is_batch and all(any(value is one for one in trivial) for value in lazy.params.values())


def read_matrix(distribution: Any, extra: torch.Tensor | None) -> Marginal | None:
    """Return a Gaussian as a `Marginal`, None unless its covariance without noise is a matrix or a lazy kernel."""
    found = _described(distribution, extra)
    known = DenseLinearOperator, LazyEvaluatedKernelTensor
    return found if found is not None and found.lazy.__class__ in known else None


def matrix_of(marginal: Marginal) -> torch.Tensor | None:
    """Return the covariance without noise as a tensor, None if it evaluates to a structured operator.

    A lazy covariance is evaluated and cached, as in stock; a user's kernel may raise.
    """
    operator: Any = marginal.lazy.evaluate_kernel()
    return operator.tensor if operator.__class__ is DenseLinearOperator else None


def _described(distribution: Any, extra: torch.Tensor | None) -> Marginal | None:
    covariance = distribution.__dict__.get("_covar")
    if extra is not None:
        return Marginal(distribution, extra, covariance, extra)
    found = terms(covariance)
    return None if found is None else Marginal(distribution, None, found[0], variances(found[1]))


def terms(covariance: Any) -> tuple[Any, Any] | None:
    """Return the matrix and the diagonal operator of a noisy covariance, None if it has another form."""
    if covariance.__class__ is not AddedDiagLinearOperator or covariance._diag_tensor.__class__ not in DIAGONAL:
        return None
    return covariance._linear_op, covariance._diag_tensor


def variances(diagonal: Any) -> torch.Tensor:
    """Return the entries of a diagonal operator, ``(..., n)``, or ``(..., 1)`` of a constant one."""
    entries: torch.Tensor = diagonal.diag_values if type(diagonal) is ConstantDiagLinearOperator else diagonal._diag
    return entries


def is_unstructured(operator: Any, lazy: bool = False) -> bool:
    """Whether an operator consists of dense matrices, diagonals, their sums and constant factors.

    With `lazy`, an unevaluated kernel matrix counts as dense.
    """
    kind = type(operator)
    if kind in SUMS:
        if operator._kwargs.get("preconditioner_override") is not None:
            return False  # the user chose a preconditioner, so conjugate gradients must run
        parts = [part for part in operator.linear_ops if type(part) not in DIAGONAL]
        return bool(parts) and all(is_unstructured(part, lazy) for part in parts)
    if kind is ConstantMulLinearOperator:
        return type(operator.base_linear_op) is DenseLinearOperator
    return kind is DenseLinearOperator or (lazy and kind is LazyEvaluatedKernelTensor)


def ingredients(marginal: Marginal, value: torch.Tensor) -> tuple[trees.Tree, torch.Tensor, torch.Tensor]:
    """Return the kernel tree, the noise and the residual of a density."""
    x = marginal.lazy.x1
    return trees.read(marginal.lazy.kernel, x, centre_of(x)), marginal.noise, value - marginal.distribution.loc


@tensors_in.register
def _(value: Marginal) -> Iterator[torch.Tensor]:
    yield from tensors_in((value.distribution, value.extra))


@rebuilt.register(Marginal)
def _(value: Marginal, leaf: Callable[[Any], Any] = itself) -> Any:
    return _described(rebuilt(value.distribution, leaf), rebuilt(value.extra, leaf))


@tensors_in.register
def _(value: LinearOperator) -> Iterator[torch.Tensor]:
    yield from tensors_in((*value._args, *value._kwargs.values()))


@tensors_in.register
def _(value: MultivariateNormal) -> Iterator[torch.Tensor]:
    yield from tensors_in((value.loc, value.lazy_covariance_matrix))


@tensors_in.register
def _(value: DefaultPredictionStrategy) -> Iterator[torch.Tensor]:
    yield from tensors_in((value.train_inputs, value.train_prior_dist, value.train_labels, value.likelihood))


@rebuilt.register(LinearOperator)
def _(value: Any, leaf: Callable[[Any], Any] = itself) -> Any:
    named = {name: rebuilt(part, leaf) for name, part in value._kwargs.items()}
    return type(value)(*(rebuilt(part, leaf) for part in value._args), **named)


@rebuilt.register(MultivariateNormal)
def _(value: Any, leaf: Callable[[Any], Any] = itself) -> Any:
    return type(value)(rebuilt(value.loc, leaf), rebuilt(value.lazy_covariance_matrix, leaf))


@rebuilt.register(DefaultPredictionStrategy)
def _(value: Any, leaf: Callable[[Any], Any] = itself) -> Any:
    """Return the strategy itself, with its caches, unless leaves change or it is marked `cold`."""
    if leaf is itself and not value.__dict__.get("cold"):
        return value
    held = (value.train_inputs, value.train_prior_dist, value.train_labels, value.likelihood)
    return type(value)(*rebuilt(held, leaf))
