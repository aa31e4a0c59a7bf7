"""The cache of a model's factorisation, shared by all its predictions.

`of` returns the `Conditioned` of a gpytorch prediction strategy, cached or new. The cache lives `Beside` the strategy:
pickles and copies of the model leave it out, and it is freed with the strategy.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any, NamedTuple

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import operators
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.memoize import add_to_cache, clear_cache_hook

from autokern.core.state import Beside
from autokern.density.matrices import noisy, solved
from autokern.kernels import tree as trees
from autokern.model import memoized
from autokern.model.forward import whole_of
from autokern.model.marginal import terms, variances
from autokern.model.memoized import frozen, thawed
from autokern.prediction.inverse_factor import Conditioned
from autokern.prediction.lazy_covariance import BySolving, evaluated


class Query(NamedTuple):
    """The inputs of a prediction."""

    strategy: Any  # DefaultPredictionStrategy of a model with one dense kernel matrix plus noise
    mean: torch.Tensor  # prior mean of the test points, ``(..., m)``
    prior: Any  # LazyEvaluatedKernelTensor ``(..., m, m)``
    cross: Any  # likewise, with the training points, ``(..., m, n)``
    exact: bool  # whether stock would factorise, not run conjugate gradients and Lanczos
    fast: bool  # whether `fast_pred_var` is on
    in_force: bool = False  # whether the strategy's cached factor is known to be valid, so that stock may use it


class Update(NamedTuple):
    """The arguments of gpytorch's `DefaultPredictionStrategy.get_fantasy_strategy`."""

    strategy: Any  # of the model without the new data
    inputs: Any
    targets: torch.Tensor
    full_inputs: Any  # old and new inputs together
    full_targets: torch.Tensor
    full_output: Any  # MultivariateNormal, the prior at the full inputs
    noise: torch.Tensor | None  # variances of the new observations, if the caller gives them
    exact: bool  # whether stock would factorise instead of running Lanczos


@dataclasses.dataclass
class _Kept:
    """The cached results of one prediction strategy, with and without gradients through them."""

    attached: Conditioned | None = None
    detached: Conditioned | None = None
    mean: torch.Tensor | None = None
    plain: bool | None = None
    exact: bool = False


_FORMED = {
    operators.DenseLinearOperator, operators.LowRankRootLinearOperator, operators.MatmulLinearOperator,
    operators.RootLinearOperator,
}  # fmt: skip
"""Operators that hold tensors only, no kernel that is still to be evaluated; the last three are of linear kernels."""
_MARK = "conditioned"
"""A mark in the library's cache of a strategy: an attached factor is valid until a backward pass empties that cache."""
_CACHES = ("mean_cache", "covar_cache")
_OF_MISSING = ("fill",), ("mask",)  # policies of means where observations are missing, which the library computes
_kept: Beside[_Kept] = Beside()


def _of(strategy: Any) -> _Kept:
    return _kept.get(strategy) or _kept.put(strategy, _Kept())


def parts(strategy: Any) -> tuple[Any, Any] | None:
    """Return the lazy kernel matrix and the diagonal of the training covariance, None if it has another form."""
    found = terms(strategy.lik_train_train_covar)
    if found is None:
        return None
    lazy, diagonal = whole_of(found[0]), found[1]
    if type(lazy) is operators.BatchRepeatLinearOperator:
        lazy = lazy.base_linear_op
    return None if type(lazy) is not LazyEvaluatedKernelTensor or lazy.last_dim_is_batch else (lazy, diagonal)


def plain(strategy: Any) -> bool:
    """Whether the training covariance is a noise diagonal plus one kernel matrix that the library forms densely."""
    kept = _of(strategy)
    if kept.plain is None:
        made = None if isinstance(strategy.train_prior_dist, MultitaskMultivariateNormal) else parts(strategy)
        kept.plain = made is not None and (
            trees.form(made[0].kernel) is not None
            or operators.DenseLinearOperator in kinds_of_terms(made[0].evaluate_kernel())
        )
    return kept.plain


def kinds_of_terms(operator: Any) -> set[type]:
    """Return the classes of a sum's terms without constant factors, or of a dense matrix; empty if any is unformed."""
    several = type(operator) is operators.SumLinearOperator
    listed = operator.linear_ops if several else (operator,)
    kinds = {type(t.base_linear_op if type(t) is operators.ConstantMulLinearOperator else t) for t in listed}
    return kinds & (_FORMED if several else {operators.DenseLinearOperator}) if kinds <= _FORMED else set()


def _attached(strategy: Any) -> bool:
    """Whether gradients pass through the caches."""
    return torch.is_grad_enabled() and gpytorch.settings.detach_test_caches.off() and _differentiable(strategy)


def _differentiable(strategy: Any) -> bool:
    prior = strategy.train_prior_dist
    return any(t.requires_grad for t in (strategy.lik_train_train_covar, strategy.train_labels, prior.loc))


def _valid(strategy: Any) -> Conditioned | None:
    """Return the cached factor with a graph; None if it is missing or a backward pass has freed its graph."""
    kept = _kept.get(strategy)
    if kept is not None and kept.attached is not None and _MARK not in memoized.names(strategy):
        kept.attached = None
    return None if kept is None else kept.attached


def found(strategy: Any) -> Conditioned | None:
    """Return the cached result of a strategy under the present settings, or None."""
    kept, attached = _kept.get(strategy), _valid(strategy)
    if kept is None:
        return None
    if gpytorch.settings.detach_test_caches.on():
        return kept.detached or (attached.detached() if attached is not None else None)
    if attached is not None:
        return attached
    return None if kept.detached is None or _attached(strategy) else kept.detached


