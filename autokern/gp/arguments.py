"""How operators, distributions and prediction strategies are walked, and noisy covariances taken apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.operators import (
    AddedDiagLinearOperator,
    ConstantDiagLinearOperator,
    DiagLinearOperator,
    LinearOperator,
)

from autokern.core.arguments import itself, rebuilt, tensors_in

__all__ = ["DIAGONAL", "terms", "variances"]

DIAGONAL = (DiagLinearOperator, ConstantDiagLinearOperator)
"""Operators that hold nothing but a diagonal."""


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
    """Strategies keep their caches unless leaves change or they are marked `cold`."""
    if leaf is itself and not value.__dict__.get("cold"):
        return value
    held = (value.train_inputs, value.train_prior_dist, value.train_labels, value.likelihood)
    return type(value)(*rebuilt(held, leaf))


def terms(covariance: Any) -> tuple[Any, Any] | None:
    """Return the two terms of a noisy covariance, matrix and diagonal operator, or None if it has another form."""
    if covariance.__class__ is not AddedDiagLinearOperator or covariance._diag_tensor.__class__ not in DIAGONAL:
        return None
    return covariance._linear_op, covariance._diag_tensor


def variances(diagonal: Any) -> torch.Tensor:
    """Return the entries of a diagonal operator as it holds them, ``(..., 1)`` if they are all the same."""
    entries: torch.Tensor = diagonal.diag_values if type(diagonal) is ConstantDiagLinearOperator else diagonal._diag
    return entries
