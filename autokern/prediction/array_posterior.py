"""The posterior of an exact model at a few points, in NumPy, from a cached factor and cached weights.

`Posterior` holds a model's kernel and mean at one state, with the inverse factor W of the noisy training covariance,
``W^T W = K^-1``, and ``a = K^-1 (y - mean)``. With the covariances C of the points with the training points, the mean
is ``m + C a`` and the covariance ``K** - V V^T``, where ``V = C W^T``. The backward pass propagates ``dL/dC = g a^T -
(H + H^T) V W``. As in the library with detached caches, no gradient reaches weights and noise, and with `fast_pred_var`
none the factor; else the kernel's hyperparameters have ``dL/dK = (V W)^T H V W``, too.

Hyperparameters enter the graph as vectors, whose nodes all calls share. The autograd engine tells whether a backward
pass runs those nodes: ``torch.autograd.grad(value, X)`` does not, and skips their gradients. Second derivatives are
computed by the model's own modules.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gpytorch.models import ExactGP
from gpytorch.settings import fast_pred_var

from autokern.core.state import Lock
from autokern.density.matrices import solved
from autokern.kernels import tree as trees
from autokern.kernels.array_distances import arranged
from autokern.kernels.array_parts import Array
from autokern.model.arrays import Inspected, UnreadError
from autokern.model.forward import kernel_at, parts_of
from autokern.model.kernel_parts import called
from autokern.model.libraries import PREDICTION
from autokern.model.memoized import frozen
from autokern.model.other_parts import Mean, numbered
from autokern.model.parameters import Mirrors, Parameter
from autokern.prediction.array_posterior_call import Apart, Call, Pair
from autokern.prediction.factor_cache import of as factor_of
from autokern.prediction.factor_cache import parts
from autokern.prediction.inverse_factor import Conditioned

_INHERITED = (
    "__call__", "__getattr__", "train_targets", "_get_train_prior_distribution", "_get_test_prior_mean_and_covariances",
)  # fmt: skip
_FAR = 4.0  # distance of points from the origin, in units of their spread, above which inner products lose digits
_MOVING = frozenset(("index", "linear", "polynomial", "truncated", "downsampling", "decay"))
"""Families whose variance depends on the point."""
_MOST, MOST = 2**22, 2**16
"""Most elements of all factors of a batch, and most covariances between test points: above, torch's threads pay."""


def _inputs(model: ExactGP) -> torch.Tensor:
    """Return the training points of a model that computes as `ExactGP` does; or raise UnreadError."""
    if any(getattr(type(model), name) is not getattr(ExactGP, name) for name in _INHERITED):
        raise UnreadError("a model that overrides attributes of ExactGP")
    inputs: Any = model.train_inputs
    if type(inputs) not in (tuple, list) or len(inputs) != 1:
        raise UnreadError("training data other than one tensor of inputs")
    return inputs[0]


def _values(points: torch.Tensor, mirrors: Mirrors | None) -> Array:
    return np.asarray(Inspected(points.dtype, mirrors=mirrors).view(points, fixed=True), np.float64)


