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
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from gpytorch.models import ExactGP

from autokern.core.autograd import SPENT, Unsaved, each_cotangent, has_duals, keeps_graph, plain_gradients
from autokern.core.locks import Lock
from autokern.gp.botorch_inputs import is_mapping, mean_of_tasks, tasks_of
from autokern.gp.forwards import modules_of
from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.inverse_factor import Conditioned
from autokern.gp.mirrors import Mirrors, placed
from autokern.gp.parameters import Parameter
from autokern.gp.points import Mean, Part, Wanted, part_of
from autokern.gp.relied import PREDICTION
from autokern.gp.small import Array
from autokern.system.blas import one_thread

__all__ = ["Posterior"]

_INHERITED = (
    "__call__", "__getattr__", "train_targets", "_get_train_prior_distribution", "_get_test_prior_mean_and_covariances",
)  # fmt: skip
_MOST = 2**22
"""Elements of the factors of all models of a batch up to which they are held."""
_LARGE = 2**18
"""Multiplications of the largest product from which on OpenBLAS would use its threads."""
_AS_THEY_ARE = contextlib.nullcontext()
Pair = tuple[torch.Tensor, torch.Tensor]
Apart = tuple[list[Parameter], list[Parameter]]
"""Hyperparameters of the mean, and of the kernel."""


