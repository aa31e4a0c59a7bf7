"""Guards before the calls that allocate most, and matrix-free models: a result that cannot fit is replaced or refused.

Without a guard, a matrix that is too large is filled page by page until the system kills the process. A guard reads the
available memory only where it predicts `memory.LARGE` bytes or more. Its prediction is a lower bound: unknown parts
count zero, and kernels count as the candidate of `kernel_matrix` with the least memory. The counts of matrices follow
the libraries' code and were measured by ``calibration/memory.py``.

A `MatrixFreeKernelOperator` replaces a kernel matrix where the dense matrix does not fit the memory, where the chosen
candidate forms no matrix, where the user forces `kernel_matmul` to a candidate other than stock, and for gpytorch's
KeOps kernels. The whole kernel tree becomes one operator: the library approximates a product of two operators by roots.
The hook of `evaluate_kernel` also restores the active dimensions of a kernel that raises; stock loses them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, ScaleKernel, SpectralMixtureKernel
from gpytorch.kernels.keops import keops_kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.settings import use_keops
from linear_operator import operators
from linear_operator import settings as library
from linear_operator.utils.memoize import add_to_cache

from autokern.core.errors import caught, unless_it_fails
from autokern.core.registry import get
from autokern.core.releases.known import full_name, relied
from autokern.core.state import inside
from autokern.hooks import later
from autokern.hooks.bypass import stay_out
from autokern.hooks.install import hook, stock_of
from autokern.hooks.kernel_operator import MatrixFreeKernelOperator, matrix_free
from autokern.kernels import tree as trees
from autokern.kernels.family import family
from autokern.model import memoized
from autokern.model.libraries import EXACT, ITERATIVE, MEMORY, SOLVE, is_default_size, regime
from autokern.model.marginal import trivial
from autokern.runtime import dispatch
from autokern.system import memory

_FACTORISED = 4
"""Matrices that a prediction by factorisation holds at its peak: kernel, noisy matrix, factor, and a solution."""
_ITERATED = 2**14  # number of points from which iterations take a tenth of a factorisation's time for a mean
_stock_evaluate_kernel = stock_of(LazyEvaluatedKernelTensor, "evaluate_kernel")


def too_large(lazy: Any) -> bool:
    """Whether a training covariance is too large to be factorised, and the library would iterate."""
    need = _FACTORISED * lazy.shape.numel() * lazy.dtype.itemsize
    if need < memory.LARGE or not _supported(lazy) or not _iterates(lazy):
        return False
    return not memory.fits(need, lazy.device)


def is_iterated(lazy: Any, large: bool) -> bool:
    """Whether solves with a training covariance iterate without its matrix: it is `large`, or has many points."""
    n = lazy.shape[-1]
    if (n < _ITERATED and not large) or lazy.x1.dim() > 2 or lazy.x1.device.type != "cpu":
        return False
    return regime(n, SOLVE) == ITERATIVE and _supported(lazy)


def _has_keops(kernel: Any) -> bool:
    if isinstance(kernel, keops_kernel.KeOpsKernel):
        return True
    parts = kernel.__dict__["_modules"].values()
    return any(isinstance(part, (Kernel, torch.nn.ModuleList)) and _has_keops(part) for part in parts)


def _iterates(lazy: Any) -> bool:
    """Whether the library only multiplies by this matrix and does not factorise it."""
    n, m = lazy.shape[-2:]
    return n != m or regime(n) != EXACT


def _fits(lazy: Any) -> bool:
    """Whether the matrix fits the memory, with two more for the backward pass if gradients are needed."""
    need = matrices_of(lazy).peak
    if torch.is_grad_enabled() and any(t.requires_grad for t in (lazy.x1, lazy.x2, *lazy.kernel.parameters())):
        need += 2
    return memory.fits(int(need * lazy.shape.numel()) * lazy.dtype.itemsize, lazy.device)


def _same(x1: torch.Tensor, x2: torch.Tensor) -> bool:
    """Whether two tensors are the same for values and for autograd."""
    if x1 is x2:
        return True
    plain = not (x1.requires_grad or x2.requires_grad)
    return plain and x1.shape == x2.shape and x1.data_ptr() == x2.data_ptr() and x1.stride() == x2.stride()


def _supported(lazy: Any) -> bool:
    """Whether the op `kernel_matmul` supports this kernel at these points."""
    if lazy.last_dim_is_batch or not trivial(lazy.params):
        return False
    node = trees.form(lazy.kernel, keops=True)
    if node is None or not trees.leaves(node):
        return False
    return get("kernel_matmul").problem_of(lazy.kernel, lazy.x1, lazy.x2, lazy.x2[..., :1]) is not None


_WORTH_A_LOOK = 2**17  # elements below which no guard is needed: `memory.LARGE` is 64 such matrices in double precision


@unless_it_fails
def needed(operator: Any) -> int:
    """Return a lower bound of the bytes for an operator's dense matrix, None if it cannot be read."""
    itemsize: int = operator.dtype.itemsize
    return int(matrices_of(operator).peak * operator.shape.numel()) * itemsize


