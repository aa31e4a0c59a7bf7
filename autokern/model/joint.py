"""One kernel in place of several whose matrices a model's ``forward`` adds, as ``self.trend(x) + self.season(x)``.

The library adds lazy matrices, each with its own columns of the points. Their sum is the matrix of an `AdditiveKernel`
of the same kernels at all columns, which is what the rest of autokern reads. The sum itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import AdditiveKernel, Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator.operators import DenseLinearOperator, SumLinearOperator
from linear_operator.utils.memoize import add_to_cache

from autokern.core.errors import unless_it_fails
from autokern.core.state import Beside
from autokern.model.marginal import is_plain
from autokern.model.memoized import EVALUATED, TERMS, is_kept

_known: Beside[AdditiveKernel] = Beside()  # by model
_wholes: Beside[LazyEvaluatedKernelTensor] = Beside()  # by sum of covariances


def joined(model: Any, prior: Any) -> Any:
    """Return a training prior with one lazy covariance in place of a sum of such; any other prior itself."""
    if type(prior) is not MultivariateNormal:
        return prior
    covariance = prior.__dict__.get("_covar")
    whole = joined_covariance(model, covariance, None)
    return prior if whole is covariance else MultivariateNormal(prior.loc, whole)


def joined_covariance(model: Any, covariance: Any, x: torch.Tensor | None) -> Any:
    """Return one lazy matrix for a sum of such at points `x`, by default those of training, else the covariance."""
    if covariance.__class__ is not SumLinearOperator:
        return covariance
    return _whole(model, covariance, x) or covariance


def whole_of(covariance: Any) -> Any:
    """Return the lazy matrix by which `joined_covariance` has replaced a sum, else the covariance itself."""
    return _wholes.get(covariance) or covariance


@unless_it_fails
def _whole(model: Any, covariance: Any, x: torch.Tensor | None) -> LazyEvaluatedKernelTensor | None:
    terms = list(_terms(covariance))
    if not all(map(is_plain, terms)):
        return None
    points = model.train_inputs[0] if x is None else x
    points = next((term.x1 for term in terms if term.kernel.active_dims is None), points)
    kernel = of_kernels(model, [term.kernel for term in terms]) if all(_is_at(term, points) for term in terms) else None
    if kernel is None:
        return None
    found = LazyEvaluatedKernelTensor(points, points, kernel=kernel)
    found.__dict__[TERMS] = terms
    return _wholes.put(covariance, found)


def _terms(covariance: Any) -> Iterator[Any]:
    for term in covariance.linear_ops:
        if term.__class__ is SumLinearOperator:
            yield from _terms(term)
        else:
            yield term


def _is_at(term: Any, x: torch.Tensor) -> bool:
    """Whether a lazy matrix is that of its kernel at these points."""
    columns = term.kernel.active_dims
    if columns is None:
        return term.x1 is x
    if x.requires_grad or term.x1.requires_grad:  # equal numbers may be those of another graph
        return False
    own = x.index_select(-1, columns)
    return own.shape == term.x1.shape and torch.equal(own, term.x1)


def of_kernels(model: Any, kernels: Sequence[Kernel]) -> AdditiveKernel | None:
    """Return the sum of a model's kernels, the same object for the same kernels; None for an unsupported sum."""
    known, present = _known.get(model), [*map(id, kernels)]
    if known is None or [*map(id, known.kernels)] != present:
        if len({*present}) < len(present) or len({kernel.batch_shape for kernel in kernels}) > 1:
            return None
        known = _known.put(model, AdditiveKernel(*kernels))
    return known


def evaluated(lazy: Any) -> Any:
    """Return an evaluated covariance; each term of a sum is evaluated and cached, as in the library."""
    terms = lazy.__dict__.get(TERMS)
    if terms is None or is_kept(lazy, EVALUATED):
        return lazy.evaluate_kernel()
    found = [term.evaluate_kernel() for term in terms]
    dense = all(type(one) is DenseLinearOperator for one in found)
    whole = DenseLinearOperator(sum(one.tensor for one in found)) if dense else SumLinearOperator(*found)
    return add_to_cache(lazy, EVALUATED, whole)
