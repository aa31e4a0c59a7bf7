"""Hooks into BoTorch's optimisation of acquisition functions: one thread, replayed evaluations, starts as a batch.

Small acquisition functions do not gain from more threads on a quiet machine. Beside another busy process, the threads
wait for each other at every operation, which takes 4 to 40 times as long.
BoTorch 0.18.1 optimises the starts as a batch by internals of SciPy's L-BFGS-B, which it supports up to SciPy 1.17.
With a later SciPy, all starts become one problem of many variables, and the posterior is evaluated two to four times
as often. The internals of SciPy 1.18 take the same arguments, unless it is built with 64-bit integers.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import scipy
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from autokern.core.errors import caught, unless_it_fails
from autokern.core.replay import Held, held
from autokern.hooks.bypass import stay_out
from autokern.hooks.install import hook
from autokern.hooks.later.repeated import Repeated
from autokern.system import host, threads

_MOST = 2**16  # most elements of a tensor in each evaluation: torch shares an operation on it among two threads at most
_MOST_ONCE = 2**20  # most elements in the single evaluation of the raw samples, from which the starts are chosen
_MOST_POINTS = 512  # most training points: each evaluation multiplies matrices of their number of rows
_MOST_HELD = 2**18  # most elements of all tensors that an acquisition function holds, to record it
_KNOWN = {f"botorch.acquisition.{name}" for name in ("analytic", "knowledge_gradient", "logei", "monte_carlo")}
_KNOWN |= {f"botorch.acquisition.multi_objective.{name}" for name in ("logei", "monte_carlo")}
"""Modules of acquisition functions whose tensors `_is_small` counts."""
_PLAIN = {f"botorch.acquisition.objective.{name}MCObjective" for name in ("Identity", "Linear")}
_PLAIN |= {
    f"botorch.acquisition.multi_objective.objective.{name}MCMultiOutputObjective" for name in ("Identity", "Weighted")
}
"""Objectives that create no larger tensor; others may call the user's functions."""


def on_one_thread(optimize: Any) -> bool:
    """Declare the hook of `botorch.optim.optimize`; return False to be called again later."""
    stock = getattr(optimize, "_optimize_acqf", None)  # warnings inside name its line, not ours
    if type(stock) is not FunctionType or stock.__module__ != optimize.__name__:
        return stock is None  # a mock may be removed later
    alone = threads.limited(stock, 1)

    @hook(optimize, "_optimize_acqf")
    def optimised(opt_inputs: Any) -> Any:
        return (alone if not stay_out() and _is_small(opt_inputs) else stock)(opt_inputs)

    return True


@unless_it_fails
def _is_small(inputs: Any) -> bool:
    """Whether all tensors of an evaluation are small, by an estimate; a failure means no."""
    acquisition, options = inputs.acq_function, inputs.options or {}
    objective = getattr(acquisition, "objective", None)
    if not inputs.bounds.is_cpu or type(acquisition).__module__ not in _KNOWN:
        return False
    if objective is not None and f"{type(objective).__module__}.{type(objective).__name__}" not in _PLAIN:
        return False
    models = getattr(acquisition.model, "models", [acquisition.model])
    if not all(_is_plain(model) for model in models):
        return False
    sizes = [math.prod(model.train_inputs[0].shape[:-1]) for model in models]
    augmented = getattr(acquisition, "get_augmented_q_batch_size", None)
    q = inputs.q if augmented is None else augmented(inputs.q)
    points = q + sum(_rows(getattr(acquisition, name, None)) for name in ("X_pending", "X_baseline"))
    sampler = getattr(acquisition, "sampler", None)
    samples = 1 if sampler is None else math.prod(sampler.sample_shape)
    boxes = _rows(getattr(acquisition, "cell_lower_bounds", None)) or 1
    each = points * (sum(sizes) + samples * acquisition.model.num_outputs * boxes)
    fantasies = getattr(acquisition, "num_fantasies", 0) * max(sizes) ** 2
    restarts = min(inputs.num_restarts, options.get("batch_limit", inputs.num_restarts))
    few = max(model.train_inputs[0].shape[-2] for model in models) <= _MOST_POINTS
    return bool(few and restarts * max(each, fantasies) <= _MOST and (inputs.raw_samples or 0) * each <= _MOST_ONCE)