def _guard(position: str, operator: Any) -> None:
    """Refuse to form an operator's dense matrix if it cannot fit; an operator that cannot be read is not refused."""
    if (need := needed(operator)) is not None:
        kernel = getattr(operator, "kernel", None)
        of, shape = type(operator if kernel is None else kernel).__name__, " x ".join(map(str, operator.shape))
        _refuse_beyond(need, f"{position} of {of}, {shape}", operator, kernel is not None)


def _refuse_beyond(need: int, asked: str, like: Any, of_kernel: bool) -> None:
    if not memory.fits(need, like.device):
        asked = f"{asked}, {like.dtype}, {like.device},"
        memory.refuse(asked, need, like.device, str(like.dtype), of_kernel)


_known = relied(
    (full_name(LazyEvaluatedKernelTensor, "evaluate_kernel"), _stock_evaluate_kernel), *MEMORY,
    "gpytorch.lazy.lazy_evaluated_kernel_tensor:LazyEvaluatedKernelTensor.__init__", "gpytorch.kernels.kernel:Kernel",
)  # fmt: skip


@hook(LazyEvaluatedKernelTensor, "evaluate_kernel", relies=None)
def _evaluate_kernel(self: Any) -> Any:
    """Replace the matrix by an operator where that is better, else guard; restore the kernel if it raises."""
    compiling = torch.compiler.is_compiling()  # a compiler cannot trace `_known.holds`
    if memoized.is_past(self) and (compiling or _known.holds()):
        return memoized.evaluate(self)
    if compiling or memoized.is_kept(self, "kernel_eval"):
        return _stock_evaluate_kernel(self)
    free, large = (None if stay_out() else _instead(self)) or (None, False)
    if free is not None and _known.holds():
        add_to_cache(self, "kernel_eval", free)
        return free
    if large and _known.holds():
        _guard("evaluate_kernel", self)
    kernel = self.kernel
    active = kernel.active_dims
    try:
        with inside.having(evaluated=True):
            return _stock_evaluate_kernel(self)
    except BaseException:
        kernel.active_dims = active
        raise


@unless_it_fails
def _instead(lazy: Any) -> tuple[Any, bool]:
    """Return the operator that replaces a kernel matrix (None to form it), and whether the matrix is large."""
    later.look()  # programs without exact models reach this hook first
    pairs = lazy.x1.shape[:-1].numel() * lazy.x2.shape[-2]
    large = pairs * math.prod(lazy.kernel._batch_shape) >= _WORTH_A_LOOK  # the shape may be a plain tuple
    keops, ordered = _has_keops(lazy.kernel), dispatch.in_force().forced("kernel_matmul") not in (None, "stock")
    if not (keops or ordered or inside.formless or large):
        return None, large
    with torch.set_grad_enabled(lazy._is_grad_enabled):
        if not _supported(lazy):
            return None, large
        if keops:
            wanted = use_keops.on() and is_default_size(library.max_cholesky_size.value())
        else:
            wanted = ordered or (_iterates(lazy) and (inside.formless or (large and not _fits(lazy))))
        x1, x2 = lazy.x1, lazy.x2
        return matrix_free(lazy.kernel, x1, x1 if _same(x1, x2) else x2) if wanted else None, large


def _is_small(self: Any, x1: Any, x2: Any, diag: bool = False, *rest: Any, **more: Any) -> bool:
    return diag or stay_out() or x1.numel() * x2.shape[-2] < _WORTH_A_LOOK


@hook(Kernel, "covar_dist", idle=_is_small)
def _covar_dist(self: Any, x1: Any, x2: Any, diag: bool = False, last_dim_is_batch: bool = False, **more: Any) -> Any:
    try:
        batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])  # type: ignore[no-untyped-call]
    except caught(RuntimeError):  # of mismatched shapes; the library raises its own error
        return _covar_dist.__wrapped__(self, x1, x2, diag=diag, last_dim_is_batch=last_dim_is_batch, **more)
    matrices = batch.numel() * (x1.shape[-1] if last_dim_is_batch else 1)
    need = matrices * x1.shape[-2] * x2.shape[-2] * x1.element_size()
    points = f"{x1.shape[-2]} x {x2.shape[-2]} points, {x1.shape[-1]} dimensions"
    _refuse_beyond(need, f"covar_dist of {type(self).__name__}, {points}", x1, of_kernel=True)
    return _covar_dist.__wrapped__(self, x1, x2, diag=diag, last_dim_is_batch=last_dim_is_batch, **more)


