"""Reads the distribution of noisy observations: mean, lazy kernel matrix and noise, of one task or of several.

Independent tasks form a batch, in which each has its own kernel and noise. The file also registers how tensors of
operators, distributions and prediction strategies are found and replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.operators import (
    AddedDiagLinearOperator,
    BlockInterleavedLinearOperator,
    ConstantDiagLinearOperator,
    ConstantMulLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    KroneckerProductLinearOperator,
    LinearOperator,
    SumLinearOperator,
)

from autokern.core.op import itself, rebuilt, tensors_in
from autokern.kernels import tree as trees
from autokern.kernels.tree import centre_of
from autokern.model import libraries, memoized
from autokern.model.libraries import ORDERED, regime

DIAGONAL = (DiagLinearOperator, ConstantDiagLinearOperator)  # diagonal operators
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
    """Whether a covariance is one lazy, symmetric kernel matrix that the library has not evaluated and cached yet."""
    if lazy.__class__ is not LazyEvaluatedKernelTensor or lazy.x1 is not lazy.x2:
        return False
    if lazy._is_grad_enabled != torch.is_grad_enabled():  # the library evaluates it in the mode of its creation
        return False
    if memoized.is_kept(lazy, "kernel_eval") or memoized.is_past(lazy):
        return False
    return not lazy.last_dim_is_batch and trivial(lazy.params)


def trivial(params: Mapping[str, Any]) -> bool:
    """Whether all keyword arguments of a kernel call are None or False (compared by identity: they may be tensors)."""
    return all(value is None or value is False for value in params.values())


def read_matrix(distribution: Any, extra: torch.Tensor | None) -> Marginal | None:
    """Return a Gaussian as a `Marginal`, None unless its covariance without noise is a matrix or a lazy kernel."""
    found = _described(distribution, extra)
    known = DenseLinearOperator, LazyEvaluatedKernelTensor
    return found if found is not None and found.lazy.__class__ in known else None


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
    return diagonal.diag_values if type(diagonal) is ConstantDiagLinearOperator else diagonal._diag


def is_unstructured(operator: Any, lazy: bool = False) -> bool:
    """Whether an operator consists of dense (or `lazy`) matrices, diagonals, their sums and constant factors."""
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


def _consists(
    kind: type, parts: Callable[[Any], Any], made: Callable[[Any, Any], Any] = lambda value, parts: type(value)(*parts)
) -> None:
    """Register the parts of a class, and how an object is made anew, given the old one and its rebuilt parts."""
    tensors_in.register(kind, lambda value: tensors_in(parts(value)))
    rebuilt.register(kind, lambda value, leaf=itself: made(value, rebuilt(parts(value), leaf)))


_held = attrgetter("train_inputs", "train_prior_dist", "train_labels", "likelihood")
_consists(Marginal, attrgetter("distribution", "extra"), lambda _, parts: _described(*parts))
_consists(MultivariateNormal, attrgetter("loc", "lazy_covariance_matrix"))
tensors_in.register(DefaultPredictionStrategy, lambda value: tensors_in(_held(value)))
_consists(
    LinearOperator,
    lambda value: (value._args, tuple(value._kwargs.values())),
    lambda value, parts: type(value)(*parts[0], **dict(zip(value._kwargs, parts[1], strict=True))),
)


@rebuilt.register(DefaultPredictionStrategy)
def _(value: Any, leaf: Callable[[Any], Any] = itself) -> Any:
    """Return the strategy itself, with its caches, unless leaves change or it is marked `cold`."""
    kept = leaf is itself and not value.__dict__.get("cold")
    return value if kept else type(value)(*rebuilt(_held(value), leaf))


_OPERATORS = (LazyEvaluatedKernelTensor, BlockInterleavedLinearOperator)


def are_tasks(distribution: Any, likelihood: Any) -> bool:
    """Whether a density of tasks is supported: differentiable, unbatched, interleaved, and no order to iterate.

    Tasks may be tensors of outputs, whose covariance is a Kronecker product of points and modes (Zhe et al. 2019).
    """
    kinds, covariance = (type(distribution), type(likelihood)), distribution.__dict__.get("_covar").__class__
    if kinds == (MultivariateNormal, GaussianLikelihood):
        several = covariance is KroneckerProductLinearOperator
    else:
        several = kinds == (MultitaskMultivariateNormal, MultitaskGaussianLikelihood) and covariance in _OPERATORS
        several = several and distribution._interleaved
    plain = several and torch.is_grad_enabled() and distribution.loc.dim() == 1
    ignored = gpytorch.settings.observation_nan_policy.value() == "ignore"
    return plain and ignored and regime(distribution.loc.shape[-1]) != ORDERED


def of_tasks(distribution: Any, likelihood: Any) -> tuple[torch.Tensor, ...] | None:
    """Return the covariances of points, tasks and noise, and the mean, None if there is no Kronecker product."""
    product = distribution._covar.evaluate_kernel()
    several = product.__class__ is KroneckerProductLinearOperator and len(product.linear_ops) > 1
    if not several or not libraries.noise_in_place(likelihood):
        return None
    if type(likelihood) is GaussianLikelihood and not libraries.tasks.holds():  # `noise_in_place` checks other classes
        return None
    points, *tasks = product.representation_tree()(*product.representation()).linear_ops  # a copy without caches
    between = functools.reduce(torch.kron, [one.to_dense() for one in tasks])
    if points.dim() > 2 or between.dim() > 2 or not is_symmetric(between, between.dtype):  # stock serves or raises
        return None
    mean = distribution.mean.reshape(points.shape[-1], len(between))
    noise = _noise_of_tasks(likelihood, len(between))
    return points.to_dense(), between, noise if noise.dim() == 2 else torch.diag(noise), mean


def is_symmetric(matrix: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether both triangles are equal but for the rounding of this dtype: a factorisation reads one of them."""
    apart = (matrix - matrix.mT).abs().amax((-2, -1))
    return bool((apart <= 16 * torch.finfo(dtype).eps * matrix.abs().amax((-2, -1))).all())


def of_independent_tasks(distribution: Any, likelihood: Any) -> Marginal | None:
    """Return the marginal of tasks in blocks as a batch over tasks, None if the noise is unsupported."""
    noise = _noise_of_tasks(likelihood, distribution.num_tasks) if libraries.noise_in_place(likelihood) else None
    if noise is None or noise.dim() != 1:  # noise is correlated between tasks
        return None
    return read(MultivariateNormal(distribution.mean.mT, distribution._covar.base_linear_op), noise.unsqueeze(-1))


def _noise_of_tasks(likelihood: Any, tasks: int) -> torch.Tensor:
    """Return the variances of the tasks' noise ``(t,)``, or its covariance ``(t, t)``."""
    if type(likelihood) is GaussianLikelihood or not likelihood.has_task_noise:
        return likelihood.noise.expand(tasks)
    own: torch.Tensor = likelihood.task_noises if likelihood.rank == 0 else likelihood.task_noise_covar
    if not likelihood.has_global_noise:
        return own
    common = likelihood.noise.expand(tasks)
    return own + (common if own.dim() == 1 else torch.diag(common))
