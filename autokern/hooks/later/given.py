"""A distribution and a target taken apart into tensors, and built again from others: what replays of losses read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import LinearOperator

from autokern.core.replay.effects import is_library
from autokern.model import memoized


class Given:
    """A prior and a target: how the distribution is built from tensors, and copies of these, which a replay reads."""

    def __init__(self, prior: Any, form: Any, tensors: list[torch.Tensor]) -> None:
        self.form, self._empty = form, copy.copy(prior)
        self._empty.loc = self._empty._covar = None
        self.copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        self.present = tensors
        """The tensors of the present call: the prior's, then the target."""

    @classmethod
    def of(cls, prior: Any, target: Any) -> Given | None:
        """Return a prior and a target, None if they are not plain."""
        found = _described(prior, target)
        return None if found is None else cls(prior, *found)

    @property
    def objects(self) -> list[Any]:
        """The modules of the covariance."""
        return list(_objects(self.form))

    def take(self, prior: Any, target: Any) -> bool:
        """Copy another prior and target of the same form; false for another form."""
        found = _described(prior, target)
        if found is None or found[0] != self.form:
            return False
        self.present = found[1]
        with torch.no_grad():
            for own, tensor in zip(self.copies, self.present, strict=True):
                own.copy_(tensor)
        return True

    def prior(self, tensors: Any) -> Any:
        """Return the distribution with other tensors."""
        made = copy.copy(self._empty)
        made.loc, made._covar = tensors[0], _built(self.form[1], tensors)
        return made

    def lazies(self, prior: Any) -> Iterator[Any]:
        """Yield the kernel matrices of a prior that are not evaluated yet."""
        waiting = [prior._covar]
        while waiting:
            one = waiting.pop()
            if type(one) is LazyEvaluatedKernelTensor:
                yield one
            waiting += [part for part in one._args if isinstance(part, LinearOperator)]


def _described(prior: Any, target: Any) -> tuple[Any, list[torch.Tensor]] | None:
    """Return the form of a prior and a target, which equals that of others that differ in numbers only, and tensors."""
    tensors, more = list[torch.Tensor](), dict(vars(prior))
    mean, covariance = more.pop("loc", None), more.pop("_covar", None)
    if not isinstance(covariance, LinearOperator) or not is_library(type(prior).__module__):
        return None
    try:
        form = _form(mean, tensors), _form(covariance, tensors), _form(target, tensors), type(prior), more
    except _OtherError:
        return None
    plain = all(type(t) is torch.Tensor and t.layout is torch.strided and t.is_cpu for t in tensors)
    plain = plain and not any(isinstance(value, torch.Tensor) for value in more.values())
    return (form, tensors) if plain and not target.requires_grad and tensors[-1] is target else None


class _OtherError(Exception):
    """A prior of a kind that cannot be built from tensors."""


def _form(one: Any, tensors: list[torch.Tensor]) -> Any:
    """Return how an operator is built from tensors, which are appended."""
    if isinstance(one, torch.Tensor):
        at = next((at for at, known in enumerate(tensors) if known is one), len(tensors))
        if at == len(tensors):
            tensors.append(one)
        if one._backward_hooks or one.retains_grad:
            raise _OtherError
        return "tensor", at, one.shape, one.dtype, one.requires_grad
    if isinstance(one, LinearOperator):
        kept = set(memoized.names(one)) - {"size"}
        if kept or not vars(one).get("_is_grad_enabled", True) or not is_library(type(one).__module__):
            raise _OtherError  # the library would use what it has cached, or computed without a graph
        arguments = [_form(part, tensors) for part in one._args]
        return type(one), arguments, {name: _form(part, tensors) for name, part in one._kwargs.items()}
    if type(one) in (list, tuple, dict, np.ndarray):
        raise _OtherError
    return one


def _built(form: Any, tensors: Any) -> Any:
    """Return the operator of a form with these tensors."""
    if type(form) is not tuple:
        return form
    if form[0] == "tensor":
        return tensors[form[1]]
    kind, arguments, named = form
    return kind(*[_built(part, tensors) for part in arguments], **{k: _built(v, tensors) for k, v in named.items()})


def _objects(form: Any) -> Iterator[Any]:
    for part in form if isinstance(form, (tuple, list)) else form.values() if isinstance(form, dict) else (form,):
        if isinstance(part, torch.nn.Module):
            yield part
        elif isinstance(part, (tuple, list, dict)):
            yield from _objects(part)
