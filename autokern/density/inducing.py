"""The collapsed bound of sparse Gaussian process regression with inducing points, in closed form.

The bound is that of Titsias (2009, "Variational learning of inducing variables in sparse Gaussian processes", eq. 9):
the log density under the covariance ``Q + s I`` with ``Q = Kxz Kzz^-1 Kzx``, less ``tr(Kxx - Q) / 2s``. With
``A = L^-1 Kzx``, where L is the factor of ``Kzz``, all matrices but ``Kzx``, A and the gradient by ``Kzx`` are small.

Where ``Kzz`` is nearly singular, rounding decides whether the library adds jitter. The library's jitter is then added;
its factor is only taken if there is no other, since it rounds the points of ``Kzz`` and of ``Kzx`` alike.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from gpytorch.kernels import InducingPointKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import InducingPointKernelAddedLossTerm
from linear_operator import settings, to_dense
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    DenseLinearOperator,
    LowRankRootAddedDiagLinearOperator,
    LowRankRootLinearOperator,
    MatmulLinearOperator,
    SumLinearOperator,
)

from autokern.core.errors import caught
from autokern.core.state import inside
from autokern.density import matrices
from autokern.density.exact_objective import Single
from autokern.kernels.array_distances import arranged
from autokern.kernels.array_parts import Array
from autokern.model import memoized
from autokern.model.arrays import Inspected, UnreadError
from autokern.model.kernel_parts import called
from autokern.model.libraries import psd_safe_cholesky
from autokern.model.other_parts import Values

_NAME = "inducing_point_loss_term"
_OPERATORS = (
    ConstantDiagLinearOperator, DenseLinearOperator, LowRankRootAddedDiagLinearOperator, LowRankRootLinearOperator,
    MatmulLinearOperator, SumLinearOperator,
)  # fmt: skip
"""The library's operators of which its bound consists."""
_STEPPED = {"categorical", "constant", "index"}  # families whose derivatives by the points the library does not define
_CLEAR = {torch.float64: 1e-7, torch.float32: 1e-3}
_USABLE = 64
"""Least squared pivots of a factor, as shares of the largest variance: such that rounding does not decide whether the
library adds jitter, and, in units of rounding, such that the factor is more than rounding."""


