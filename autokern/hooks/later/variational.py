"""Training steps of variational models, ``mll(model(x), y)`` as a whole, replayed (`repeated`).

A recording has two parts: the model's call, and the marginal likelihood with its backward pass. The first part runs
when the model is called. The returned distribution has a graph of its own for uses other than the loss, whose backward
pass computes by the library.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from torch.utils._python_dispatch import _get_current_dispatch_mode

from autokern.core.autograd import Unsaved, computed
from autokern.core.errors import caught
from autokern.core.replay import Held
from autokern.core.replay.left import Left
from autokern.core.replay.operations import Replay, UnrecordedError
from autokern.core.replay.recording import Recorder
from autokern.core.state import Beside, Weak, inside
from autokern.hooks.bypass import may_replay
from autokern.hooks.later import repeated
from autokern.hooks.later.losses import Given, OfLosses
from autokern.model.memoized import frozen
from autokern.system import host

_OFTEN = 8
_steps: Beside[_Step] = Beside()
_calls: Weak[tuple[Call, Any]] = Weak()  # by distribution: the library's function that returned it, and its points
Call = Callable[..., Any]


def called(model: Any, stock: Call, x: Any) -> Any:
    """Return a variational model's distribution at some points in training, by a replay or by the library."""
    known, formal = _steps.get(model), inside.having(formal=True)(stock)
    found = None if known is None or known.lock.entered() else known.predicted(model, formal, x)
    if found is None:  # calls of a model that is not recorded may be served by the op `variational`
        found = formal(model, x) if known is not None and known.serves and may_replay() else stock(model, x)
    if isinstance(found, MultivariateNormal):
        _calls.put(found, (formal, x))
    return found


def loss(mll: Any, stock: Call, distribution: Any, target: Any) -> Any:
    """Return a marginal likelihood by a replay or by the library's function `stock`."""
    known, call = _steps.get(mll.model), _calls.get(distribution)
    if known is None or known.mll() is not mll:
        known = _steps.put(mll.model, _Step(mll))
    with inside.having(repeated=True):  # the bound of a deep model calls that of its last layer
        if call is None or known.lock.entered():
            return stock(mll, distribution, target)
        with known.lock.here():
            return known.call(mll, stock, *call, distribution, target)


def _is_plain(x: Any) -> bool:
    plain = type(x) is torch.Tensor and x.layout is torch.strided and x.is_cpu
    return plain and not x.requires_grad and not x.is_inference()


