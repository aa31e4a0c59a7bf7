"""The lazy covariance of a posterior, with a diagonal that needs no matrix, and ways to compute what data explain.

`PosteriorCovariance` stands for ``K** - K*X K^-1 KX*``. Variances are computed in blocks of test points; every other
access forms the matrix once. Later changes do not affect the result: kernels are frozen (`frozen`), and grad mode and
precision of the original call are restored.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator.operators import LinearOperator, SumLinearOperator, to_linear_operator
from linear_operator.utils.getitem import _is_noop_index

from autokern.core.state import once
from autokern.kernels import tree as trees
from autokern.model.libraries import as_now
from autokern.model.memoized import by_kernel, frozen
from autokern.prediction.inverse_factor import Conditioned

_BYTES = 2**22  # bytes of a block of rows, so that its temporaries stay in cache
_OUTPUTS = 256
"""Points of the diagonal blocks that an unsupported kernel evaluates for its variances."""


class BySolving:
    """The part of a prior covariance that data explain, by `solve`, which returns ``K^-1`` times columns."""

    def __init__(self, batch: torch.Size, solve: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.batch, self.solve = batch, solve

    def explained(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the diagonal of ``rows K^-1 rows^T``, shape ``(..., m)``."""
        return (rows * self.solve(rows.mT).mT).sum(-1).to(rows.dtype)

    def explained_covariance(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows K^-1 rows^T``, shape ``(..., m, m)``."""
        return rows @ self.solve(rows.mT)


Explains = Conditioned | BySolving
"""Computes the part of a prior covariance that the training data explain: ``rows K^-1 rows^T``."""


class Rooted(BySolving):
    """The explained covariance by the inverse's root that the library caches: ``S S^T = K^-1``, ``(..., n, k)``."""

    def __init__(self, root: torch.Tensor) -> None:
        self.batch, self._root = root.shape[:-2], root

    def explained(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the diagonal of ``rows K^-1 rows^T``, shape ``(..., m)``."""
        return (rows @ self._root).square().sum(-1)

    def explained_covariance(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows K^-1 rows^T``, shape ``(..., m, m)``."""
        white = rows @ self._root
        return white @ white.mT


class Structured(BySolving):
    """The explained covariance by the library's solves with an operator, under the settings at construction.

    `factor` is called when the first result is read; the factor that it returns, if any, replaces the operator.
    """

    def __init__(self, operator: Any, factor: Callable[[], Conditioned | None] = lambda: None) -> None:
        super().__init__(torch.Size(operator.shape[:-2]), operator.solve)
        self._make, self._as_made = factor, as_now()

    @once
    def _by(self) -> Any:
        with self._as_made():
            return self._make() or BySolving(self.batch, self.solve)

    def explained(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the diagonal of ``rows K^-1 rows^T``, shape ``(..., m)``."""
        with self._as_made():
            return self._by.explained(rows)

    def explained_covariance(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows K^-1 rows^T``, shape ``(..., m, m)``."""
        with self._as_made():
            return self._by.explained_covariance(rows)


def evaluated(covariance: Any) -> torch.Tensor:
    """Return a covariance as a matrix: of a kernel that `kernel_matrix` serves, by one call of its `forward`."""
    if isinstance(covariance, torch.Tensor):
        return covariance
    lazy = type(covariance) is LazyEvaluatedKernelTensor and not (covariance.params or covariance.last_dim_is_batch)
    if not lazy or trees.family_name(covariance.kernel) is None:
        return covariance.to_dense()
    with torch.set_grad_enabled(covariance._is_grad_enabled):
        return covariance.kernel.forward(covariance.x1, covariance.x2)


def less(own: Any, explained: torch.Tensor) -> LinearOperator:
    """Return ``own - explained`` as a lazy sum, as the library does, so that its diagonal is a new tensor."""
    return SumLinearOperator(to_linear_operator(own), to_linear_operator(-explained))


def by_blocks(cross: Any, size: int, of: Callable[[torch.Tensor, int, int], torch.Tensor]) -> torch.Tensor:
    """Return the results of `of(rows, start, stop)`, ``(..., rows)``, for blocks of a covariance, joined at the end."""
    if not isinstance(cross, (torch.Tensor, LazyEvaluatedKernelTensor)):
        cross = cross.to_dense()  # the library slices other operators by interpolation
    m = cross.shape[-2]
    steps = [(start, min(m, start + size)) for start in range(0, m, size)]
    if len(steps) <= 1:
        return of(evaluated(cross), 0, m)
    return torch.cat([of(evaluated(cross[..., start:stop, :]), start, stop) for start, stop in steps], dim=-1)


class PosteriorCovariance(LinearOperator):  # type: ignore[misc]
    """The covariance ``(..., m, m)`` of the posterior at m test points.

    The prior covariance is lazy, with a frozen kernel (`frozen`). `cross` ``(..., m, n)`` is a tensor, or lazy and
    evaluated in blocks of `block` test points, 0 for as many as fit the cache.
    """

    _check_size = False

    @classmethod
    def deferred(cls, prior: LinearOperator, cross: Any, known: Explains, block: int = 0) -> PosteriorCovariance:
        """Return the covariance with a frozen copy of the kernel of `prior` and of a lazy `cross`."""
        kernel = frozen(prior.kernel)
        lazy = isinstance(cross, LazyEvaluatedKernelTensor)
        return cls(by_kernel(kernel, prior), by_kernel(kernel, cross) if lazy else cross, known, block)

    def __init__(self, prior: Any, cross: Any, known: Explains, block: int = 0) -> None:
        super().__init__(prior, cross, known, block)
        self._prior, self._cross, self._known, self._block = prior, cross, known, block
        self._graph, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._formed: LinearOperator | None = None
        self.variances: torch.Tensor | None = None  # the diagonal, computed on first use

    @contextlib.contextmanager
    def _as_called(self) -> Iterator[None]:
        """Restore the grad and inference modes of the original call, and disable autocast."""
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._graph):
            if not torch._C._is_any_autocast_enabled():
                yield
                return
            with torch.autocast(self.device.type, enabled=False):
                yield

    def formed(self) -> LinearOperator:
        """Return the matrix as a dense operator, formed on first use."""
        if self._formed is None:
            with self._as_called():
                explained = self._known.explained_covariance(evaluated(self._cross))
                own = evaluated(self._prior)
                alike = own.dtype == explained.dtype and own.shape == explained.shape
                reused = explained if alike and not (own.requires_grad or explained.requires_grad) else None
                self._formed = to_linear_operator(torch.sub(own, explained, out=reused))
        return self._formed

    def _diagonal(self) -> torch.Tensor:
        if self._formed is not None:
            return self._formed.diagonal(dim1=-2, dim2=-1).clone()  # the caller may write into it
        with self._as_called():
            if self.variances is None:
                cross, own = self._cross, _diagonal_of(self._prior)
                row = cross.shape[:-2].numel() * cross.shape[-1] * own.element_size()
                size = self._block or max(1, _BYTES // max(1, row))
                self.variances = by_blocks(
                    cross, size, lambda rows, start, stop: own[..., start:stop] - self._known.explained(rows)
                )
            return self.variances.clone()

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        block = isinstance(row_index, slice) and row_index == col_index
        if self._formed is None and block and all(_is_noop_index(index) for index in batch_indices):
            with self._as_called():
                part = self._prior[..., row_index, row_index], self._cross[..., row_index, :]
                return PosteriorCovariance(*part, self._known, self._block)
        return self.formed()._getitem(row_index, col_index, *batch_indices)

    def evaluate_kernel(self) -> LinearOperator:
        """Return the matrix as a dense operator; the library calls this before it computes."""
        return self.formed()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrix; a kernel and its points may differ in theirs."""
        if isinstance(self._cross, torch.Tensor):
            return self._cross.dtype
        points = getattr(self._cross, "x1", None)
        own: torch.dtype = self._prior.dtype
        return own if points is None else torch.promote_types(own, points.dtype)

    @property
    def requires_grad(self) -> bool:
        """Whether results carry a graph."""
        return self._graph and bool(super().requires_grad)

    def _size(self) -> torch.Size:
        shape = self._prior.shape
        return torch.Size((*torch.broadcast_shapes(shape[:-2], self._known.batch), *shape[-2:]))

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

    def __reduce__(self) -> Any:
        return copy.copy, (self.formed(),)


def _as_formed(name: str) -> Callable[..., Any]:
    def method(self: PosteriorCovariance, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.formed(), name)(*args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    "_bilinear_derivative", "_expand_batch", "_get_indices", "_matmul", "_permute_batch", "_prod_batch", "_sum_batch",
    "_t_matmul", "_unsqueeze_batch", "clone", "cpu", "cuda", "detach", "double", "float", "half", "repeat",
    "representation", "representation_tree", "requires_grad_", "to", "to_dense", "type",
):  # fmt: skip
    setattr(PosteriorCovariance, _name, _as_formed(_name))


def _diagonal_of(prior: Any) -> torch.Tensor:
    """Return the prior variances without forming the prior covariance."""
    if not isinstance(prior, LazyEvaluatedKernelTensor):
        return prior.diagonal(dim1=-2, dim2=-1)
    if prior.x1 is prior.x2 and not prior.last_dim_is_batch and trees.form(prior.kernel) is not None:
        return trees.diagonal(trees.read(prior.kernel, prior.x1[..., :1, :]), prior.shape[:-1])
    if prior.shape[-1] == 0:
        return torch.zeros(prior.shape[:-1], dtype=prior.x1.dtype, device=prior.x1.device)
    m = prior.shape[-1]
    step = _OUTPUTS * (m // prior.x1.shape[-2])
    blocks = [slice(start, min(m, start + step)) for start in range(0, m, step)]
    return torch.cat([prior[..., one, one].to_dense().diagonal(dim1=-2, dim2=-1) for one in blocks], dim=-1)