def _is_plain(model: Any) -> bool:
    """Whether a model is BoTorch's, without an input transform that turns one point into several."""
    several = getattr(getattr(model, "input_transform", None), "is_one_to_many", False)
    return type(model).__module__.startswith("botorch.models.") and not several


def _rows(points: Any) -> int:
    return 0 if points is None else int(points.shape[-2])


TRIED = (1, 18)  # the SciPy release whose internals were compared; a later release may change their arguments
_REASON = "Scipy version"
_DTYPES = torch.float32, torch.float64
_FEW = 0.5  # part of the recorded sets up to which the remaining sets are recorded anew
_ALIKE = 1e-2  # the largest difference between the library with and without candidates, where only rounding differs
_HYPERVOLUME = "botorch.acquisition.multi_objective.logei"


def replayed(gen: Any) -> bool:
    """Declare the hooks of `botorch.generation.gen` that are needed, and return True."""
    make = getattr(gen, "_get_f_np_wrapper", None)
    if type(make) is FunctionType:

        @hook(gen, "_get_f_np_wrapper")
        def wrapper_of(shapeX: Any, device: Any, dtype: Any, with_grad: Any) -> Any:
            stock = make(shapeX, device, dtype, with_grad)
            if with_grad is not True or device.type != "cpu" or dtype not in _DTYPES:
                return stock
            known: dict[int, _Acquisition] = {}

            def f_np_wrapper(x: Any, f: Any, fixed_features: Any = None, batch_indices: Any = None) -> Any:
                one = known.get(id(f)) or known.setdefault(id(f), _Acquisition(stock, f, shapeX[1:], dtype, gen))
                return one.call(x, fixed_features, batch_indices)

            return f_np_wrapper

    why = getattr(gen, "get_reasons_against_fast_path", None)
    if not leaves_batch(gen) or type(why) is not FunctionType:
        return True

    @hook(gen, "get_reasons_against_fast_path")
    def reasons(*args: Any, **kwargs: Any) -> Any:
        found = why(*args, **kwargs)
        others = [reason for reason in found if not reason.startswith(_REASON)]
        if others == found or stay_out() or obstacle() is not None:
            return found
        try:
            from botorch.optim.batched_lbfgs_b import fmin_l_bfgs_b_batched, translate_bounds_for_lbfgsb
        except caught(Exception):
            return found
        # BoTorch's module imports these only with a SciPy release that it supports
        vars(gen).setdefault("fmin_l_bfgs_b_batched", fmin_l_bfgs_b_batched)
        vars(gen).setdefault("translate_bounds_for_lbfgsb", translate_bounds_for_lbfgsb)
        return others

    return True


def leaves_batch(gen: Any) -> bool:
    """Whether BoTorch treats the installed SciPy as untested."""
    check, minor = (getattr(gen, name, None) for name in ("check_scipy_version_at_least", "SCIPY_UNTESTED_VERSION"))
    return check is not None and minor is not None and bool(check(minor=minor))


def scipy_release() -> tuple[int, ...]:
    """Return the first two numbers of SciPy's version."""
    return tuple(map(int, scipy.__version__.split(".")[:2]))


def obstacle() -> str | None:
    """Return why the starts cannot be optimised as a batch, None if they can."""
    from scipy.optimize import _lbfgsb_py

    if scipy_release() != TRIED:
        return "autokern has not tried this SciPy release"
    return "this SciPy is built with 64-bit integers" if getattr(_lbfgsb_py, "HAS_ILP64", False) else None


class _Extension:
    """A module in C++ whose functions are recorded as operations; other threads call them as usual."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        function: Callable[..., torch.Tensor] = getattr(self._module, name)

        def called(*args: Any) -> torch.Tensor:
            mode: Any = _get_current_dispatch_mode()
            return mode.called(function, args) if hasattr(mode, "called") else function(*args)

        return called


@contextlib.contextmanager
def _extensions() -> Iterator[None]:
    """Let a recording see the calls of BoTorch's kernel in C++ as operations, while this is entered."""
    module: Any = sys.modules.get(_HYPERVOLUME)
    kernel = getattr(module, "_C", None)
    if type(kernel) is not ModuleType:
        yield
        return
    try:
        module._C = _Extension(kernel)
        yield
    finally:
        module._C = kernel