class Posterior:
    """A model in evaluation mode at one state, as arrays; UnreadError if any part of it is not exactly known.

    On an accelerator, points and results are copied.
    """

    def __init__(self, model: ExactGP, known: Conditioned) -> None:
        kind = type(model)
        if any(getattr(kind, name) is not getattr(ExactGP, name) for name in _INHERITED):
            raise UnreadError("a model that redefines what an exact one is")
        self._forward, self._code = kind.forward, kind.forward.__code__
        names = ("mean_module", "covar_module", True) if is_mapping(kind) else modules_of(self._forward)
        if names is None or any(hasattr(kind, name) for name in names[:2]):
            raise UnreadError("a forward that is not the plain one")
        inputs = model.train_inputs
        if type(inputs) not in (tuple, list) or len(inputs) != 1:
            raise UnreadError("several inputs")
        first = inputs[0]
        self.batch, self.device, self.dtype = first.shape[:-2], first.device, first.dtype
        seen = Inspected(first.dtype, mirrors=None if first.is_cpu else Mirrors(still=True))
        seen.relies(*PREDICTION)
        there = np.asarray(seen.data(first), np.float64)
        self._tasks = tasks_of(seen, model) if is_mapping(kind) else None
        train = there if self._tasks is None else self._tasks.mapped(there)
        if train is None:
            raise UnreadError("tasks that there are not")
        self._mean_module, self._kernel_module = seen.module(model, names[0]), seen.module(model, names[1])
        seen.batch = self._kernel_module.batch_shape  # fantasies of a model have one kernel
        if seen.batch != self.batch[len(self.batch) - len(seen.batch) :]:
            raise UnreadError("a kernel of another batch")
        points = train.reshape(-1, *train.shape[-2:])
        self._kernel: Part = part_of(seen, self._kernel_module, points)
        self._mean = Mean(seen, self._mean_module, len(points), self._tasks)
        self._factor(known, train.shape[-2])  # takes time, so comes after all that may be unread
        seen.look(model, *self._mean_module.modules())
        seen.close(self._kernel_module, whole=False)
        self._type, self._seen, self._lock = kind, seen, Lock()
        self._tokens: tuple[list[Parameter], list[torch.Tensor | None]] = [], [None, None]
        self._train, self.parameters = first, list(seen.parameters.values())
        dtype, families = str(first.dtype).removeprefix("torch."), "+".join(sorted(seen.families))
        self.key = (len(points), *points.shape[1:], self.device.type, dtype, families)

    def _factor(self, known: Conditioned, n: int) -> None:
        if known.requires_grad:
            raise UnreadError("a factor with a graph")
        self._inverse, self._weights = self._held(known.root.mT, n, n), self._held(known.alpha, n).reshape(-1, n, 1)

    def _held(self, values: torch.Tensor, *shape: int) -> Array:
        """Return values of all models, or of one that stands for all, with one axis for the batch in front."""
        lead = values.shape[: values.dim() - len(shape)]
        if values.dtype is not self.dtype or (lead.numel() > 1 and values.numel() > _MOST):
            raise UnreadError("a factor of another dtype, or many large ones")
        if lead.numel() == 1:
            values = values.reshape(shape)
        elif len(lead) <= len(self.batch):
            values = values.expand(*self.batch, *shape)
        else:
            raise UnreadError("a factor of another batch")
        return np.asarray(values.cpu().numpy(), np.float64).reshape(-1, *shape)

    def holds(self) -> bool:
        """Whether the model consists of what was read; its values are the matter of its prediction strategy."""
        same = self._type.forward is self._forward and self._forward.__code__ is self._code
        return same and self._seen.holds()

    def fits(self, x: torch.Tensor) -> bool:
        """Whether these are points at which the arrays can be evaluated."""
        known = x.device == self.device and x.dtype is self.dtype and x.shape[-1] == self.key[2] and x.numel() > 0
        return known and all(size in (1, k) for size, k in zip(self._own(x)[::-1], self.batch[::-1], strict=False))

    def _own(self, x: torch.Tensor) -> torch.Size:
        """Return the batch dimensions of points that belong to those of the model."""
        lead = x.shape[:-2]
        return lead[max(0, len(lead) - len(self.batch)) :]

    def sets(self, x: torch.Tensor) -> int:
        """Return how many sets of points there are; those that all models of a batch share count for each."""
        own = self._own(x).numel()
        return x.shape[:-2].numel() // own * max(own, self.key[0])

    def graded(self) -> bool:
        """Whether any hyperparameter wants a gradient."""
        return any(p.tensor.requires_grad for p in self.parameters)

    def at(self, x: torch.Tensor) -> Pair | None:
        """Return mean ``(..., m)`` and covariance ``(..., m, m)``, None if there is a number that is none."""
        grads = torch.is_grad_enabled()
        wanted, tokens = self._joined() if grads else (([], []), [None, None])
        own = self._own(x)
        if own.numel() > 1 and own != self.batch:
            x = x.expand(*x.shape[: x.dim() - 2 - len(own)], *self.batch, *x.shape[-2:])
        call = _Call(self, x, wanted)
        found = call.evaluate(x)
        if found is None or not grads:
            return found
        mean, covariance = _Predicted.apply(x, *tokens, call, found)
        return mean.clone(), covariance  # a node of its own: a gradient by the mean does not pass the covariance

    def _joined(self) -> tuple[Apart, list[torch.Tensor | None]]:
        """Return the hyperparameters that want gradients, of the mean and of the kernel, and both as vectors."""
        wanted = [p for p in self.parameters if p.tensor.requires_grad]
        both = (
            [p for p in wanted if id(p.tensor) in self._mean.tensors],
            [p for p in wanted if id(p.tensor) not in self._mean.tensors],
        )
        of, tokens = self._tokens
        if wanted != of:
            tokens = [torch.cat([p.tensor.reshape(-1) for p in each]) if each else None for each in both]
            self._tokens = wanted, tokens
        return both, tokens

    def formula(self, x: torch.Tensor, values: Sequence[torch.Tensor] = ()) -> Pair:
        """Return mean and covariance by the model's own modules, differentiable as often as wanted.

        Values that stand for all hyperparameters are put into a copy of the modules.
        """
        modules = self._kernel_module, self._mean_module
        if values:
            memo = {id(p.tensor): value for p, value in zip(self.parameters, values, strict=True)}
            modules = copy.deepcopy(modules, memo)
        kernel, mean_module = modules
        held = (torch.from_numpy(array).to(x) for array in (self._inverse, self._weights))
        inverse, weights = (a.reshape(*(self.batch if len(a) > 1 else ()), *a.shape[1:]) for a in held)
        points, mean = self._prior(mean_module, x)
        cross = kernel(points, self._prior(None, self._train.to(x))[0]).to_dense()
        white = cross @ inverse.mT
        return mean + (cross @ weights).squeeze(-1), kernel(points).to_dense() - white @ white.mT

    def _prior(self, mean: Any, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the points that the kernel gets, and their mean, None for no module."""
        if self._tasks is None:
            return x, None if mean is None else mean(x)
        column, values, numbers = self._tasks.column, *(torch.from_numpy(a).to(x) for a in self._tasks[1:])
        tasks = numbers[torch.searchsorted(values, x[..., column, None].detach().trunc().contiguous())]
        before, after = x[..., :column], x[..., column + 1 :]
        points = torch.cat([before, tasks, after], -1)
        return points, None if mean is None else mean_of_tasks(mean, before, tasks, after)


class _Call:
    """One evaluation, and what its backward passes need."""

    def __init__(self, of: Posterior, x: torch.Tensor, wanted: Apart) -> None:
        self.of, self.m, self._shape = of, x.shape[-2], x.shape
        self._lead, self._shared = x.shape[: max(0, x.dim() - 2 - len(of.batch))], of._own(x).numel() == 1
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
            self._points = stacked if of._tasks is None else of._tasks.mapped(stacked)
            if self._points is None:
                return None
            cross, own, self._kept = of._kernel.evaluate(self._points, self.m)
            k, _, n = self._shape_of_cross = cross.shape
            white = self._white = (cross @ of._inverse.swapaxes(-1, -2)).reshape(k, -1, self.m, n)
            mean = cross @ of._weights
            of._mean.add(self._points, mean)
            mean = mean.reshape(k, -1, self.m)
            if self.m == 1:
                covariance = own - np.einsum("kbmn,kbmn->kbm", white, white)[..., None]
            else:
                covariance = own - white @ white.swapaxes(-1, -2)
            if not math.isfinite(np.add.reduce(mean, axis=None) + np.add.reduce(covariance, axis=None)):
                return None
        pair = placed([self._unstacked(mean), self._unstacked(covariance)], of.device)
        return cast("Pair", tuple(pair))

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
            if constant:
                with of._lock.here():
                    by_constant = self._slopes(self._constants, of._mean.backward, self._points, slopes)
        found = np.zeros((k, total, self._shape[-1])) if points else None
        if not graded:
            of._kernel.backward(self._kept, g, h, Wanted(found, by_parameters=False))
            return placed([self._as_points(found), by_constant, None], of.device)
        with of._lock.here():
            wanted = Wanted(found, by_parameters=True)
            joined = self._slopes(self._graded, of._kernel.backward, self._kept, g, h, wanted)
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

        by_mean_s = self._constants if constant and by_mean is not None else []
        of_kernel = self._graded if graded else []
        wanted = [p in by_mean_s or p in of_kernel for p in of.parameters]
        by_points, *slopes = plain_gradients(outs, inputs, [points, *wanted], cotangents)
        found = {id(p): slope.reshape(-1) for p, slope in zip(of.parameters, slopes, strict=True) if slope is not None}
        both = [torch.cat([found[id(p)] for p in each]) if each else None for each in (by_mean_s, of_kernel)]
        return [by_points, *both]


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
