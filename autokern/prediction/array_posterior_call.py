"""One evaluation of a `prediction.array_posterior.Posterior`, and its derivatives."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from autokern.core.autograd import SPENT, Unsaved, each_cotangent, has_duals, keeps_graph, plain_gradients
from autokern.kernels.array_parts import Array
from autokern.model.parameters import Parameter, placed
from autokern.system.threads import one_thread

_LARGE = 2**18  # multiplications of the largest product above which OpenBLAS would use threads
_AS_THEY_ARE = contextlib.nullcontext()
Pair = tuple[torch.Tensor, torch.Tensor]
Apart = tuple[list[Parameter], list[Parameter]]  # hyperparameters of the mean, and of the kernel


class Call:
    """One evaluation with the intermediate results for its backward passes."""

    def __init__(self, of: Any, x: torch.Tensor, wanted: Apart, solves: bool) -> None:
        self.of, self.m, self._shape, self._solves = of, x.shape[-2], x.shape, solves
        self._lead, self._shared = x.shape[: max(0, x.dim() - 2 - len(of.batch))], of.own(x).numel() == 1
        self._unsaved = Unsaved(x, *(p.tensor for p in of.parameters))
        self._constants, self._graded = wanted
        self.threads: Any = one_thread if x.numel() // x.shape[-1] * of.key[1] ** 2 > _LARGE else _AS_THEY_ARE

    def evaluate(self, x: torch.Tensor) -> Pair | None:
        """Return mean and covariance, without keeping them; None if a value is not finite or a task is unknown."""
        of = self.of
        with np.errstate(all="ignore"), self.threads:
            points, d = np.asarray(x.detach().cpu().numpy(), np.float64), self._shape[-1]
            stacked = points.reshape(1, -1, d) if self._shared else self._by_model(points, 2).reshape(of.key[0], -1, d)
            mapped = stacked if of.tasks is None else of.tasks.mapped(stacked)
            if mapped is None:
                return None
            self._points = mapped[:, None]  # ``(k, 1, sets * m, d)`` for k models
            z = of.laid(self._points)
            cross, kept = of.kernel.evaluate(z, of.train)
            one = of.alone if self.m == 1 else None
            sets = self._points.reshape(len(z), -1, self.m, self._points.shape[-1])
            own, own_kept = one or of.kernel.evaluate(of.laid(sets, centred=True))
            self._kept, n = (kept, own_kept), cross.shape[-1]
            cross = cross.reshape(-1, z.shape[-2], n)
            k, _, _ = self._shape_of_cross = cross.shape
            white = self._white = (cross @ of.inverse.swapaxes(-1, -2)).reshape(k, -1, self.m, n)
            mean = cross @ of.weights
            mean = (mean[:, None] + of.mean.value(self._points)).reshape(k, -1, self.m)
            if self.m == 1:
                covariance = own - np.einsum("kbmn,kbmn->kbm", white, white)[..., None]
            else:
                covariance = own - white @ white.swapaxes(-1, -2)
            if not math.isfinite(np.add.reduce(mean, axis=None) + np.add.reduce(covariance, axis=None)):
                return None
        return cast("Pair", tuple(placed([self._unstacked(mean), self._unstacked(covariance)], of.device)))

    def node(self, x: torch.Tensor, tokens: Sequence[torch.Tensor | None], found: Pair) -> Pair:
        """Return mean and covariance as functions of points and of the vectors of hyperparameters."""
        return cast("Pair", _Predicted.apply(x, *tokens, self, found))

    def _unstacked(self, values: Array) -> torch.Tensor:
        """Return values ``(models, sets, ...)`` as a tensor in the caller's batch dimensions."""
        apart = np.moveaxis(values.reshape(len(values), *self._lead, *values.shape[2:]), 0, len(self._lead))
        return self._tensor(apart.reshape(*self._lead, *self.of.batch, *values.shape[2:]))

    def _tensor(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.float32 if self.of.dtype is torch.float32 else None))

    def _by_model(self, values: Array, own: int) -> Array:
        """Return values, of which the last `own` axes belong to a set, with one axis for the models in front."""
        return np.moveaxis(values.reshape(*self._lead, -1, *values.shape[values.ndim - own :]), len(self._lead), 0)

    def _stacked(self, values: torch.Tensor, own: int) -> Array:
        """Return values, of which the last `own` axes belong to a set, as ``(models, sets, ...)``."""
        array = self._by_model(np.asarray(values.detach().resolve_neg().cpu().numpy(), np.float64), own)
        return array.reshape(self._shape_of_cross[0], -1, *array.shape[array.ndim - own :])

    def backward(self, by_mean: Any, by_covariance: Any, points: bool, constant: bool, graded: bool) -> list[Any]:
        """Return the gradients by points, mean's parameters and kernel's parameters, None for unwanted ones."""
        of = self.of
        if of.lock.entered():
            return self.differentiable(by_mean, by_covariance, points, constant, graded)
        k, total, n = self._shape_of_cross
        h = by_train = None
        if by_covariance is None:
            g = np.zeros((k, total, n))
        else:
            h = self._stacked(by_covariance, 2)
            h = h + h.swapaxes(-1, -2)
            h *= 0.5
            g = (h @ self._white).reshape(k, total, n) @ of.inverse
            if self._solves and graded:
                solved = self._white.reshape(k, total, n) @ of.inverse
                by_train = solved.swapaxes(-1, -2) @ g
            g *= -2.0
        slopes = None
        if by_mean is not None:
            slopes = self._stacked(by_mean, 1).reshape(k, 1, total, 1)
            g += slopes[:, 0] * of.weights.swapaxes(-1, -2)
        found = np.zeros((k, 1, total, of.train.shape[-1])) if points else None
        by_constant = joined = None
        if not (constant or graded):
            self._add(g, h, slopes, found, False, False)
            return placed([self._as_points(found), None, None], of.device)
        with of.lock.here():
            for parameter in of.parameters:
                parameter.by_value.fill(0.0)
            self._add(g, h, slopes, found, constant, graded)
            if by_train is not None:
                of.kernel.backward(of.kernel.evaluate(of.train)[1], by_train[:, None], None, True)
            if constant and slopes is not None:
                by_constant = _joined(self._constants)
            if graded:
                joined = _joined(self._graded)
        return placed([self._as_points(found), by_constant, joined], of.device)

    def _add(self, g: Array, h: Any, slopes: Any, by_points: Any, constant: bool, graded: bool) -> None:
        """Add to the gradients of points, of mean's parameters if `constant`, and of kernel's if `graded`."""
        of, (kept, own) = self.of, self._kept
        if slopes is not None:
            of.mean.backward(
                self._points, slopes, None if by_points is None else by_points[..., : self._shape[-1]], constant
            )
        if graded or by_points is not None:
            of.kernel.backward(kept, g[:, None], by_points, graded)
            if h is not None and (graded or of.alone is None or self.m > 1):
                of.kernel.backward(own, h, None if by_points is None else by_points.reshape(*h.shape[:3], -1), graded)

    def _as_points(self, values: Array | None) -> torch.Tensor | None:
        """Return a gradient by stacked points as one by the caller's points."""
        if values is None:
            return None
        d = self._shape[-1]
        values = values[:, 0] if values.shape[-1] == d else values[:, 0, :, :d] + values[:, 0, :, d:]
        if self._shared:
            return self._tensor((values[0] if len(values) == 1 else values.sum(0)).reshape(self._shape))
        return self._unstacked(values.reshape(len(values), -1, *self._shape[-2:]))

    def differentiable(self, by_mean: Any, by_covariance: Any, points: bool, constant: bool, graded: bool) -> list[Any]:
        """Return the result of `backward` as a differentiable function, computed by the model's own modules."""
        inputs, cotangents = self._unsaved.unchanged(), [g for g in (by_mean, by_covariance) if g is not None]
        of = self.of

        def outs(x: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
            both = zip(of.formula(x, values, self._solves), (by_mean, by_covariance), strict=True)
            return [out for out, grad in both if grad is not None]

        of_mean = self._constants if constant and by_mean is not None else []
        of_kernel = self._graded if graded else []
        wanted = [p in of_mean or p in of_kernel for p in of.parameters]
        by_points, *slopes = plain_gradients(outs, inputs, [points, *wanted], cotangents)
        found = {id(p): slope.reshape(-1) for p, slope in zip(of.parameters, slopes, strict=True) if slope is not None}
        both = [torch.cat([found[id(p)] for p in each]) if each else None for each in (of_mean, of_kernel)]
        return [by_points, *both]


def _joined(parameters: list[Parameter]) -> torch.Tensor:
    return torch.cat([p.gradient().reshape(-1) for p in parameters])


class _Predicted(torch.autograd.Function):
    """Mean and covariance as a function of points, and of the vectors of mean's and kernel's hyperparameters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, constant: Any, token: Any, call: Call, found: Pair) -> Pair:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.nodes = call, [None if t is None else t.grad_fn for t in (constant, token)]
        if not ctx.needs_input_grad[0] and token is None:  # only the mean has a gradient, by its own parameters
            ctx.mark_non_differentiable(found[1])
        return found

    @staticmethod
    def backward(ctx: Any, by_mean: Any, by_covariance: Any) -> Any:
        call = ctx.call
        if call is None:
            raise RuntimeError(SPENT)
        constant, graded = (node is not None and _runs(node) for node in ctx.nodes)
        # the gradient by the mean's constant needs no saved tensors in stock, so the call stays valid after it
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
    """Whether the present backward pass will run this node."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # called without the engine
        return True