class _Acquisition(Repeated):
    """A function of sets of points, some of which the optimiser drops when they have converged."""

    name, watched = "acquisition function", False

    def __init__(self, stock: Any, f: Any, shape: Any, dtype: torch.dtype, gen: Any) -> None:
        self._stock, self._f, self._shape, self._dtype, self._gen = stock, f, tuple(shape), dtype, gen
        cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
        known = set(cells) == {"acquisition_function"} and f.__module__ == gen.__name__
        self._called = cells["acquisition_function"].cell_contents if known else None
        sampler: Any = sys.modules.get("botorch.sampling.base")
        self.seeding = getattr(getattr(sampler, "MCSampler", _Acquisition).__init__, "__code__", None)
        self._wasted = 0.0
        super().__init__((type(self._called), self._shape), [dtype])

    def library(self, x: np.ndarray, fixed: Any, rows: Any) -> Any:
        return self._stock(x, self._f, fixed) if rows is None else self._stock(x, self._f, fixed, rows)

    def consists(self, x: np.ndarray, fixed: Any, rows: Any) -> Held | str:
        if self._called is None:
            return "it is more than an acquisition function"
        if not np.isfinite(x).all() or any(isinstance(v, torch.Tensor) for v in (fixed or {}).values()):
            return "its points are not finite, or its fixed features are tensors"
        return held(self._called, most=_MOST_HELD)

    def evaluated(self, x: np.ndarray, fixed: Any, rows: Any) -> Any:
        at = torch.tensor(x, dtype=self._dtype).view(-1, *self._shape).requires_grad_(True)
        self._points, self._fewer = at.detach(), set[int]()

        def compute() -> tuple[torch.Tensor, ...]:
            with _extensions():
                whole = (
                    self._gen.fix_features(at, fixed, False)
                    if fixed
                    else at.clone(memory_format=torch.contiguous_format)
                )
                losses = self._f(whole)
                loss = losses.sum()
                return losses, loss, *torch.autograd.grad(loss, at)

        return (at,), compute

    def _recorded(self, *call: Any) -> Any:
        """Evaluate again with candidates, some of which compute gradients that the library loses."""
        before = host.random_states()
        found = super()._recorded(*call)
        if self._replay is None:
            return found
        host.take_random_states(before)
        ours = self.library(*call)
        self._held.renew()
        if not self._agree([np.asarray(of) for of in found], [np.asarray(of) for of in ours], _ALIKE):
            self.end("its gradients are not those of the library alone")
        return ours

    def outgrown(self, x: np.ndarray, fixed: Any, rows: Any) -> bool:
        """Whether replays of dropped sets have taken as long as another recording does (the ski-rental problem)."""
        part = self._sets(x) / len(self._points)
        lost = self._seconds - self._running if self.draws and part < 1 else self._running * (1 - part)
        self._wasted += lost if math.isfinite(self.price) else 0.0
        if (part > _FEW and not self.draws) or self._wasted < self.price or not self._history.shrinks:
            return False
        self._wasted = 0.0
        self.start_anew(larger=self._running)
        return True

    def put(self, x: np.ndarray, fixed: Any, rows: Any) -> bool:
        """Copy points into the replay's inputs; sets that were dropped keep their last points."""
        sets, recorded = self._sets(x), len(self._points)
        apart = rows is not None and self._results[0].shape == (recorded,)
        fits = sets == recorded or (sets < recorded and apart and not self.draws)
        if not fits or not np.isfinite(x).all():
            return False
        # the library's functions treat sets apart; those of the user's may read how many there are
        self.unlike = sets < recorded and (sets not in self._fewer if self._held.own else not self._fewer)
        self._fewer |= {sets} - {recorded}
        self._points[:sets].copy_(torch.from_numpy(x).view(sets, *self._shape))
        return True

    def result(self, results: tuple[torch.Tensor, ...], x: np.ndarray, fixed: Any, rows: Any) -> Any:
        """Return values and gradient of the first points, None if a gradient is not finite."""
        losses, loss, gradient = results
        slopes = gradient.numpy().astype(np.float64).ravel()[: x.size].reshape(x.shape)
        if not np.isfinite(slopes).all():
            return None
        return (loss.item() if rows is None else losses.numpy().reshape(-1)[: self._sets(x)].copy()), slopes

    def _sets(self, x: np.ndarray) -> int:
        return int(x.size // max(1, math.prod(self._shape)))

    def numbers(self, found: Any) -> Any:
        return found