def _guard_dense(kind: type) -> None:
    """Put a guard before a class's `to_dense`."""
    stock = stock_of(kind, "to_dense")

    def idle(self: Any, *args: Any, **more: Any) -> bool:
        return stay_out() or memoized.is_kept(self, stock.__qualname__) or self.shape.numel() < _WORTH_A_LOOK

    @hook(kind, "to_dense", relies=MEMORY, idle=idle)
    def _to_dense(self: Any, *args: Any, **more: Any) -> Any:
        _guard("to_dense", self)
        return stock(self, *args, **more)


_HOLD = ("CholLinearOperator", "DenseLinearOperator", "SumBatchLinearOperator", "TriangularLinearOperator")
"""Classes whose `to_dense` allocates nothing before it calls a part's `to_dense`, which is guarded."""

for _kind in (MatrixFreeKernelOperator, *vars(operators).values()):
    if isinstance(_kind, type) and "to_dense" in vars(_kind) and _kind.__name__ not in _HOLD:
        _guard_dense(_kind)


class Matrices(NamedTuple):
    """Number of matrices that a computation allocates."""

    peak: float  # during the computation
    live: float  # after it: the result, and tensors that autograd keeps


_NOTHING = Matrices(0, 0)


def matrices_of(operator: Any) -> Matrices:
    """Return the matrices held while `to_dense` of an operator runs."""
    kind = type(operator)
    kept = memoized.names(operator)
    if "kernel_eval" in kept or any(name.endswith("to_dense") for name in kept):
        return _NOTHING
    if isinstance(operator, (operators.DiagLinearOperator, operators.IdentityLinearOperator)):
        return Matrices(1, 1)  # tested before triangular operators, which diagonal ones are, too
    if isinstance(operator, (operators.DenseLinearOperator, operators.TriangularLinearOperator)):
        return _NOTHING
    if kind is LazyEvaluatedKernelTensor:
        x1, x2 = operator.x1, operator.x2
        grad = operator._is_grad_enabled and operator.requires_grad
        d = 1 if operator.last_dim_is_batch else x1.shape[-1]
        return _of_kernel(operator.kernel, d, grad, keops_kernel._use_keops(x1, x2))
    if kind.to_dense is operators.SumLinearOperator.to_dense:
        peak = live = 0.0
        for number, part in enumerate(operator.linear_ops):
            inner = matrices_of(part)
            peak = max(peak, live + inner.peak, live + inner.live + 1)
            live += inner.live + (number == 0)
        return Matrices(peak, live)
    if kind is operators.ConstantMulLinearOperator:
        inner = matrices_of(operator.base_linear_op)
        return Matrices(max(inner.peak, inner.live + 1), inner.live + 1)
    return Matrices(2, 1) if kind.to_dense is operators.LinearOperator.to_dense else Matrices(1, 1)


def _of_kernel(kernel: Kernel, d: int, grad: bool, keops: bool) -> Matrices:
    """Return the matrices of a kernel with `d` active dimensions; `keops` says whether KeOps runs."""
    if (name := trees.family_name(kernel)) is not None:
        of = family(name)
        return Matrices(2, 2) if grad and of.shape is None and not of.slope_is_value else Matrices(1, 1)
    kind = type(kernel)
    if kind is ScaleKernel:
        inner = _of_kernel(kernel.base_kernel, d, grad, keops)
        return Matrices(max(inner.peak, inner.live + 1), inner.live + 1 if grad else 1) if inner.peak else _NOTHING
    if kind in (AdditiveKernel, ProductKernel):
        dimensions = [d if part.active_dims is None else len(part.active_dims) for part in kernel.kernels]
        parts = [_of_kernel(k, own, grad, keops) for k, own in zip(kernel.kernels, dimensions, strict=True)]
        return _combined(parts, grad, kind is ProductKernel)
    if kind is SpectralMixtureKernel:  # grids of all mixtures, points and dimensions
        grid = kernel.num_mixtures * d
        return Matrices(6 * grid + d, 5 * grid + d + 1) if grad else Matrices(4 * grid + d, 1)
    if isinstance(kernel, keops_kernel.KeOpsKernel) and not keops:  # all differences, and their squares
        return Matrices(2 * d, 1)
    return _NOTHING


def _combined(parts: list[Matrices], grad: bool, product: bool) -> Matrices:
    """Return the matrices of a sum or product that is evaluated part after part, with operands and results."""
    if _NOTHING in parts:  # a part stays lazy, so no dense sum is formed
        return Matrices(max(part.peak for part in parts), 0)
    (peak, live), kept = parts[0], _kept_of_sums(parts[0])
    for part in parts[1:]:
        peak = max(peak, live + part.peak, live + part.live + 1)
        kept += _kept_of_sums(part)
        live = (live + part.live + 1 if product else kept + 1) if grad else 1.0
    return Matrices(peak, live)


def _kept_of_sums(part: Matrices) -> float:
    """Return the matrices that autograd keeps for an operand of a sum, whose backward pass reads no operands."""
    return max(1.0, part.live - 1)