def of(strategy: Any, graph: bool = False, matrix: torch.Tensor | None = None) -> Conditioned | None:
    """Return the `Conditioned` of a strategy, factorised if not cached; None if its covariance is not `plain`.

    A given kernel `matrix` of the data spares the kernel's evaluation where no graph is needed.
    With `graph`, the result keeps a graph if the data require gradients, even if `detach_test_caches` is on: BoTorch
    turns it off where it reads a fantasy, not where it makes one. A failed factorisation raises the library's error.
    """
    attached = _attached(strategy) or (graph and torch.is_grad_enabled() and _differentiable(strategy))
    there = _valid(strategy) if attached or graph else None
    if there is None and not attached:
        there = found(strategy)
    if there is not None or not plain(strategy):
        return there
    with torch.set_grad_enabled(attached):
        made = _made(strategy, attached, matrix)
    attach(strategy, made, attached)
    return made


def attach(strategy: Any, made: Conditioned | None, attached: bool) -> None:
    """Cache a result for a strategy; `attached` if gradients pass through it.

    If `made` is None, the strategy's own data are factorised when a factor is first needed, whatever their size.
    """
    kept = _of(strategy)
    kept.plain = True
    kept.exact = made is None or made.grown
    if made is None:
        return
    memoized.drop(strategy, _CACHES, but=_OF_MISSING)  # stale, or computed by iterations
    if not attached:
        kept.detached = made
        return
    kept.attached = made
    memoized.mark(strategy, _MARK)
    owner = weakref.ref(strategy)

    def clear(*_: Any) -> None:
        if (there := owner()) is not None:  # a backward pass has freed the graph
            clear_cache_hook(there)

    for tensor in (made.source, made.alpha):
        if tensor is not None and tensor.grad_fn is not None:
            tensor.grad_fn.register_hook(clear)


def forget(strategy: Any) -> None:
    """Drop all cached results of a strategy, its `plain` flag included."""
    _kept.drop(strategy)
    memoized.drop(strategy, _CACHES)


def keep_mean(strategy: Any, alpha: torch.Tensor) -> None:
    """Cache ``alpha``, detached, for a strategy that has no factor."""
    _of(strategy).mean = alpha.detach()


def mean_of(strategy: Any) -> torch.Tensor | None:
    """Return the ``alpha`` that `keep_mean` cached, None if gradients must pass through it."""
    kept = _kept.get(strategy)
    return None if kept is None or kept.mean is None or _attached(strategy) else kept.mean


def is_exact(strategy: Any) -> bool:
    """Whether a strategy continues a factorised one, whose predictions must not become iterative."""
    kept = _kept.get(strategy)
    return kept is not None and kept.exact


def _matrix(made_of: tuple[Any, Any], attached: bool, known: Any = None) -> torch.Tensor:
    """Return the dense noisy covariance; in grad mode of a frozen kernel (`known` or new), for the backward pass."""
    lazy, diagonal = made_of
    x1, x2 = (lazy.x1, lazy.x2) if attached else (lazy.x1.detach(), lazy.x2.detach())
    if lazy.x1 is lazy.x2:
        x2 = x1
    kernel = lazy.kernel
    if torch.is_grad_enabled():
        kernel = known if known is not None and thawed(known) is kernel else frozen(kernel)
    k = evaluated(LazyEvaluatedKernelTensor(x1, x2, kernel=kernel, **lazy.params))
    noise = variances(diagonal) if attached else variances(diagonal).detach()
    ours = trees.form(lazy.kernel) is not None and k.is_contiguous()  # other kernels may keep the matrix they return
    if torch.is_grad_enabled() or not ours or noise.shape[:-1] != k.shape[:-2]:
        return noisy(k, noise)
    k.diagonal(dim1=-2, dim2=-1).add_(noise)
    return k


def for_covariances(strategy: Any, known: Conditioned, fast: bool, kernel: Any = None) -> Conditioned | BySolving:
    """Return the object that computes explained covariances of a `plain` strategy with the factor `known`.

    Without `fast_pred_var`, gradients pass through the kernel, as in the library; `kernel` is a frozen copy of it.
    """
    if fast or not torch.is_grad_enabled() or gpytorch.settings.detach_test_caches.off():
        return known
    made_of = parts(strategy)
    if made_of is None or not any(p.requires_grad for p in made_of[0].kernel.parameters()):
        return known
    matrix = _matrix(made_of, attached=False, known=kernel)  # the library detaches the noise
    return BySolving(matrix.shape[:-2], functools.partial(solved, matrix, known.solve))


def _made(strategy: Any, attached: bool, matrix: torch.Tensor | None) -> Conditioned:
    made_of = parts(strategy)
    assert made_of is not None
    k = _matrix(made_of, attached) if matrix is None or attached else noisy(matrix, variances(made_of[1]).detach())
    lower = psd_safe_cholesky(k) if k.shape[-1] > 1 else k.clamp_min(0.0).sqrt()  # the library takes roots of (1, 1)
    residual = strategy.train_labels - strategy.train_prior_dist.loc
    if not attached:  # the library looks for a Cholesky factor in this cache
        factor = operators.TriangularLinearOperator(lower)
        if strategy.lik_train_train_covar.shape == factor.shape:
            add_to_cache(strategy.lik_train_train_covar, "cholesky", factor, upper=False)
    return Conditioned(lower, matrix=k if k.requires_grad else None, residual=residual)
