"""The covariance matrix of a kernel tree as an operator that is multiplied tile by tile and formed only on request.

linear_operator takes operators apart into tensors and rebuilds them inside its autograd functions. So this operator
consists of tensors (embedded points, shapes, weights) and plain values, without closures. Products go through the op
`kernel_matmul`.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from gpytorch.kernels import Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator.operators import DenseLinearOperator, KernelLinearOperator, LinearOperator
from linear_operator.utils.memoize import cached

from autokern.core.autograd import plain_gradients
from autokern.kernels import embedded as forms
from autokern.kernels import matmul as products
from autokern.kernels import tree as trees
from autokern.kernels.embedded import Embedded
from autokern.kernels.matrix import matrix
from autokern.kernels.tiles import usual
from autokern.kernels.tree import Node
from autokern.runtime.dispatch import route

_dispatch = route("kernel_matmul")


def _covariance(x1: torch.Tensor, x2: torch.Tensor, node: Any, widths: Any, same: bool, **more: torch.Tensor) -> Any:
    """Return the dense matrix of embedded points."""
    kernel = _embedded(node, widths, more)
    tree = forms.read(kernel, x1)
    if x1.shape[-2] == x2.shape[-2] == 1:  # pairs of points, for entries and diagonals
        return trees.dense(tree, forms.read(kernel, x2).points)
    return matrix(tree, None if same else forms.read(kernel, x2).points, same, "again")


def _embedded(node: Any, widths: Any, more: dict[str, torch.Tensor]) -> Embedded:
    counts = {kind: sum(name.startswith(kind) for name in more) for kind in ("shape_", "weight_")}
    return Embedded(node, widths, *(tuple(more[f"{kind}{i}"] for i in range(n)) for kind, n in counts.items()))


def _named(of: Any) -> dict[str, torch.Tensor]:
    kinds = ("shape", of.shapes), ("weight", of.weights)
    return {f"{kind}_{i}": t for kind, tensors in kinds for i, t in enumerate(tensors)}


def matrix_free(kernel: Kernel, x1: torch.Tensor, x2: torch.Tensor) -> MatrixFreeKernelOperator:
    """Return the covariance of points that have the kernel's active dimensions only; x1 may be x2."""
    same = x1 is x2
    return _operator(*forms.embed(kernel, x1, None if same else x2), same)


def _operator(embedded: Embedded, first: torch.Tensor, second: torch.Tensor, same: bool) -> MatrixFreeKernelOperator:
    named, plain = _named(embedded), {"node": embedded.node, "widths": embedded.widths, "same": same}
    without = {name: 0 for name in named if name.startswith("weight_")}
    how = {"covar_func": _covariance, "num_nonbatch_dimensions": without}
    return MatrixFreeKernelOperator(first, second, **how, **plain, **named)


class MatrixFreeKernelOperator(KernelLinearOperator):  # type: ignore[misc]
    """The covariance matrix of two sets of points, ``(..., n, m)``; created by `matrix_free`.

    `x1` and `x2` concatenate the embedded points of all leaves, and `covar_func` is always `_covariance`. `params`
    holds the tree, the widths of its leaves, and whether both sets are the same.
    """

    @property
    def _kernel(self) -> Embedded:
        return _embedded(self.nontensor_params["node"], self.nontensor_params["widths"], self.tensor_params)

    @property
    def _same(self) -> bool:
        return bool(self.nontensor_params["same"])

    def _matmul(self, rhs: torch.Tensor) -> torch.Tensor:
        columns = rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs
        out: torch.Tensor = _dispatch(self._kernel, self.x1, self.x1 if self._same else self.x2, columns)
        return out.squeeze(-1) if rhs.dim() == 1 else out

    def _transpose_nonbatch(self) -> LinearOperator:
        return self if self._same else super()._transpose_nonbatch()

    def _bilinear_derivative(
        self, left_vecs: torch.Tensor, right_vecs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of ``sum(left * (K right))`` by this operator's tensors, computed tile by tile."""
        left, right = (t.unsqueeze(-1) if t.dim() == 1 else t for t in (left_vecs, right_vecs))
        if torch.is_grad_enabled():  # these will be differentiated
            tensors, made = self.representation(), self.representation_tree()
            product = lambda *own: made(*own).covar_mat @ right  # noqa: E731
            return tuple(plain_gradients(product, tensors, [t.requires_grad for t in tensors], left))
        others = None if self._same else forms.read(self._kernel, self.x2).points
        by, by_others = products.matmul_gradients(
            forms.read(self._kernel, self.x1), others, left, right, usual(self.device)
        )
        x2 = None if by_others is None else torch.cat(by_others, -1)
        named = _named(by)
        return torch.cat(by.points, -1), x2, *(named[name] for name in self._differentiable_kwargs)

    def _mul_matrix(self, other: Any) -> LinearOperator:
        """Multiply element by element, where the library would multiply roots of a low rank."""
        other = other.evaluate_kernel()
        if not isinstance(other, MatrixFreeKernelOperator):
            return DenseLinearOperator(self.to_dense() * other.to_dense())
        one, two = self._kernel, other._kernel
        lead = torch.broadcast_shapes(self.batch_shape, other.batch_shape)  # type: ignore[no-untyped-call]
        first, second = (
            torch.cat([z.expand(*lead, *z.shape[-2:]) for z in pair], -1)
            for pair in ((self.x1, other.x1), (self.x2, other.x2))
        )
        node = Node("product", children=(one.node, two.node))
        both = Embedded(node, (*one.widths, *two.widths), (*one.shapes, *two.shapes), (*one.weights, *two.weights))
        return _operator(both, first, second, self._same and other._same)

    @cached  # type: ignore[untyped-decorator]
    def to_dense(self) -> torch.Tensor:
        """Return the dense matrix."""
        return cast("torch.Tensor", self.covar_mat)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        found = super()._getitem(row_index, col_index, *batch_indices)
        same = self._same and _equal_indices(row_index, col_index)
        return found if same == self._same else _operator(found._kernel, found.x1, found.x2, False)

    def __reduce__(self) -> Any:
        """Pickle as a `LazyEvaluatedKernelTensor` of the embedded points, which loads without autokern."""
        x1 = self.x1.detach()
        x2 = x1 if self._same else self.x2.detach()
        return LazyEvaluatedKernelTensor, (x1, x2, forms.plain(self._kernel, x1.dtype))

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearOperator:
        return cast("LinearOperator", self.representation_tree()(*copy.deepcopy(self.representation(), memo)))


def _equal_indices(one: Any, other: Any) -> bool:
    if isinstance(one, slice) or isinstance(other, slice):
        return isinstance(one, slice) and isinstance(other, slice) and one == other
    return one is other or (torch.is_tensor(one) and torch.is_tensor(other) and torch.equal(one, other))
