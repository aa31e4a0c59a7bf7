"""The marginal likelihoods of a training loop whose model is not read as arrays, replayed (`repeated`).

In ``mll(model(x), y)``, the call of ``mll`` is replayed with its backward pass. The tensors of the prior are inputs of
the replay: the model itself is called as usual, and gradients pass through its graph.
"""

from __future__ import annotations

import abc
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import LinearOperator
from torch.distributions import Distribution

from autokern.core.autograd import computed
from autokern.core.replay import Held
from autokern.core.replay.effects import PLAIN, is_library
from autokern.core.replay.operations import UnrecordedError
from autokern.core.state import Beside, Lock, inside, repaid
from autokern.hooks.later import repeated
from autokern.hooks.later.closures import OfParameters
from autokern.model import memoized

_known: Beside[Loss] = Beside()
_LARGEST = 500  # points above which a computation is too large to be recorded, or too slow to gain
_SPACES = "_modules", "_priors", "_added_loss_terms"


def loss(mll: Any, stock: Callable[..., Any], ours: Callable[..., Any], prior: Any, target: Any) -> Any:
    """Return a marginal likelihood of a prior and a target: by a replay of `stock`, or by `ours`."""
    known = _known.get(mll) or _known.put(mll, Loss(mll))
    if known.lock.entered() or not known.lock.here().acquire(blocking=False):
        return ours(mll, prior, target)
    try:
        return known.call(mll, stock, ours, prior, target)
    finally:
        known.lock.here().release()


class Given:
    """A prior and a target: how the distribution is built from tensors, and copies of these, which a replay reads."""

    def __init__(self, prior: Any, form: Any, tensors: list[torch.Tensor]) -> None:
        self.copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        self.form, self._prior = form, _alike(prior, dict(zip(map(id, tensors), self.copies, strict=True)))
        self.present = tensors  # the tensors of the present call: the prior's, then the target

    @classmethod
    def of(cls, prior: Any, target: Any) -> Given | None:
        """Return a prior and a target, None if they are not plain."""
        found = _described(prior, target)
        return None if found is None else cls(prior, *found)

    def take(self, prior: Any, target: Any) -> bool:
        """Copy another prior and target of the same form; false for another form."""
        found = _described(prior, target)
        if found is None or found[0] != self.form:
            return False
        self.present = found[1]
        with torch.no_grad():
            for own, tensor in zip(self.copies, self.present, strict=True):
                own.copy_(tensor)
        return True

    def prior(self, tensors: Any, *of: Callable[[Any], Any]) -> Any:
        """Return the distribution with other tensors, and with `of` applied to its kernels."""
        return _alike(self._prior, dict(zip(map(id, self.copies), tensors, strict=False)), *of)

    def lazies(self, prior: Any) -> Iterator[Any]:
        """Yield the kernel matrices of a prior that are not evaluated yet."""
        waiting = [prior._covar]
        while waiting:
            one = waiting.pop()
            if type(one) is LazyEvaluatedKernelTensor:
                yield one
            waiting += [part for part in (*one._args, *one._kwargs.values()) if isinstance(part, LinearOperator)]


def _described(prior: Any, target: Any) -> tuple[Any, list[torch.Tensor]] | None:
    """Return the form of a prior and a target, equal for all that differ in numbers only, and their tensors."""
    tensors, more = list[torch.Tensor](), dict(vars(prior))
    mean, covariance = more.pop("loc", None), more.pop("_covar", None)
    if not isinstance(covariance, LinearOperator) or not is_library(type(prior).__module__):
        return None
    try:
        form = _form(mean, tensors), _form(covariance, tensors), _form(target, tensors), type(prior), more
    except _OtherError:
        return None
    plain = all(type(t) is torch.Tensor and t.layout is torch.strided and t.is_cpu for t in tensors)
    plain = plain and not any(isinstance(value, torch.Tensor) for value in more.values())
    return (form, tensors) if plain and not target.requires_grad and tensors[-1] is target else None


class _OtherError(UnrecordedError):
    """A prior of a kind that cannot be built from tensors."""


