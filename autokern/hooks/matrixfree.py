"""Matrix-free models: a `MatrixFreeKernelOperator` may replace a kernel matrix when it is evaluated.

It does where the dense matrix does not fit the memory, where the chosen candidate forms no matrix, where the user
forces `kernel_matmul` to a candidate other than stock, and for gpytorch's KeOps kernels. The whole kernel tree becomes
one operator: the library approximates a product of two operators by roots.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.kernels.keops.keops_kernel import KeOpsKernel
from gpytorch.settings import use_keops
from linear_operator import settings as library
from linear_operator.operators import DenseLinearOperator, InterpolatedLinearOperator, LinearOperator

from autokern.core.errors import unless_it_fails
from autokern.core.registry import get
from autokern.core.state import inside
from autokern.hooks.bypass import stay_out, trivial
from autokern.hooks.install import hook, stock_of
from autokern.hooks.kernel_operator import MatrixFreeKernelOperator, matrix_free
from autokern.kernels import tree as trees
from autokern.model import footprint
from autokern.model.library_orders import EXACT, ITERATIVE, SOLVE, is_default_size, regime
from autokern.model.relied import MEMORY
from autokern.runtime import dispatch
from autokern.system import memory

_FACTORISED = 4
"""Matrices that a prediction by factorisation holds at its peak: kernel, noisy matrix, factor, and a solution."""
_ITERATED = 2**14
"""Number of points from which iterations take a tenth of a factorisation's time for a mean."""


def instead_of_dense(lazy: Any, large: bool) -> MatrixFreeKernelOperator | None:
    """Return the operator that replaces a kernel matrix, None to form it; `large` matrices may not fit the memory."""
    kernel, x1, x2 = lazy.kernel, lazy.x1, lazy.x2
    keops, ordered = _has_keops(kernel), dispatch.forced("kernel_matmul") not in (None, "stock")
    if not (keops or ordered or inside.formless or large) or lazy.last_dim_is_batch or not trivial(lazy.params):
        return None
    if not _known(kernel, x1, x2):
        return None
    if keops:
        wanted = use_keops.on() and is_default_size(library.max_cholesky_size.value())
    else:
        wanted = ordered or (_iterates(lazy) and (inside.formless or (large and not _fits(lazy))))
    return matrix_free(kernel, x1, x1 if _same(x1, x2) else x2) if wanted else None


def too_large(lazy: Any) -> bool:
    """Whether a training covariance is too large to be factorised, and the library would iterate."""
    need = _FACTORISED * lazy.shape.numel() * lazy.dtype.itemsize
    if need < memory.LARGE or lazy.last_dim_is_batch or not trivial(lazy.params):
        return False
    if not _known(lazy.kernel, lazy.x1, lazy.x2) or not _iterates(lazy):
        return False
    return not memory.fits(need, lazy.device)


@unless_it_fails
def is_iterated(lazy: Any, large: bool) -> bool:
    """Whether solves with a training covariance iterate without its matrix: it is `large`, or has many points."""
    n = lazy.shape[-1]
    if n < _ITERATED and not large:
        return False
    if lazy.x1.dim() > 2 or lazy.x1.device.type != "cpu" or lazy.last_dim_is_batch or not trivial(lazy.params):
        return False
    return regime(n, SOLVE) == ITERATIVE and _known(lazy.kernel, lazy.x1, lazy.x2)


def _has_keops(kernel: Any) -> bool:
    if isinstance(kernel, KeOpsKernel):
        return True
    return any(isinstance(part, Kernel) and _has_keops(part) for part in kernel.__dict__["_modules"].values())


def _iterates(lazy: Any) -> bool:
    """Whether the library only multiplies by this matrix and does not factorise it."""
    n, m = lazy.shape[-2:]
    return n != m or regime(n) != EXACT


def _fits(lazy: Any) -> bool:
    """Whether the matrix fits the memory, with two more for the backward pass if gradients are needed."""
    need = footprint.of_dense(lazy).peak
    if torch.is_grad_enabled() and any(t.requires_grad for t in (lazy.x1, lazy.x2, *lazy.kernel.parameters())):
        need += 2
    return memory.fits(int(need * lazy.shape.numel()) * lazy.dtype.itemsize, lazy.device)


def _same(x1: torch.Tensor, x2: torch.Tensor) -> bool:
    """Whether two tensors are the same for values and for autograd."""
    if x1 is x2:
        return True
    plain = not (x1.requires_grad or x2.requires_grad)
    return plain and x1.shape == x2.shape and x1.data_ptr() == x2.data_ptr() and x1.stride() == x2.stride()


def _known(kernel: Any, x1: torch.Tensor, x2: torch.Tensor) -> bool:
    """Whether the op `kernel_matmul` supports this kernel at these points."""
    node = trees.form(kernel, keops=True)
    if node is None or not trees.leaves(node):
        return False
    return get("kernel_matmul").problem_of(kernel, x1, x2, x2[..., :1]) is not None


_stock_mul_matrix = stock_of(LinearOperator, "_mul_matrix")


@hook(LinearOperator, "_mul_matrix", relies=MEMORY)
def _mul_matrix(self: Any, other: Any) -> Any:
    """Multiply matrix-free operators and tables of task covariances element by element without approximation."""
    if stay_out():
        return _stock_mul_matrix(self, other)
    one, two = self.evaluate_kernel(), other.evaluate_kernel()
    if isinstance(one, MatrixFreeKernelOperator):
        return one._mul_matrix(two)
    if isinstance(two, MatrixFreeKernelOperator):
        return two._mul_matrix(one)
    if one.__class__ is DenseLinearOperator and (entries := _looked_up(two)) is not None:
        return DenseLinearOperator(one.tensor * entries)
    if two.__class__ is DenseLinearOperator and (entries := _looked_up(one)) is not None:
        return DenseLinearOperator(entries * two.tensor)
    return _stock_mul_matrix(one, two)


def _looked_up(operator: Any) -> torch.Tensor | None:
    """Return the exact matrix of an operator that looks up entries of a table (task covariances), else None."""
    if operator.__class__ is not InterpolatedLinearOperator:
        return None
    base, left, right = operator.base_linear_op, operator.left_interp_indices, operator.right_interp_indices
    table = base.tensor if base.__class__ is DenseLinearOperator else None
    if type(table) is not torch.Tensor or table.dim() != 2 or not table.is_cpu:
        return None
    if left.dim() != 2 or left.shape[1] != 1 or right.dim() != 2 or right.shape[1] != 1:
        return None
    weights = operator.left_interp_values, operator.right_interp_values
    if any(w.requires_grad or bool((w != 1).any()) for w in weights):
        return None
    try:
        return table.index_select(0, left[:, 0]).index_select(1, right[:, 0])
    except (IndexError, RuntimeError):  # stock raises its own error for an invalid index
        return None