class Collapsed(Single):
    """A model with inducing points; the points ``(n, 2 d)`` are centred and raw ones side by side."""

    def __init__(self, seen: Inspected, kernel: Any, beside: Callable[[], tuple[Any, ...]]) -> None:
        """Read an `InducingPointKernel`; `beside` returns the further arguments of `Single`."""
        part = called(seen, seen.module(kernel, "base_kernel"), np.arange(seen.dims))
        noise, terms, mean, density = beside()
        points: Any = kernel._parameters.get("inducing_points")
        likelihood = seen.module(kernel, "likelihood")
        alone = noise is None or density is not matrices.density or points is None or not len(points)
        if alone or seen.batch or type(likelihood) is not GaussianLikelihood or [*kernel._added_loss_terms] != [_NAME]:
            raise UnreadError("inducing points of a batch, of another likelihood, or none")
        if (bounds := seen.module(kernel, "inducing_points_constraint")) is not None and bounds.enforced:
            raise UnreadError("a constraint with a transform, which the library does not apply to inducing points")
        if _STEPPED.issuperset(seen.families):
            raise UnreadError("a kernel without derivatives by its points")
        seen.relies(InducingPointKernelAddedLossTerm, *_OPERATORS)
        seen.adding, seen.raw, self._dims = kernel, True, seen.dims
        if not seen.attribute(kernel, "training"):
            raise UnreadError("inducing points in evaluation mode")
        self._of, self._dtype = weakref.ref(kernel), seen.dtype
        self._count = len(points)
        self._inducing = seen.parameter(kernel, "inducing_points", (self._count, seen.dims))
        super().__init__(part, noise, terms, mean, density)

    def evaluate(self, scale: float, by_x: Array | None = None, graded: bool = True) -> Any:
        """Return what `Single.evaluate` returns, after the library's warning if its factor has jitter."""
        self._unsure = list[torch.Tensor]()
        found = super().evaluate(scale, by_x, graded)
        if found is None or not self._unsure:
            return found
        try:
            psd_safe_cholesky(*self._unsure)  # warns, but only in a step that the library does not repeat
        except caught(Exception):
            return None
        return found

    def _density_of(self, scale: float, by_x: Array | None, graded: bool) -> Any:
        x, d, values = self._x, self._dims, self._inducing.value
        if x.ndim != 2:
            return None
        z = np.concatenate((values - (x[:1, d:] - x[:1, :d]), values), -1)
        kzx, of_zx = self._kernel.evaluate(z, x)
        kzz, of_zz = self._kernel.evaluate(arranged(values, raw=True))  # which may be far from the points
        kxx, of_xx = self._kernel.evaluate(x[:, None])
        lower = self._factor(torch.from_numpy(kzz))
        if lower is None:
            return None
        of_noise = cast("Values", self._noise)
        noise, n, eye = float(of_noise.value()), len(x), torch.eye(self._count, dtype=torch.float64)
        residual = torch.from_numpy(np.ascontiguousarray(self._targets, np.float64))
        whitening = torch.linalg.solve_triangular(lower, eye, upper=False)  # as in the library
        a = whitening @ torch.from_numpy(kzx)
        inner = (a @ a.mT).div_(noise)
        capacitance = inner + eye
        root, info = torch.linalg.cholesky_ex(capacitance)
        if info.item():
            return None
        weights = torch.cholesky_solve((a @ residual)[:, None], root)[:, 0]
        alpha = (residual - (a.mT @ weights).div_(noise)).div_(noise)
        left_out = float(kxx.sum()) - noise * float(inner.trace())
        logdet = 2.0 * float(root.diagonal().log().sum()) + n * (math.log(noise) + matrices.LOG_2_PI)
        self.by_residual = alpha.numpy() * -scale
        if graded:
            inverse, across = torch.cholesky_inverse(root), a @ alpha
            half = whitening.mT @ torch.cat(((eye - inverse).div_(noise), across[:, None]), 1)
            by_zx = torch.outer(half[:, -1], alpha).addmm_(half[:, :-1], a).mul_(scale)
            core = torch.outer(across, across).add_(capacitance).add_(inverse).sub_(eye, alpha=2.0)
            by_zz = (whitening.mT @ core @ whitening).mul_(-0.5 * scale)
            by_z = np.zeros_like(z)
            self._kernel.backward(of_zx, by_zx.numpy(), by_z)
            self._kernel.backward(of_zz, by_zz.numpy(), by_z)
            self._kernel.backward(of_xx, np.full((n, 1, 1), -0.5 * scale / noise))
            self._inducing.accumulate(by_z[:, :d] + by_z[:, d:])
            trace = (n - self._count + float(inverse.trace())) / noise
            slope = 0.5 * (float(alpha @ alpha) - trace + left_out / noise**2)
            self.by_noise = np.array(slope * scale)
            of_noise.backward(self.by_noise)
        return -0.5 * (float(residual @ alpha) + logdet + left_out / noise)

    def _factor(self, kzz: torch.Tensor) -> torch.Tensor | None:
        """Return the lower factor of the covariance of the inducing points, None if stock must run."""
        lower, info = torch.linalg.cholesky_ex(kzz)
        if not info.item() and _least(lower, kzz) > _CLEAR[self._dtype]:
            return lower
        of: Any = self._of()
        kernel, z, jitter = of.base_kernel, of.inducing_points, 0.0
        try:
            with torch.enable_grad(), inside.having(active=True):  # the formula depends on required gradients
                own = z if kernel.active_dims is None else z.index_select(-1, kernel.active_dims)
                theirs = to_dense(kernel.forward(own, own)).detach()
            lower, info = torch.linalg.cholesky_ex(theirs)
            if info.item():
                self._unsure.append(theirs)
                lower, jitter = _jittered(theirs)
            elif _least(lower, theirs) < _USABLE * torch.finfo(theirs.dtype).eps:
                return None
        except caught(Exception):
            return None
        if lower is not None:  # since `kzx` does not share the rounding of `theirs`
            kzz.diagonal().add_(jitter)
            exact, info = torch.linalg.cholesky_ex(kzz)
            lower = lower if info.item() else exact
        return None if lower is None else lower.double()


