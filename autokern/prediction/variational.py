"""The distribution of a sparse variational Gaussian process in training: one autograd function, closed-form gradients.

For whitened inducing values ``u ~ N(m, S)`` (Matthews 2017, "Scalable Gaussian process inference using variational
methods", section 4), ``L L^T = Kzz`` and ``A = L^-1 Kzx``, the mean is ``A^T m`` and the covariance ``Kxx + A^T M A``
with ``M = S - I``. With the gradient ``g`` by the variances, that by A is ``2 M A diag(g)`` and that by M is ``D = A
diag(g) A^T``, so the product of the former with ``A^T``, which the derivative of the factor takes (Murray 2016,
"Differentiation of the Cholesky decomposition", eq. 10), is ``2 M D``, whatever the number of points.

Samples of the points, as in the layers of a deep Gaussian process, share inducing points, and so one factor.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.variational import VariationalStrategy, variational_strategy
from linear_operator.operators import (
    CholLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    LinearOperator,
    MatmulLinearOperator,
    SumLinearOperator,
    TriangularLinearOperator,
)

from autokern.core.autograd import Unsaved, each_cotangent, plain_gradients
from autokern.kernels import matrix as matrices
from autokern.kernels import tree as trees
from autokern.kernels.tree import Tree, centre_of
from autokern.model.libraries import psd_safe_cholesky, variational_forward
from autokern.prediction.lazy_covariance import PosteriorCovariance

DIAGONAL = hasattr(variational_strategy, "ComputePredictiveUpdates")
"""Whether this release computes variances only, of more points than inducing points, unless it is asked for all."""


class Sparse(NamedTuple):
    """A variational strategy's call: the prior at ``m`` inducing points and then at the data, one plain lazy matrix."""

    forward: Callable[[Sparse], Any]  # returns the library's distribution
    prior: Any
    inducing: torch.Tensor | None  # the strategy's points ``(..., m, d)`` without samples, if the prior has these
    values: torch.Tensor  # whitened means ``(..., m)``
    covariance: Any  # of the whitened values: an operator, or None for zeros
    jitter: float
    joint: bool  # whether the library computes variances only, by one function
    cache: dict[Any, Any]  # the strategy's

    def spread(self) -> tuple[torch.Tensor, bool]:
        """Return the lower factor of the whitened covariance and true, or that covariance itself ``(..., m, m)``."""
        found, m = self.covariance, self.values.shape[-1]
        if found is None:
            return self.values.new_zeros(*self.values.shape, m), False
        root: Any = found.root if type(found) is CholLinearOperator and not found.upper else None
        plain = type(root) is TriangularLinearOperator and type(root._tensor) is DenseLinearOperator
        return (root._tensor.tensor, True) if plain and not root.upper else (found.to_dense(), False)


class _Known:
    """A model whose prior is known."""

    def __init__(self, prior: Any) -> None:
        self._prior = prior

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._prior


def by_library(strategy: Any, prior: Any, z: Any, x: Any, *given: Any, **more: Any) -> Any:
    """Return the library's distribution at points `x`, by inducing points `z`, where the model's prior is known."""
    own = object.__new__(VariationalStrategy)
    own.__dict__.update(strategy.__dict__, model=_Known(prior))
    return variational_forward(own, x, z, *given, **more)


def distribution(of: Sparse) -> MultivariateNormal:
    """Return the distribution at the data; its covariance knows its diagonal."""
    values, m, prior = of.values, of.values.shape[-1], of.prior._covar
    (spread, is_root), (x, samples), n = of.spread(), _points(of), prior.x1.shape[-2] - m
    tree = trees.read(prior.kernel, x, centre_of(x[..., :m, :]))
    rows = Tree(tree.node, [p[..., :m, :] for p in tree.points], tree.shapes, tree.weights)
    k = matrices.matrix(rows, tree.points, True, "tiled")  # whose diagonal is that of the inducing points
    mean, update, lower, a, product = _Update.apply(k, values, spread, is_root, of.jitter, of.joint)
    variances = _apart(trees.diagonal(tree, update.shape) + of.jitter + update, samples, n)
    of.cache["cholesky_factor"] = TriangularLinearOperator(lower.expand(*samples, *lower.shape) if samples else lower)
    parts = [_apart(update, samples, n)]
    if not of.joint:
        parts += [_apart(t, samples, n) for t in (a, product)]
    mean = of.prior.loc[..., m:] + _apart(mean, samples, n)
    return MultivariateNormal(mean, VariationalCovariance(prior, variances, *parts, jitter=of.jitter))