def _form(one: Any, tensors: list[torch.Tensor]) -> Any:
    """Return how an operator is built from tensors, which are appended."""
    if isinstance(one, torch.Tensor):
        at = next((at for at, known in enumerate(tensors) if known is one), len(tensors))
        if at == len(tensors):
            tensors.append(one)
        if one._backward_hooks or one.retains_grad:
            raise _OtherError
        return "tensor", at, one.shape, one.dtype, one.requires_grad
    if isinstance(one, LinearOperator):
        kept = memoized.is_past(one) or set(memoized.names(one)) - {"size"}
        if kept or not vars(one).get("_is_grad_enabled", True) or not is_library(type(one).__module__):
            raise _OtherError  # the library would use cached results, or results without a graph
        arguments = [_form(part, tensors) for part in one._args]
        return type(one), arguments, {name: _form(part, tensors) for name, part in one._kwargs.items()}
    return one


def _alike(one: Any, instead: dict[int, Any], of: Callable[[Any], Any] = lambda kernel: kernel) -> Any:
    """Return a copy of a distribution or operator with other tensors, by `id`, and with `of` applied to its kernels.

    Constructors would check shapes and types again, which took most of the time before a replay.
    """
    if id(one) in instead:
        return instead[id(one)]
    if isinstance(one, (LinearOperator, Distribution)):
        made = instead[id(one)] = object.__new__(type(one))
        vars(made).update(_alike(vars(one), instead, of))
        return made
    if isinstance(one, dict):
        return type(one)((name, _alike(value, instead, of)) for name, value in one.items())
    if type(one) is tuple:
        return tuple(_alike(value, instead, of) for value in one)
    if isinstance(one, Kernel):
        return instead.setdefault(id(one), of(one))
    if type(one) in PLAIN:
        return one
    raise _OtherError(f"an operator that holds an object of class {type(one).__name__}")  # perhaps computed tensors


