"""Arguments of ops, whatever they are made of: tensors, gpytorch modules, linear operators, distributions.

Ops on whole models take objects that hold tensors deep inside and keep caches. Two walks serve all: which tensors are
in there, and a fresh object of the same kind with every tensor replaced. Floor 0: imports nothing of autokern.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator, LinearOperator

__all__ = ["DIAGONAL", "in_float64", "rebuilt", "tensors_in", "variances"]

DIAGONAL = (DiagLinearOperator, ConstantDiagLinearOperator)
"""Operators that hold nothing but a diagonal."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested sequences, operators and distributions, and the parameters of modules, in order.

    What stands there twice is yielded twice.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
    elif isinstance(value, LinearOperator):
        yield from tensors_in((*value._args, *value._kwargs.values()))
    elif isinstance(value, MultivariateNormal):
        yield from tensors_in((value.loc, value.lazy_covariance_matrix))
    elif isinstance(value, DefaultPredictionStrategy):
        yield from tensors_in((value.train_inputs, value.train_prior_dist, value.train_labels, value.likelihood))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from tensors_in(item)


def _itself(leaf: Any) -> Any:
    return leaf


def rebuilt(value: Any, leaf: Callable[[Any], Any] = _itself) -> Any:
    """Return an object of the same kind without its caches, its tensors and modules replaced by `leaf` of them.

    Prediction strategies keep theirs, which are what they are for, unless leaves change or they are marked `cold`.
    """
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return leaf(value)
    if isinstance(value, LinearOperator):
        named = {name: rebuilt(part, leaf) for name, part in value._kwargs.items()}
        return type(value)(*(rebuilt(part, leaf) for part in value._args), **named)
    if isinstance(value, MultivariateNormal):
        return type(value)(rebuilt(value.loc, leaf), rebuilt(value.lazy_covariance_matrix, leaf))
    if isinstance(value, DefaultPredictionStrategy):
        if leaf is _itself and not value.__dict__.get("cold"):
            return value
        held = (value.train_inputs, value.train_prior_dist, value.train_labels, value.likelihood)
        return type(value)(*rebuilt(held, leaf))
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(rebuilt(item, leaf) for item in value)
    return value


def in_float64(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return copies in float64, leaves of autograd again; what was passed twice stays one."""
    copies: dict[int, Any] = {}

    def leaf(value: Any) -> Any:
        if id(value) not in copies:
            if isinstance(value, torch.Tensor):
                plain = value.detach().double() if value.is_floating_point() else value
                copies[id(value)] = plain.requires_grad_(value.requires_grad)
            else:
                copies[id(value)] = copy.deepcopy(value).double()
        return copies[id(value)]

    made: tuple[Any, ...] = rebuilt(args, leaf)
    return made


def variances(diagonal: Any) -> torch.Tensor:
    """Return the entries of a diagonal operator as it holds them, ``(..., 1)`` if they are all the same."""
    entries: torch.Tensor = diagonal.diag_values if type(diagonal) is ConstantDiagLinearOperator else diagonal._diag
    return entries