class _Step(OfLosses):
    """A training step of a variational model: of points, targets, and the parameters of model and likelihood."""

    name, repeatable, seeding, second = "training step", False, False, True
    again = 0  # how often the library has computed a replay's results again

    def __init__(self, mll: Any) -> None:
        super().__init__(mll)
        self.mll, self._left = weakref.ref(mll), Left(mll.model.modules())
        self._first: Replay | None = None
        self._latest: Any = None
        self._served: Any = None
        self._size: Any = None
        self._drawn: torch.Tensor | None = None  # random state of the latest model's call, None if it draws nothing

    def call(self, *call: Any) -> Any:
        """Return the marginal likelihood; a step is recorded after another one of its size."""
        if self._replay is None and call[-1].shape != self._size:
            self._count, self._size = min(self._count, 1), call[-1].shape
        return super().call(*call)

    def library(self, mll: Any, stock: Call, model: Call, x: Any, distribution: Any, target: Any) -> Any:
        return stock(mll, distribution, target) if self._served is None else self._served

    def consists(self, mll: Any, stock: Call, model: Call, x: Any, distribution: Any, target: Any) -> Held | str:
        if not (_is_plain(x) and _is_plain(target)):
            return "points or targets that require a gradient, or of another kind"
        self._left.find()
        self._as_left: Call = lambda module: module
        return self.held(mll, but=self._left.at)

    def evaluated(self, mll: Any, stock: Call, model: Call, x: Any, distribution: Any, target: Any) -> Any:
        self._x, self._y = x.detach().clone(), target.detach().clone()
        return (self._x, self._y, *self._parameters), lambda: self.computed(mll, stock, model)

    def computed(self, mll: Any, stock: Call, model: Call, *call: Any) -> list[torch.Tensor]:
        recorder: Any = _get_current_dispatch_mode()
        with torch.enable_grad(), self._left.aside() as before:
            distribution = _drawing(self._drawn, model, mll.model, self._x)
            if isinstance(recorder, Recorder):
                given = Given.of(distribution, self._y)
                if given is None:
                    raise UnrecordedError("a distribution of another kind")
                self._draws = recorder.draws
                left = self._left.computed(recorder, before, self._held)
                self._given, self._outs = given, [*(t.detach() for t in given.present[:-1]), *left]
                self._graded = [t.requires_grad for t in self._results_of(given)]
                given.present = []
                recorder.mark()
            found = stock(mll, distribution, self._y)
            if isinstance(recorder, Recorder) and self._left.has_grown():  # the loss evaluates what the call has left
                self._as_left = frozen
            return self.differentiated(found, self._parameters)

    def _results_of(self, given: Given) -> list[torch.Tensor]:
        """Return the tensors of a distribution, and those that its evaluation has left in modules."""
        return [*given.present[:-1], *self._left.tensors()]

    def _recorded(self, *call: Any) -> Any:
        self._seconds = math.inf  # so far, seconds of a part of the step
        found = self.library(*call)  # it has the graph of the caller's distribution
        self._served, after = found, host.random_states()  # the caller's program draws none of the numbers that follow
        try:
            super()._recorded(*call)
        except caught(Exception) as reason:
            self.end(str(reason))
        finally:
            self._served = None
            host.take_random_states(after, self.drawn)
        return found

    def made(self, recorder: Recorder) -> Replay:
        self._first, rest = recorder.parts(self._outs, *self._results)
        return rest

    def predicted(self, model: Any, stock: Call, x: Any) -> Any:
        """Return the distribution at some points by the first part of the recording, None if stock must run."""
        self._latest = None
        with self.lock.here():
            if self._first is None or not self.serves or not may_replay():
                return None
            began = time.thread_time()
            fits = _is_plain(x) and x.shape == self._x.shape and x.dtype is self._x.dtype and model.training
            if not (fits and OfLosses.put(self) and self.is_unchanged()):
                self.misfits()
                return None
            self._x.copy_(x)
            compared = self._compared < repeated._COMPARED or (self._count + 1) % repeated._EVERY == 0
            self._drawn = before = torch.get_rng_state() if self._draws or compared else None
            try:
                self._first.run()
            except caught(Exception):
                if before is not None:
                    torch.set_rng_state(before)
                return None
            self.earlier = time.thread_time() - began
            if compared:
                found, given = self._as_library(model, stock, x, before)
                if self._replay is None or given is None:
                    return found
                own, numbers = given.present[:-1], given.copies
            else:
                own, left = self._tensors(model, stock, x.clone())
                found, numbers = self._given.prior(own, _frozen), self._outs
                self._left.put(left, self._as_left)
            parts = [(t, t._version, then) for t, then in zip(own, numbers, strict=False)]
            versions = [p._version for p in self._parameters]
            self._latest = weakref.ref(found), found.loc, found._covar, parts, versions, self._left.present()
        return found

    def _as_library(self, model: Any, stock: Call, x: Any, before: Any) -> tuple[Any, Given | None]:
        """Return the library's distribution, whole and in parts, to which the first part is compared."""
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        with inside.having(active=True):  # the replay computes as stock does
            found = stock(model, x)
        given = Given.of(found, self._y)
        if given is None or given.form != self._given.form or not torch.equal(after, torch.get_rng_state()):
            self.end("a model's call differs from its replay in form or in random numbers")
        elif not all(map(self._are_close, self._outs, self._results_of(given))):
            self.end("a model's call differs from its replay")
        return found, given

    def _are_close(self, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        within = self.agreement * theirs.detach().abs().nan_to_num(0.0, 0.0, 0.0).amax() if theirs.numel() else 0.0
        return ours.shape == theirs.shape and torch.allclose(ours, theirs.detach(), 0.0, float(within), True)

    def _tensors(self, model: Any, stock: Call, x: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Yield the tensors of a distribution, and those left in the model, which have no reference to the model."""
        given = len(self._given.copies) - 1
        for of, at in ((lambda one: lambda: one), slice(given)), (weakref.ref, slice(given, None)):
            again = functools.partial(_again, of(self), of(model), stock, x, at, self._drawn)
            values, graded = [t.clone() for t in self._outs[at]], self._graded[at]
            wanted = list(itertools.compress(values, graded))
            found = iter(_Again.apply(again, wanted, *self._parameters))  # type: ignore[no-untyped-call]
            yield [next(found) if has else value for value, has in zip(values, graded, strict=True)]

    def _taken(self, model: Any, stock: Call, points: Any, drawn: Any) -> Given:
        """Return the library's distribution as it was recorded."""
        given = Given.of(_drawing(drawn, stock, model, points), self._y)
        if given is None or given.form != self._given.form:
            raise RuntimeError("a variational model's distribution has another form in the backward pass than before")
        return given

    def is_unchanged(self) -> bool:
        """Whether everything is as it was recorded; for this step, `predicted` may have checked it."""
        return self._latest is not None or super().is_unchanged()

    def put(self, mll: Any, stock: Call, model: Call, x: Any, distribution: Any, target: Any) -> bool:
        """Copy targets into the replay's inputs; false for a distribution that `predicted` has not returned."""
        latest, self._latest = self._latest, None
        if latest is None or latest[0]() is not distribution:
            return False
        _, mean, covariance, parts, versions, present = latest
        hooked = any(t.grad_fn is not None and (t._backward_hooks or t.retains_grad) for t, _, _ in parts)
        same = all(t._version == version and torch.equal(t, numbers) for t, version, numbers in parts)
        if hooked or not same or distribution.loc is not mean or distribution._covar is not covariance:
            return False
        if versions != [p._version for p in self._parameters] or not _is_plain(target):
            return False
        if target.shape != self._y.shape or target.dtype is not self._y.dtype:
            return False
        # what has changed since the model's call: objects, or what it has left
        if not self._held.is_as_before() or not all(map(operator.is_, self._left.present(), present)):
            return False
        self._y.copy_(target)
        return super().put()  # as in stock, values that were written to parameters after the model's call count

    def result(self, results: Any, mll: Any, stock: Call, model: Call, x: Any, distribution: Any, target: Any) -> Any:
        if not math.isfinite(results[0].item()):
            return None
        value, *slopes = (t.clone() for t in results)
        used, states = list(itertools.compress(self._parameters, self._used)), (self.state, self._drawn)
        points, goal = self._x.clone(), self._y.clone()  # the caller may overwrite those given

        def plain(*values: torch.Tensor) -> Any:
            by_id = dict(zip(map(id, used), values, strict=True))

            def bound() -> Any:
                return _drawing(states[0], stock, mll, _drawing(states[1], model, mll.model, points), goal)

            with self._left.aside(), self._held.as_kept(), inside.having(repeated=True):
                return self.plainly(mll, by_id, bound)

        return computed(value, slopes, plain, saved=used)


def _frozen(kernel: Any) -> Any:
    """Return a kernel whose deferred reads see the present values; the library copies parts of one with a batch."""
    return kernel if kernel.batch_shape else frozen(kernel)


def _drawing(state: torch.Tensor | None, function: Call, *args: Any) -> Any:
    """Call a function that draws its random numbers from an earlier state, if one is given."""
    if state is None:
        return function(*args)
    with host.random_states_kept():
        torch.set_rng_state(state)
        return function(*args)


def _again(step: Call, model: Call, stock: Call, points: Any, at: slice, drawn: Any, cotangents: Any) -> Any:
    """Return the gradients by the parameters, computed by the library, of tensors that a replay has computed."""
    graph, one = torch.is_grad_enabled(), step()
    one.again += 1
    if one.again >= max(_OFTEN, one.replays / 2) and one.serves:
        one.end("the library often computes the model's results again, for other uses than the loss")
    with torch.enable_grad(), one._left.aside(), one._held.as_kept():
        graded = [t for t in one._results_of(one._taken(model(), stock, points, drawn))[at] if t.requires_grad]
        # cotangents may depend on the parameters; but given as such, torch imports sympy (`plain_gradients`)
        found = graded if graph else sum((t * c.detach()).sum() for t, c in zip(graded, cotangents, strict=True))
    wanted = [p for p in one._parameters if p.requires_grad]  # the program may have frozen one since
    given = cotangents if graph else None
    slopes = iter(torch.autograd.grad(found, wanted, given, create_graph=graph, allow_unused=True))
    return [next(slopes) if p.requires_grad else None for p in one._parameters]


class _Again(torch.autograd.Function):
    """Values that were computed without a graph; their gradients are computed by the library."""

    @staticmethod
    def forward(ctx: Any, again: Any, values: Any, *parameters: torch.Tensor) -> Any:
        ctx.set_materialize_grads(True)
        ctx.again, ctx.unsaved = again, Unsaved(*parameters)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        ctx.unsaved.unchanged()  # raises where a parameter was written
        return None, None, *ctx.again(cotangents)