class OfLosses(OfParameters):
    """A marginal likelihood of given tensors and of parameters, with its gradients by both."""

    def __init__(self, mll: Any) -> None:
        parameters = list(mll.parameters())
        wanted = [p for p in parameters if p.requires_grad]
        kind = type(mll), type(mll.model), len(wanted)
        super().__init__(kind, wanted, [p for p in parameters if not p.requires_grad])
        self.lock = Lock()
        self._class = type(mll.model)
        if self._until <= repeated._SPENT and not self._history.seconds:
            self._until = 0.0  # the hook has waited for some seconds

    def _judge(self) -> None:
        super()._judge()
        if self.serves:
            repaid.add(self._class)

    @abc.abstractmethod
    def computed(self, mll: Any, *call: Any) -> list[torch.Tensor]:
        """Return the library's marginal likelihood at the replay's inputs, and its gradients."""

    def stock(self, mll: Any, *call: Any) -> None:
        """Compute the marginal likelihood and its gradients by the library, at the replay's inputs."""
        try:
            self._expected = self.computed(mll, *call)
        except UnrecordedError:  # the library serves or raises
            self._expected = []

    def differentiated(self, loss: Any, leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return a marginal likelihood and its gradients by those leaves on which it depends."""
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
            raise UnrecordedError("a loss of several numbers, or without a gradient")
        found = super().differentiated(loss, leaves)
        if any(t.dtype is not loss.dtype for t in found):
            raise UnrecordedError("numbers of several dtypes")
        return found

    def plainly(
        self, mll: Any, values: Mapping[int, torch.Tensor], function: Callable[..., Any], *tensors: torch.Tensor
    ) -> Any:
        """Call a function of tensors while parameters of a marginal likelihood have `values`, keyed by their `id`."""
        from autokern.density.gaussian import replacing

        names = {name: values[id(p)] for name, p in mll.named_parameters() if id(p) in values}
        return replacing(mll, list(names), function)(*tensors, *names.values())

    def numbers(self, found: Any) -> Iterator[Any]:
        """Yield the marginal likelihood and its gradients."""
        yield from (t.numpy() for t in (self._expected if found is None else self._results))


class Loss(OfLosses):
    """A marginal likelihood, of a prior and a target that are given, and of kernel, noise and their priors."""

    name = "marginal likelihood"

    def library(self, mll: Any, stock: Any, ours: Any, prior: Any, target: Any) -> Any:
        """Return the marginal likelihood, by a candidate or by the library."""
        return ours(mll, prior, target)

    def stock(self, mll: Any, *call: Any) -> None:
        """Compute the marginal likelihood by the library, and time a step without a replay."""
        super().stock(mll, *call)
        first = self._expected and self._compared == 0 and not self._ran.has_warned
        for _ in range(3 if first else 0):  # the first time it takes twice as long
            self._timed(mll, call[1])

    def _timed(self, mll: Any, ours: Any) -> None:
        """Time a step without a replay, with its backward pass; on copies, since the caller's graph may have hooks."""
        given = self._given
        inside.active = False  # candidates may serve
        began = time.thread_time()
        found = ours(mll, given.prior(given.copies), given.copies[-1])
        leaves = (*(t for t in given.copies if t.requires_grad), *self._parameters)
        torch.autograd.grad(found, leaves, allow_unused=True)
        self._seconds = min(self._seconds, time.thread_time() - began)

    def consists(self, mll: Any, stock: Any, ours: Any, prior: Any, target: Any) -> Held | str:
        """Return the objects on which a marginal likelihood depends, or why it cannot be recorded."""
        given = Given.of(prior, target)
        if given is None:
            return "a prior that is evaluated already, or of another kind"
        self._given = given
        if prior.batch_shape or prior.loc.numel() > _LARGEST:
            return "a loss of several numbers, or many points"
        self._modules, self._methods = dict(mll._modules), _methods(mll)
        if not all(is_library(getattr(one, "__module__", "")) for one in (type(mll), *self._methods)):
            return "a method of your own"
        if any(True for _ in mll.model.added_loss_terms()):
            return "a loss that the model adds"
        priors = [one for _, *parts, _ in mll.model.named_priors() for one in parts]
        kernels = [lazy.kernel for lazy in given.lazies(prior)]
        self._outlines = list(map(memoized.outline, kernels))
        spaces = [getattr(one, name, {}) for one in mll.model.modules() for name in _SPACES]
        return self.held(mll.likelihood, *kernels, *priors, spaces=spaces)

    def evaluated(self, mll: Any, stock: Any, ours: Any, prior: Any, target: Any) -> Any:
        """Return prior, target and parameters, and a function for the marginal likelihood and its gradients."""
        return (*self._given.copies, *self._parameters), lambda: self.computed(mll, stock)

    def computed(self, mll: Any, stock: Any, *call: Any) -> list[torch.Tensor]:
        """Return the library's marginal likelihood of the copies, and its gradients by copies and parameters."""
        given = self._given
        with torch.enable_grad():
            loss = stock(mll, given.prior(given.copies), given.copies[-1])
            return self.differentiated(loss, (*(t for t in given.copies if t.requires_grad), *self._parameters))

    def _recorded(self, *call: Any) -> Any:
        self._seconds = math.inf  # so far, seconds of forward passes alone
        return super()._recorded(*call)

    def put(self, mll: Any, stock: Any, ours: Any, prior: Any, target: Any) -> bool:
        """Copy prior and target into the replay's inputs; false if their form is another one."""
        same = mll._modules == self._modules and _methods(mll) == self._methods
        return same and super().put() and self._given.take(prior, target)

    def result(
        self, results: tuple[torch.Tensor, ...], mll: Any, stock: Any, ours: Any, prior: Any, target: Any
    ) -> Any:
        """Return the marginal likelihood with its gradients, None if it is not finite."""
        given = self._given
        if not math.isfinite(results[0].item()):
            return None
        value, *slopes = (t.clone() for t in results)  # the next replay overwrites the results
        tensors, given.present = given.present, []
        wanted = [t for t in tensors if t.requires_grad]
        used = list(itertools.compress((*wanted, *self._parameters), self._used))
        own = sum(self._used[: len(wanted)])
        for lazy, outline in zip(given.lazies(prior), self._outlines, strict=True):
            memoized.remember(lazy, *outline)

        def plain(*values: torch.Tensor) -> Any:
            by_id = dict(zip(map(id, used), values, strict=True))
            whole = [by_id.get(id(t), t) for t in tensors]
            return self.plainly(mll, by_id, lambda *those: stock(mll, given.prior(those[:-1]), those[-1]), *whole)

        return computed(value, slopes, plain, *used[:own], saved=used[own:])


def _methods(mll: Any) -> list[Any]:
    """Return the functions that add the terms of priors and of added losses."""
    model = mll.model
    found = mll._add_other_terms, model.added_loss_terms, model.named_added_loss_terms, model.named_priors
    return [getattr(one, "__func__", one) for one in found]
