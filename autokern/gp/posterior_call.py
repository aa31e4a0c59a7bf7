"""One evaluation of a posterior by arrays (`gp.posterior`), and its derivatives."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from autokern.core.autograd import SPENT, Unsaved, each_cotangent, has_duals, keeps_graph, plain_gradients
from autokern.gp.looked_up import Wanted
from autokern.gp.mirrors import placed
from autokern.gp.parameters import Parameter
from autokern.gp.small import Array
from autokern.system.blas import one_thread

__all__ = ["Apart", "Call", "Pair"]

_LARGE = 2**18
"""Multiplications of the largest product from which on OpenBLAS would use its threads."""
_AS_THEY_ARE = contextlib.nullcontext()
Pair = tuple[torch.Tensor, torch.Tensor]
Apart = tuple[list[Parameter], list[Parameter]]
"""Hyperparameters of the mean, and of the kernel."""


class Call:
    """One evaluation, and what its backward passes need."""

    def __init__(self, of: Any, x: torch.Tensor, wanted: Apart) -> None:
        self.of, self.m, self._shape = of, x.shape[-2], x.shape
        self._lead, self._shared = x.shape[: max(0, x.dim() - 2 - len(of.batch))], of.own(x).numel() == 1
        self._unsaved = Unsaved(x, *(p.tensor for p in of.parameters))
        self._constants, self._graded = wanted
        large = x.numel() // x.shape[-1] * of.key[1] ** 2 > _LARGE
        self.threads: Any = one_thread if large else _AS_THEY_ARE

    def evaluate(self, x: torch.Tensor) -> Pair | None:
        """Return mean and covariance, which the call does not keep; None if there is a number that is none."""
        of = self.of
        with np.errstate(all="ignore"), self.threads:
            points, d = np.asarray(x.detach().cpu().numpy(), np.float64), self._shape[-1]
            stacked = points.reshape(1, -1, d) if self._shared else self._by_model(points, 2).reshape(of.key[0], -1, d)
            self._points = stacked if of.tasks is None else of.tasks.mapped(stacked)
            if self._points is None:
                return None
            cross, own, self._kept = of.kernel.evaluate(self._points, self.m)
            k, _, n = self._shape_of_cross = cross.shape
            white = self._white = (cross @ of.inverse.swapaxes(-1, -2)).reshape(k, -1, self.m, n)
            mean = cross @ of.weights
            of.mean.add(self._points, mean)
            mean = mean.reshape(k, -1, self.m)
            if self.m == 1:
                covariance = own - np.einsum("kbmn,kbmn->kbm", white, white)[..., None]
            else:
                covariance = own - white @ white.swapaxes(-1, -2)
            if not math.isfinite(np.add.reduce(mean, axis=None) + np.add.reduce(covariance, axis=None)):
                return None
        pair = placed([self._unstacked(mean), self._unstacked(covariance)], of.device)
        return cast("Pair", tuple(pair))

    def node(self, x: torch.Tensor, tokens: Sequence[torch.Tensor | None], found: Pair) -> Pair:
        """Return mean and covariance as functions of points and of the vectors of hyperparameters."""
        return cast("Pair", _Predicted.apply(x, *tokens, self, found))

    def _unstacked(self, values: Array) -> torch.Tensor:
        """Return values ``(k, b, ...)`` in the model's dtype, its batch after the other batch dimensions."""
        apart = np.moveaxis(values.reshape(len(values), *self._lead, *values.shape[2:]), 0, len(self._lead))
        return self._tensor(apart.reshape(*self._lead, *self.of.batch, *values.shape[2:]))

    def _tensor(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.float32 if self.of.dtype is torch.float32 else None))

    def _by_model(self, values: Array, own: int) -> Array:
        """Return values whose last `own` axes are those of a set with one axis for the models in front."""
        shape = values.shape[values.ndim - own :]
        return np.moveaxis(values.reshape(*self._lead, -1, *shape), len(self._lead), 0)

    def _stacked(self, values: torch.Tensor, own: int) -> Array:
        """Return values whose last `own` axes are those of a set as ``(k, b, ...)``."""
        like = {"dtype": values.dtype, "device": "cpu"}
        plain = torch.zeros(values.shape, **like) if values._is_zerotensor() else values.detach()  # type: ignore[call-overload]
        array = self._by_model(np.asarray(plain.resolve_neg().cpu().numpy(), np.float64), own)
        return array.reshape(self._shape_of_cross[0], -1, *array.shape[array.ndim - own :])

    def backward(self, by_mean: Any, by_covariance: Any, points: bool, constant: bool, graded: bool) -> list[Any]:
        """Return the derivatives by points, constant of the mean, and kernel: None for those that are not wanted."""
        of, m = self.of, self.m
        if of.lock.entered():
            return self.differentiable(by_mean, by_covariance, points, constant, graded)
        k, total, n = self._shape_of_cross
        if by_covariance is None:
            h, g = np.zeros((k, total // m, m, m)), np.zeros((k, total, n))
        else:
            h = self._stacked(by_covariance, 2)
            g = ((h + h.swapaxes(-1, -2)) @ self._white).reshape(k, total, n) @ of.inverse
            np.negative(g, out=g)
        by_constant = None
        if by_mean is not None:
            slopes = self._stacked(by_mean, 1).reshape(k, total, 1)
            g += slopes * of.weights.swapaxes(-1, -2)
            if constant:
                with of.lock.here():
                    by_constant = self._slopes(self._constants, of.mean.backward, self._points, slopes)
        found = np.zeros((k, total, self._shape[-1])) if points else None
        if not graded:
            of.kernel.backward(self._kept, g, h, Wanted(found, by_parameters=False))
            return placed([self._as_points(found), by_constant, None], of.device)
        with of.lock.here():
            wanted = Wanted(found, by_parameters=True)
            joined = self._slopes(self._graded, of.kernel.backward, self._kept, g, h, wanted)
        return placed([self._as_points(found), by_constant, joined], of.device)

    def _slopes(self, by: list[Parameter], backward: Callable[..., None], *args: Any) -> torch.Tensor:
        """Return the derivatives by some parameters that a function adds to theirs."""
        for parameter in self.of.parameters:
            parameter.by_value.fill(0.0)
        backward(*args)
        return torch.cat([p.gradient().reshape(-1) for p in by])

    def _as_points(self, values: Array | None) -> torch.Tensor | None:
        """Return a derivative by stacked points as one by the points of the caller."""
        if values is None:
            return None
        if self._shared:
            return self._tensor((values[0] if len(values) == 1 else values.sum(0)).reshape(self._shape))
        return self._unstacked(values.reshape(len(values), -1, *self._shape[-2:]))

    def differentiable(self, by_mean: Any, by_covariance: Any, points: bool, constant: bool, graded: bool) -> list[Any]:
        """Return the same as functions of points, hyperparameters and cotangents, by the model's own modules."""
        inputs, cotangents = self._unsaved.unchanged(), [g for g in (by_mean, by_covariance) if g is not None]
        of = self.of

        def outs(x: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
            both = zip(of.formula(x, values), (by_mean, by_covariance), strict=True)
            return [out for out, grad in both if grad is not None]

        of_mean = self._constants if constant and by_mean is not None else []
        of_kernel = self._graded if graded else []
        wanted = [p in of_mean or p in of_kernel for p in of.parameters]
        by_points, *slopes = plain_gradients(outs, inputs, [points, *wanted], cotangents)
        found = {id(p): slope.reshape(-1) for p, slope in zip(of.parameters, slopes, strict=True) if slope is not None}
        both = [torch.cat([found[id(p)] for p in each]) if each else None for each in (of_mean, of_kernel)]
        return [by_points, *both]


class _Predicted(torch.autograd.Function):
    """Mean and covariance as functions of points, of the constant of the mean, and of the kernel's hyperparameters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, constant: Any, token: Any, call: Call, found: Pair) -> Pair:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.nodes = call, [None if t is None else t.grad_fn for t in (constant, token)]
        return found

    @staticmethod
    def backward(ctx: Any, by_mean: Any, by_covariance: Any) -> Any:
        call = ctx.call
        if call is None:
            raise RuntimeError(SPENT)
        constant, graded = (node is not None and _runs(node) for node in ctx.nodes)
        # the constant's derivative needs nothing of the call, and stock's keeps all else
        spent = (graded or not constant) and not keeps_graph()
        found = _slopes((call, ctx.needs_input_grad[0], constant, graded), by_mean, by_covariance)
        if spent:
            ctx.call = None
        return found


@each_cotangent
def _slopes(of: tuple[Call, bool, bool, bool], by_mean: Any, by_covariance: Any) -> Any:
    if by_mean is None and by_covariance is None:
        return None, None, None, None, None
    call, *wanted = of
    compute = call.differentiable if torch.is_grad_enabled() or has_duals() else call.backward
    with np.errstate(all="ignore"), call.threads:
        return *compute(by_mean, by_covariance, *wanted), None, None


def _runs(node: Any) -> bool:
    """Whether the present backward pass wants what this node computes."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # called without the engine
        return True