def _points(of: Sparse) -> tuple[torch.Tensor, torch.Size]:
    """Return a prior's points, and the shape of samples of the data that became further points."""
    x, z, m = of.prior._covar.x1, of.inducing, of.values.shape[-1]
    if z is None or z.shape[-1] != x.shape[-1]:
        return x, torch.Size()
    count = x.dim() - max(z.dim(), of.values.dim() + 1, len(of.prior._covar.kernel.batch_shape) + 2)
    if count <= 0 or not torch.equal(x[..., :m, :], z.expand_as(x[..., :m, :])):  # `forward` may map its points
        return x, torch.Size()
    data, behind = x[..., m:, :], (tuple(range(count)), tuple(range(-2 - count, -2)))
    further = data.movedim(*behind).flatten(-2 - count, -2)
    return torch.cat((z.expand(*further.shape[:-2], *z.shape[-2:]), further), -2), data.shape[:count]


def _apart(t: torch.Tensor, samples: torch.Size, n: int) -> torch.Tensor:
    """Return ``(..., samples n)`` as ``(samples, ..., n)``."""
    count = len(samples)
    if not count:
        return t
    return t.unflatten(-1, (*samples, n)).movedim(tuple(range(-1 - count, -1)), tuple(range(count)))


class VariationalCovariance(PosteriorCovariance):
    """The covariance ``(..., n, n)`` of a variational distribution; all but its diagonal is the library's operator.

    That operator consists of the prior at inducing points and data, and of the `update` of the variances, or, where
    the library computes covariances, of A and M A as well.
    """

    def __init__(self, prior: Any, variances: torch.Tensor, *update: torch.Tensor, jitter: float) -> None:
        LinearOperator.__init__(self, prior, variances, *update, jitter=jitter)
        self._prior, self._variances, self._update, self._jitter = prior, variances, update, jitter
        self._graph, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._formed = None

    def formed(self) -> LinearOperator:
        """Return the library's operator, made on first use."""
        if self._formed is None:
            with self._as_called():
                (variances, *both), data = self._update, slice(-self._variances.shape[-1], None)
                product = MatmulLinearOperator(both[0].mT, both[1]) if both else DiagLinearOperator(variances)
                prior = self._prior[..., data, data].add_jitter(self._jitter)
                self._formed = SumLinearOperator(prior, product)
        return self._formed

    @property
    def linear_ops(self) -> Any:
        """The library's terms."""
        return self.formed().linear_ops

    def _diagonal(self) -> torch.Tensor:
        return self._variances.clone()  # in the reader's grad mode, as in the library

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return self.formed()._getitem(row_index, col_index, *batch_indices)

    def evaluate_kernel(self) -> LinearOperator:
        """Return the library's operator, evaluated."""
        return self.formed().evaluate_kernel()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrix."""
        return self._variances.dtype

    def _size(self) -> torch.Size:
        shape = self._variances.shape
        return torch.Size((*shape, shape[-1]))


def plain(
    k: torch.Tensor, values: torch.Tensor, spread: torch.Tensor, is_root: bool, jitter: float, *_: bool
) -> tuple[torch.Tensor, ...]:
    """Return the updates of mean and variances, L, A and M A, from ``k = [Kzz Kzx]``; differentiable to any order."""
    m = spread.shape[-1]
    eye = torch.eye(m, dtype=k.dtype, device=k.device)
    lower = psd_safe_cholesky((k[..., :m] + jitter * eye).double())
    a = torch.linalg.solve_triangular(lower, k[..., m:].double(), upper=False).to(k.dtype)
    product = ((spread @ spread.mT if is_root else spread) - eye) @ a
    return (a.mT @ values.unsqueeze(-1)).squeeze(-1), (a * product).sum(-2), lower, a, product


class _Update(torch.autograd.Function):
    """The results of `plain`, with closed-form first derivatives."""

    @staticmethod
    def forward(ctx, k, values, spread, is_root, jitter, joint):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        m = spread.shape[-1]
        kzz = k[..., :m].clone()
        kzz.diagonal(dim1=-2, dim2=-1).add_(jitter)
        lower = psd_safe_cholesky(kzz.double())
        inverse = None  # accurate in single precision, in which products take half of the time of solves
        if joint and k.dtype is torch.float32:
            eye = torch.eye(m, dtype=lower.dtype, device=lower.device)
            inverse = torch.linalg.solve_triangular(lower, eye, upper=False).to(k.dtype)
        a = _solved(lower, inverse, k[..., m:], False)
        middle = spread @ spread.mT if is_root else spread.clone()
        middle.diagonal(dim1=-2, dim2=-1).sub_(1.0)
        product = middle @ a
        mean, variance = (a.mT @ values.unsqueeze(-1)).squeeze(-1), torch.linalg.vecdot(a, product, dim=-2)
        ctx.how = is_root, jitter, joint
        ctx.unsaved = Unsaved(values)  # which the program may write before a backward pass that needs only the copy
        ctx.save_for_backward(k, values.clone(), spread, lower, inverse, a, middle, product)
        return mean, variance, lower, a, product

    @staticmethod
    def backward(ctx, *cotangents):  # type: ignore[no-untyped-def]
        return _pulled_back(ctx, *cotangents)


def _solved(lower: torch.Tensor, inverse: torch.Tensor | None, columns: torch.Tensor, turned: bool) -> torch.Tensor:
    """Return ``L^-1`` times columns, or ``L^-T`` if `turned`, by L or by its inverse."""
    if inverse is not None:
        return (inverse.mT if turned else inverse) @ columns
    factor = lower.mT if turned else lower
    return torch.linalg.solve_triangular(factor, columns.to(lower.dtype), upper=turned).to(columns.dtype)


@each_cotangent
def _pulled_back(ctx: Any, by_mean: Any, by_variance: Any, by_lower: Any, by_a: Any, by_product: Any) -> Any:
    k, values, spread, lower, inverse, a, middle, product = ctx.saved_tensors
    is_root, _, joint = ctx.how
    if joint and (by_mean is None) != (by_variance is None):  # as in the library, whose function has both
        by_mean = torch.zeros_like(by_variance) if by_mean is None else by_mean
        by_variance = torch.zeros_like(by_mean) if by_variance is None else by_variance
    if torch.is_grad_enabled():
        each = by_mean, by_variance, by_lower, by_a, by_product

        def outs(*tensors: Any) -> list[torch.Tensor]:
            return [out for out, by in zip(plain(*tensors, *ctx.how), each, strict=True) if by is not None]

        given, inputs = [by for by in each if by is not None], (k, *ctx.unsaved.unchanged(), spread)
        return *plain_gradients(outs, inputs, ctx.needs_input_grad[:3], given), None, None, None
    slopes, factors, spreads = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    by_values = by_spread = by_k = None  # the lists: by A, that times A^T, by `spread`

    def add_product(left: torch.Tensor) -> torch.Tensor | None:
        """Add the derivative by ``M = spread (spread^T) - I``, ``left A^T``; return it, None if it is not needed."""
        if is_root and left.shape[-1] < left.shape[-2]:  # then this takes fewer operations
            spreads.append(left @ (a.mT @ spread) + a @ (left.mT @ spread))
            return None
        whole = left @ a.mT
        spreads.append((whole + whole.mT) @ spread if is_root else whole)
        return whole

    if by_variance is not None:
        whole = add_product(a * by_variance.unsqueeze(-2))
        slopes.append(product * (2.0 * by_variance).unsqueeze(-2))
        factors.append(slopes[0] @ a.mT if whole is None else (middle @ whole).mul_(2.0))
    if by_mean is not None:
        of_mean = a @ by_mean.unsqueeze(-1)
        by_values = of_mean.squeeze(-1).sum_to_size(values.shape)
        column, row = values.unsqueeze(-1), by_mean.unsqueeze(-2)
        slopes = [slopes[0].addcmul_(column, row) if slopes else column * row]
        factors.append(column * of_mean.mT)
    if by_product is not None:
        add_product(by_product)
    for other in filter(lambda t: t is not None, (by_a, None if by_product is None else middle @ by_product)):
        slopes.append(other)
        factors.append(other @ a.mT)
    if spreads and ctx.needs_input_grad[2]:
        by_spread = functools.reduce(operator.add, spreads).sum_to_size(spread.shape)
    inner = [-one.sum_to_size(lower.shape).to(lower.dtype) for one in factors]
    inner += [] if by_lower is None else [lower.mT @ by_lower]
    if inner and ctx.needs_input_grad[0]:
        half = functools.reduce(operator.add, inner).tril_()
        half.diagonal(dim1=-2, dim2=-1).mul_(0.5)
        half = torch.linalg.solve_triangular(lower.mT, half + half.mT, upper=True)
        by_kzz = torch.linalg.solve_triangular(lower, half, upper=False, left=False).mul_(0.5)
        slopes = [one.sum_to_size(a.shape) for one in slopes] or [torch.zeros_like(a)]
        by_kzx = _solved(lower, inverse, functools.reduce(operator.add, slopes), True)
        by_k = torch.cat((by_kzz.to(k.dtype), by_kzx), -1)
    return by_k, by_values, by_spread, None, None, None