def _jittered(matrix: torch.Tensor) -> tuple[Any, float]:
    """Return the factor that the library finds by adding jitter to a matrix, None if it finds none, and the jitter."""
    if settings.trace_mode.on():
        return None, 0.0
    info, matrix, before = torch.ones((), dtype=torch.int32), matrix.clone(), 0.0
    for power in range(settings.cholesky_max_tries.value()):
        jitter = settings.cholesky_jitter.value(matrix.dtype) * 10**power
        matrix.diagonal().add_((info > 0) * (jitter - before))  # of the default dtype, as in the library
        before = jitter
        lower, info = torch.linalg.cholesky_ex(matrix)
        if not info.item():
            return lower, jitter
    return None, 0.0


def _least(lower: torch.Tensor, matrix: torch.Tensor) -> float:
    return lower.diagonal().min().item() ** 2 / matrix.diagonal().max().item()


class _Deferred(InducingPointKernelAddedLossTerm):  # type: ignore[misc]
    """The loss that a step has added to its kernel; the library computes it when it is read."""

    def __init__(self, lazy: Any, likelihood: Any) -> None:
        self.likelihood, self._lazy = likelihood, memoized.apart(lazy)

    def __getattr__(self, name: str) -> Any:
        if name not in ("prior_dist", "variational_dist"):
            raise AttributeError(name)
        lazy = self._lazy
        kernel = memoized.earlier(lazy)
        with torch.set_grad_enabled(lazy._is_grad_enabled):
            memoized.by_kernel(kernel, lazy).evaluate_kernel()
        found = kernel._added_loss_terms[_NAME]
        self.__dict__.update(prior_dist=found.prior_dist, variational_dist=found.variational_dist)
        self.__dict__.pop("_lazy", None)
        self.__class__ = InducingPointKernelAddedLossTerm
        return self.__dict__[name]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _ = self.prior_dist  # which makes it the library's
        return object.__reduce_ex__(self, protocol)


def add_loss(kernel: Any, lazy: Any) -> None:
    """Leave the loss of a step, whose covariance remembers its values, in the kernel of inducing points."""
    kernel.update_added_loss_term(_NAME, _Deferred(lazy, kernel.likelihood))


class _Quiet(InducingPointKernel):  # type: ignore[misc]
    """One that computes again what a step has computed, without its warnings."""

    @property
    def _inducing_inv_root(self) -> torch.Tensor:
        matrix = self._inducing_mat
        lower, info = torch.linalg.cholesky_ex(matrix)
        lower = _jittered(matrix)[0] if info.item() else lower
        if lower is None:
            return cast("torch.Tensor", InducingPointKernel._inducing_inv_root.fget(self))
        eye = torch.eye(len(lower), device=lower.device, dtype=lower.dtype)
        return torch.linalg.solve_triangular(lower.mT, eye, upper=True)


memoized.AGAIN[InducingPointKernel] = _Quiet


@contextlib.contextmanager
def again(kernel: Any, lazy: Any) -> Iterator[Any]:
    """Return the covariance of a step, computed anew, with its loss in the kernel until the end of the block."""
    own, added = memoized.frozen(kernel, lambda tensor: tensor), kernel._added_loss_terms
    own.training, own.__class__ = True, _Quiet
    found, before = memoized.by_kernel(own, lazy), added[_NAME]
    found.evaluate_kernel()
    added[_NAME] = own._added_loss_terms[_NAME]
    try:
        yield found
    finally:
        added[_NAME] = before