class Posterior:
    """A model in evaluation mode at one state, in NumPy; raises UnreadError if any part of it is unsupported."""

    _last: weakref.ref[Posterior]  # in a copy that is `kept`: the last arrays that share its parameters

    def __init__(self, model: ExactGP, known: Conditioned) -> None:
        kind, first = type(model), _inputs(model)
        self.device, self.dtype = first.device, first.dtype
        mirrors = None if first.is_cpu else Mirrors(still=True)
        seen, names = Inspected(first.dtype, mirrors=mirrors), parts_of(kind)
        seen.stays(lambda: (kind.forward, getattr(kind.forward, "__code__", None)))
        # the same names as in `hooks.strategies`, so that both share one cached comparison
        seen.relies(*PREDICTION, *map(type, model.modules()))
        self.tasks, train = numbered(seen, model, _values(first, mirrors))
        self._mean_module, self._kernel_module = seen.module(model, names[0]), kernel_at(seen, model, names[1])
        if self._kernel_module is None:
            raise UnreadError("a model that was not fitted")
        seen.batch = self._kernel_module.batch_shape  # fantasies of a model share one kernel without a batch
        self.batch = first.shape[:-2] or seen.batch  # samples of hyperparameters share the points
        if seen.batch != self.batch[len(self.batch) - len(seen.batch) :]:
            raise UnreadError("a kernel of another batch shape")
        seen.begin(())
        seen.models, seen.dims = self.batch.numel(), train.shape[-1]
        self.kernel = called(seen, self._kernel_module, np.arange(seen.dims))
        self.mean = Mean(seen, self._mean_module, None if self.tasks is None else self.tasks.column)
        if self.tasks is not None and self.mean.column is not None and self.mean.count < len(self.tasks.values):
            raise UnreadError("tasks without a mean")
        if {*seen.families} == {"constant"}:
            raise UnreadError("a kernel that does not depend on the points")
        self._raw, self._moves, self._seen, self.lock = seen.raw, not _MOVING.isdisjoint(seen.families), seen, Lock()
        self._lay(first, train)
        if known.requires_grad:
            raise UnreadError("a factor with a graph")  # the rest is slow, so after all checks
        self._take(known)
        seen.look(model, *self._mean_module.modules())
        seen.close(self._kernel_module, whole=False)
        made_of = parts(model.prediction_strategy)
        self._kernel_of_data = None if made_of is None else made_of[0].kernel  # a fantasy's is that of the first model
        self.parameters = list(seen.parameters.values())

    @np.errstate(all="ignore")
    def _lay(self, first: torch.Tensor, train: Array) -> None:
        """Take training points, under the present values of the parameters."""
        points = np.broadcast_to(train, (*self.batch, *train.shape[-2:])).reshape(-1, *train.shape[-2:])
        self._centre = points.mean((0, 1))
        rough = first.dtype is torch.float32 and trees.form(self._kernel_module) is None
        if rough and (np.abs(self._centre) > _FAR * points.std((0, 1))).any():
            raise UnreadError("points far from the origin, at which the library's covariance loses digits")
        self._train, self.train = first, self.laid(points[:, None])
        one = self.train[:, :, :1]
        self.kernel.evaluate(one, self.train)  # parts keep what depends on the training points alone
        self.alone = None if self._moves else self.kernel.evaluate(one)
        self._tokens: tuple[list[Parameter], list[torch.Tensor | None]] = [], [None, None]
        dtype, families = str(first.dtype).removeprefix("torch."), "+".join(sorted(self._seen.families))
        self.key = (len(points), *points.shape[1:], self.device.type, dtype, families)

    def _take(self, known: Conditioned) -> None:
        """Take the factor of the training points' covariance, and the weights."""
        n = known.n
        self.inverse, self.weights = self._held(known.root.mT, n, n), self._held(known.alpha, n).reshape(-1, n, 1)

    def kept(self) -> Posterior:
        """Return a copy for later states of the model, which shares the parameters."""
        found = copy.copy(self)
        found._last, lead = weakref.ref(self), self._train.shape[:-2]
        found._train = self._train.new_empty((*lead, 0, self.key[2]))  # has the shape that is compared, and no data
        del found.train, found.inverse, found.weights
        return found

    def is_wanted(self) -> bool:
        """Whether a strategy, a call or a graph holds the last arrays that share the parameters of a `kept` copy."""
        return self._last() is not None

    def renewed(self, model: ExactGP) -> Posterior | None:
        """Return the arrays of the model's present state, with a new strategy; None if they must be read anew."""
        if self.is_wanted() or self.lock.entered():
            return None
        strategy, first, there = model.prediction_strategy, _inputs(model), self._train
        alike = first.shape[:-2] == there.shape[:-2] and first.shape[-1:] == there.shape[-1:]
        alike = alike and first.is_cpu and there.is_cpu and first.dtype is self.dtype and self.tasks is None
        made_of = parts(strategy) if alike else None
        own = made_of is not None and made_of[0].kernel is self._kernel_of_data is self._kernel_module
        if not own or not self._seen.holds():
            return None
        train, made = _values(first, None), copy.copy(self)
        with self.lock.here():
            if self.is_wanted():  # by another thread
                return None
            self._last = weakref.ref(made)
            with np.errstate(all="ignore"):
                self._seen.refresh()
        made._lay(first, train)
        with np.errstate(all="ignore"), torch.no_grad():
            matrix = torch.from_numpy(self.kernel.evaluate(made.train)[0]).to(self.dtype)
            known = factor_of(strategy, matrix=matrix.reshape(*self.batch, *matrix.shape[-2:]))
        if known is None:
            return None
        made._take(known)
        return made

    def _held(self, values: torch.Tensor, *shape: int) -> Array:
        """Return values in float64 with one batch axis in front, of size 1 if all models share the values."""
        lead = values.shape[: values.dim() - len(shape)]
        if len(lead) > len(self.batch):
            raise UnreadError("a factor of another batch shape")
        if values.dtype is not self.dtype or (lead.numel() > 1 and values.numel() > _MOST):
            raise UnreadError("a factor of another dtype, or many large ones")
        values = values.reshape(shape) if lead.numel() == 1 else values.expand(*self.batch, *shape)
        return np.asarray(values.cpu().numpy(), np.float64).reshape(-1, *shape)

    def laid(self, x: Array, centred: bool = False) -> Array:
        """Return points less the training points' mean, or less their own, arranged for the kernel's parts."""
        return arranged(x, self._raw, None if centred else self._centre)

    def holds(self) -> bool:
        """Whether the model still consists of the objects that were read; the caller checks its values."""
        return not self._train.requires_grad and self._seen.holds()

    def fits(self, x: torch.Tensor) -> bool:
        """Whether points are supported, and gradients that they ask for reach parameters of this model only."""
        known = x.device == self.device and x.dtype is self.dtype and x.shape[-1] == self.key[2] and x.numel() > 0
        if self._kernel_of_data not in (None, self._kernel_module) and fast_pred_var.off() and torch.is_grad_enabled():
            known = known and not any(p.requires_grad for p in self._kernel_of_data.parameters())
        return known and all(size in (1, k) for size, k in zip(self.own(x)[::-1], self.batch[::-1], strict=False))

    def own(self, x: torch.Tensor) -> torch.Size:
        """Return the batch dimensions of points that belong to those of the model."""
        lead = x.shape[:-2]
        return lead[max(0, len(lead) - len(self.batch)) :]

    def sets(self, x: torch.Tensor) -> int:
        """Return the number of sets of points, where sets that the models of a batch share count once per model."""
        own = self.own(x).numel()
        return x.shape[:-2].numel() // own * max(own, self.key[0])

    def at(self, x: torch.Tensor) -> Pair | None:
        """Return mean ``(..., m)`` and covariance ``(..., m, m)``, None if a value is not finite."""
        grads = torch.is_grad_enabled()
        wanted, tokens = self._joined() if grads else (([], []), [None, None])
        own = self.own(x)
        if own.numel() > 1 and own != self.batch:
            x = x.expand(*x.shape[: x.dim() - 2 - len(own)], *self.batch, *x.shape[-2:])
        call = Call(self, x, wanted, solves=self._kernel_of_data is self._kernel_module and fast_pred_var.off())
        found = call.evaluate(x)
        if found is None or not grads:
            return found
        mean, covariance = call.node(x, tokens, found)
        return mean.clone(), covariance  # the clone gives the mean a graph node of its own

    def _joined(self) -> tuple[Apart, list[torch.Tensor | None]]:
        """Return the hyperparameters that require gradients, of mean and of kernel, and each group as one vector."""
        wanted = [p for p in self.parameters if p.tensor.requires_grad]
        both = (
            [p for p in wanted if id(p.tensor) in self.mean.tensors],
            [p for p in wanted if id(p.tensor) not in self.mean.tensors],
        )
        of, tokens = self._tokens
        if wanted != of:
            tokens = [torch.cat([p.tensor.reshape(-1) for p in each]) if each else None for each in both]
            self._tokens = wanted, tokens
        return both, tokens

    def formula(self, x: torch.Tensor, values: Sequence[torch.Tensor] = (), solves: bool = False) -> Pair:
        """Return mean and covariance by the model's modules, or by copies that have `values`; differentiable.

        If the covariance `solves`, its gradients pass through the kernel matrix of the training points.
        """
        new = dict(zip((id(p.tensor) for p in self.parameters), values, strict=False))
        modules = self._kernel_module, self._mean_module
        kernel, mean_module = (frozen(module, lambda t: new.get(id(t), t)) for module in modules)
        held = (torch.from_numpy(array).to(x) for array in (self.inverse, self.weights))
        inverse, weights = (a.reshape(*(self.batch if len(a) > 1 else ()), *a.shape[1:]) for a in held)
        points, mean = self._prior(mean_module, x)
        train = self._prior(None, self._train.to(x))[0]
        cross = kernel(points, train).to_dense()

        def solve(rhs: torch.Tensor) -> torch.Tensor:
            return inverse.mT @ (inverse @ rhs)

        by_train = solved(kernel(train).to_dense(), solve, cross.mT) if solves else solve(cross.mT)
        return mean + (cross @ weights).squeeze(-1), kernel(points).to_dense() - cross @ by_train

    def _prior(self, mean: Any, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the points that the kernel gets, and their mean, None if `mean` is None."""
        if self.tasks is None:
            return x, None if mean is None else mean(x)
        column, values, numbers = self.tasks.column, *(torch.from_numpy(a).to(x) for a in self.tasks[1:])
        tasks = numbers[torch.searchsorted(values, x[..., column, None].detach().trunc().contiguous())]
        before, after = x[..., :column], x[..., column + 1 :]
        selected = sys.modules["botorch.models.multitask"]._compute_multitask_mean  # BoTorch's own code
        of_points = None if mean is None else selected(mean, before, tasks, after)
        return torch.cat([before, tasks, after], -1), of_points
