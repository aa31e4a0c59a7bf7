"""The posterior of an exact model at a few points in one piece: by arrays, from a factor and weights that are kept.

`Posterior` holds a model's kernel and mean at one state, with the inverse factor W of the noisy training covariance,
``W^T W = K^-1``, and ``a = K^-1 (y - mean)``. With the covariances C of the points with the training points, the mean
is ``m + C a`` and the covariance ``K** - V V^T``, where ``V = C W^T``. Backward passes take ``dL/dC = g a^T - (H + H^T)
V W`` apart. As in the library with detached caches, no gradient reaches factor and weights.

Hyperparameters enter the graph as one vector, a node that all calls share. The engine says whether it runs that node:
``torch.autograd.grad(value, X)`` does not, and costs nothing for them. Where a backward pass is differentiated itself,
it computes with the model's own modules.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from gpytorch.means import ConstantMean, ZeroMean
from gpytorch.models import ExactGP

from autokern.core.autograd import SPENT, Unsaved, each_cotangent, has_duals, keeps_graph, plain_gradients
from autokern.core.locks import Lock
from autokern.gp.forwards import modules_of
from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.inverse_factor import Conditioned
from autokern.gp.mirrors import Mirrors, placed
from autokern.gp.parameters import Parameter
from autokern.gp.points import Part, Wanted, part_of, value_of
from autokern.gp.relied import PREDICTION
from autokern.gp.small import Array
from autokern.system.blas import one_thread

__all__ = ["Posterior"]

_INHERITED = (
    "__call__", "__getattr__", "train_targets", "_get_train_prior_distribution", "_get_test_prior_mean_and_covariances",
)  # fmt: skip
_LARGE = 2**18
"""Multiplications of the largest product from which on OpenBLAS would use its threads."""
_AS_THEY_ARE = contextlib.nullcontext()
Pair = tuple[torch.Tensor, torch.Tensor]


class Posterior:
    """A model in evaluation mode at one state, as arrays; UnreadError if any part of it is not exactly known.

    On an accelerator, points and results are copied.
    """

    def __init__(self, model: ExactGP, known: Conditioned) -> None:
        kind = type(model)
        if any(getattr(kind, name) is not getattr(ExactGP, name) for name in _INHERITED):
            raise UnreadError("a model that redefines what an exact one is")
        self._forward, self._code = kind.forward, kind.forward.__code__
        names = modules_of(self._forward)
        if names is None or any(hasattr(kind, name) for name in names[:2]):
            raise UnreadError("a forward that is not the plain one")
        inputs = model.train_inputs
        if type(inputs) not in (tuple, list) or len(inputs) != 1 or inputs[0].dim() not in (2, 3):
            raise UnreadError("several inputs, or a batch of batches")
        self.batch, self.device = inputs[0].shape[:-2], inputs[0].device
        seen = Inspected(torch.float64, self.batch, None if inputs[0].is_cpu else Mirrors(still=True))
        seen.relies(*PREDICTION)
        train = seen.data(inputs[0])
        self._mean_module, self._kernel_module = seen.module(model, names[0]), seen.module(model, names[1])
        points = train.reshape(-1, *train.shape[-2:])
        self._centre = points.mean((0, 1))
        self._kernel: Part = part_of(seen, self._kernel_module, points - self._centre)
        self._mean = self._mean_of(seen)
        self._factor(known, train.shape[-2])  # takes time, so comes after all that may be unread
        seen.look(model, *self._mean_module.modules())
        seen.close(self._kernel_module, whole=False)
        self._type, self._seen, self._lock = kind, seen, Lock()
        self._tokens: tuple[list[Parameter], list[torch.Tensor | None]] = [], [None, None]
        self._train, self.parameters = inputs[0], list(seen.parameters.values())
        self.key = (len(points), *points.shape[1:], self.device.type, "+".join(sorted(seen.families)))

    def _factor(self, known: Conditioned, n: int) -> None:
        if known.grown or known.border is not None or known.requires_grad:
            raise UnreadError("a factor that grew, or with a graph")
        inverse, weights = known.inverse.dense(), known.alpha
        if inverse.dtype is not torch.float64 or inverse.shape != (*self.batch, n, n):
            raise UnreadError("a factor of another shape or dtype")
        if weights.shape != (*self.batch, n):
            raise UnreadError("weights of another shape")
        self._inverse: Array = inverse.cpu().numpy().reshape(-1, n, n)
        self._weights: Array = weights.cpu().numpy().reshape(-1, n, 1)

    def _mean_of(self, seen: Inspected) -> Parameter | None:
        mean = self._mean_module
        if type(mean) not in (ConstantMean, ZeroMean) or mean.batch_shape != self.batch:
            raise UnreadError(f"a mean {type(mean).__name__}, or one of another batch")
        if type(mean) is ZeroMean:
            return None
        self._constant = np.array(value_of(seen, mean, "raw_constant").value).reshape(-1, 1)
        return seen.parameters[id(mean._parameters["raw_constant"])]

    def holds(self) -> bool:
        """Whether the model consists of what was read; its values are the matter of its prediction strategy."""
        same = self._type.forward is self._forward and self._forward.__code__ is self._code
        return same and self._seen.holds()

    def fits(self, x: torch.Tensor) -> bool:
        """Whether these are points at which the arrays can be evaluated."""
        lead = x.shape[:-2]
        alike = x.device == self.device and x.dim() >= 2 and x.shape[-1] == self.key[2] and x.numel() > 0
        return alike and (not self.batch or not lead or lead[-1] in (1, self.batch[0]))

    def shares(self, x: torch.Tensor) -> bool:
        """Whether the points are the same for all outputs."""
        return not self.batch or x.dim() == 2 or x.shape[-3] == 1

    def graded(self) -> bool:
        """Whether any hyperparameter wants a gradient."""
        return any(p.tensor.requires_grad for p in self.parameters)

    def at(self, x: torch.Tensor) -> Pair | None:
        """Return mean ``(..., m)`` and covariance ``(..., m, m)``, None if there is a number that is none."""
        grads = torch.is_grad_enabled()
        graded, tokens = self._joined() if grads else ([], [None, None])
        call = _Call(self, x, graded)
        found = call.evaluate(x)
        if found is None or not grads:
            return found
        mean, covariance = _Predicted.apply(x, *tokens, call, found)
        return mean.clone(), covariance  # a node of its own: a gradient by the mean does not pass the covariance

    def _joined(self) -> tuple[list[Parameter], list[torch.Tensor | None]]:
        """Return the kernel's hyperparameters that want gradients, and as vectors the mean's constant and theirs."""
        wanted = [p for p in self.parameters if p.tensor.requires_grad]
        graded = [p for p in wanted if p is not self._mean]
        of, tokens = self._tokens
        if wanted != of:
            both = [p for p in wanted if p is self._mean], graded
            tokens = [torch.cat([p.tensor.reshape(-1) for p in each]) if each else None for each in both]
            self._tokens = wanted, tokens
        return graded, tokens

    def formula(self, x: torch.Tensor, values: Sequence[torch.Tensor] = ()) -> Pair:
        """Return mean and covariance by the model's own modules, differentiable as often as wanted.

        Values that stand for all hyperparameters are put into a copy of the modules.
        """
        modules = self._kernel_module, self._mean_module
        if values:
            memo = {id(p.tensor): value for p, value in zip(self.parameters, values, strict=True)}
            modules = copy.deepcopy(modules, memo)
        kernel, mean_module = modules
        inverse, weights = (torch.from_numpy(array).to(self.device) for array in (self._inverse, self._weights))
        if not self.batch:
            inverse, weights = inverse[0], weights[0]
        cross = kernel(x, self._train).to_dense()
        white = cross @ inverse.mT
        mean = mean_module(x) + (cross @ weights).squeeze(-1)
        return mean, kernel(x).to_dense() - white @ white.mT


class _Call:
    """One evaluation, and what its backward passes need."""

    def __init__(self, of: Posterior, x: torch.Tensor, graded: list[Parameter]) -> None:
        self.of, self.m, self._shape, self._lead = of, x.shape[-2], x.shape, x.shape[: -3 if of.batch else -2]
        self._shared = of.shares(x)
        self._unsaved = Unsaved(x, *(p.tensor for p in of.parameters))
        self._graded = graded
        large = x.numel() // x.shape[-1] * of.key[1] ** 2 > _LARGE
        self.threads: Any = one_thread if large else _AS_THEY_ARE

    def evaluate(self, x: torch.Tensor) -> Pair | None:
        """Return mean and covariance, which the call does not keep; None if there is a number that is none."""
        of = self.of
        with np.errstate(all="ignore"), self.threads:
            points = x.detach().cpu().numpy()
            points = points if self._shared else np.moveaxis(points, -3, 0)
            stacked = points.reshape(1 if self._shared else self._shape[-3], -1, self._shape[-1]) - of._centre
            cross, own, self._kept = of._kernel.evaluate(stacked, self.m)
            k, _, n = self._shape_of_cross = cross.shape
            white = self._white = (cross @ of._inverse.swapaxes(-1, -2)).reshape(k, -1, self.m, n)
            mean = (cross @ of._weights).reshape(k, -1, self.m)
            if of._mean is not None:
                mean += of._constant[..., None]
            if self.m == 1:
                covariance = own - np.einsum("kbmn,kbmn->kbm", white, white)[..., None]
            else:
                covariance = own - white @ white.swapaxes(-1, -2)
            if not math.isfinite(np.add.reduce(mean, axis=None) + np.add.reduce(covariance, axis=None)):
                return None
        pair = placed([self._unstacked(mean), self._unstacked(covariance)], of.device)
        return cast("Pair", tuple(pair))

    def _unstacked(self, values: Array) -> torch.Tensor:
        """Return values of sets ``(k, b, ...)`` as the library has them, outputs after the other batch dimensions."""
        if not self.of.batch:
            return torch.from_numpy(values.reshape(*self._lead, *values.shape[2:]))
        apart = values.reshape(len(values), *self._lead, *values.shape[2:])
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(apart, 0, len(self._lead))))

    def _stacked(self, values: torch.Tensor, own: int) -> Array:
        """Return values whose last `own` axes are those of a set as ``(k, b, ...)``."""
        like = {"dtype": values.dtype, "device": "cpu"}
        plain = torch.zeros(values.shape, **like) if values._is_zerotensor() else values.detach()  # type: ignore[call-overload]
        array: Array = plain.resolve_neg().cpu().numpy()
        if self.of.batch:
            array = np.moveaxis(array, -1 - own, 0)
        return array.reshape(self._shape_of_cross[0], -1, *array.shape[array.ndim - own :])

    def backward(self, by_mean: Any, by_covariance: Any, points: bool, constant: bool, graded: bool) -> list[Any]:
        """Return the derivatives by points, constant of the mean, and kernel: None for those that are not wanted."""
        of, m = self.of, self.m
        if of._lock.entered():
            return self.differentiable(by_mean, by_covariance, points, constant, graded)
        k, total, n = self._shape_of_cross
        if by_covariance is None:
            h, g = np.zeros((k, total // m, m, m)), np.zeros((k, total, n))
        else:
            h = self._stacked(by_covariance, 2)
            g = ((h + h.swapaxes(-1, -2)) @ self._white).reshape(k, total, n) @ of._inverse
            np.negative(g, out=g)
        by_constant = None
        if by_mean is not None:
            slopes = self._stacked(by_mean, 1).reshape(k, total, 1)
            g += slopes * of._weights.swapaxes(-1, -2)
            if constant and of._mean is not None:
                with of._lock.here():
                    of._mean.by_value.fill(0.0)
                    of._mean.accumulate(slopes.sum((1, 2)).reshape(of._mean.value.shape))
                    by_constant = of._mean.gradient().reshape(-1)
        found = np.zeros((k, total, self._shape[-1])) if points else None
        if not graded:
            of._kernel.backward(self._kept, g, h, Wanted(found, by_parameters=False))
            return placed([self._as_points(found), by_constant, None], of.device)
        with of._lock.here():
            for parameter in of.parameters:
                parameter.by_value.fill(0.0)
            of._kernel.backward(self._kept, g, h, Wanted(found, by_parameters=True))
            joined = torch.cat([p.gradient().reshape(-1) for p in self._graded])
        return placed([self._as_points(found), by_constant, joined], of.device)

    def _as_points(self, values: Array | None) -> torch.Tensor | None:
        """Return a derivative by stacked points as one by the points of the caller."""
        if values is None:
            return None
        if self._shared:
            return torch.from_numpy((values if len(values) == 1 else values.sum(0)).reshape(self._shape))
        apart = values.reshape(len(values), *self._lead, *self._shape[-2:])
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(apart, 0, len(self._lead))))

    def differentiable(self, by_mean: Any, by_covariance: Any, points: bool, constant: bool, graded: bool) -> list[Any]:
        """Return the same as functions of points, hyperparameters and cotangents, by the model's own modules."""
        inputs, cotangents = self._unsaved.unchanged(), [g for g in (by_mean, by_covariance) if g is not None]
        of = self.of

        def outs(x: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
            both = zip(of.formula(x, values), (by_mean, by_covariance), strict=True)
            return [out for out, grad in both if grad is not None]

        constant = constant and by_mean is not None
        wanted = [constant if p is of._mean else graded and p in self._graded for p in of.parameters]
        by_points, *slopes = plain_gradients(outs, inputs, [points, *wanted], cotangents)
        found = {id(p): slope.reshape(-1) for p, slope in zip(of.parameters, slopes, strict=True) if slope is not None}
        joined = torch.cat([found[id(p)] for p in self._graded]) if graded else None
        return [by_points, found.get(id(of._mean)), joined]


class _Predicted(torch.autograd.Function):
    """Mean and covariance as functions of points, of the constant of the mean, and of the kernel's hyperparameters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, constant: Any, token: Any, call: _Call, found: Pair) -> Pair:
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
def _slopes(of: tuple[_Call, bool, bool, bool], by_mean: Any, by_covariance: Any) -> Any:
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
