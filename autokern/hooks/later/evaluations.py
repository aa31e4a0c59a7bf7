"""Hook into BoTorch: the evaluations of an acquisition function in one optimisation, replayed (`repeated`)."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from autokern.core.replay.held import Held, held
from autokern.core.replay.recording import Extension
from autokern.hooks.install import hook
from autokern.hooks.later.repeated import Repeated

_DTYPES = torch.float32, torch.float64
_SINGLE = 1e-4
"""The largest difference in single precision, where BLAS rounds products of fewer sets otherwise."""
_HYPERVOLUME = "botorch.acquisition.multi_objective.logei"
Found = tuple[Any, np.ndarray]


def declare(gen: Any) -> None:
    """Declare the hook of the module that calls optimisers."""
    make = getattr(gen, "_get_f_np_wrapper", None)
    if type(make) is not FunctionType:
        return

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


def with_features(x: Any, features: Any, replaces: Any) -> torch.Tensor | None:
    """Return points with fixed features, as BoTorch's `fix_features` does; None where stock must run."""
    if type(x) is not torch.Tensor or type(features) is not dict or type(replaces) is not bool or not x.dim():
        return None
    width = x.shape[-1] + (0 if replaces else len(features))
    plain = all(type(at) is int and 0 <= at < width and type(v) in (int, float) for at, v in features.items())
    if not plain or x.layout is not torch.strided:
        return None
    if not features:
        return x.clone(memory_format=torch.contiguous_format)
    free = [at for at in range(width) if at not in features]
    found = x.new_empty(*x.shape[:-1], width)
    for at, value in features.items():
        found[..., at] = value
    found[..., free] = x[..., free] if replaces else x
    return found


@contextlib.contextmanager
def _extensions() -> Iterator[None]:
    """Let a recording see the calls of BoTorch's kernel in C++ as operations, while this is entered."""
    module: Any = sys.modules.get(_HYPERVOLUME)
    kernel = getattr(module, "_C", None)
    if type(kernel) is not ModuleType:
        yield
        return
    try:
        module._C = Extension(kernel)
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
        super().__init__((type(self._called), self._shape))
        if dtype is torch.float32:
            self.agreement = _SINGLE

    def library(self, x: np.ndarray, fixed: Any, rows: Any) -> Found:
        """Return values and gradient at some points."""
        found: Found = self._stock(x, self._f, fixed) if rows is None else self._stock(x, self._f, fixed, rows)
        return found

    def consists(self, x: np.ndarray, fixed: Any, rows: Any) -> Held | str:
        """Return what the function consists of, or why it cannot be recorded."""
        if self._called is None:
            return "it is not an acquisition function alone"
        if not np.isfinite(x).all() or any(isinstance(v, torch.Tensor) for v in (fixed or {}).values()):
            return "its points are not finite, or have fixed features of their own"
        return held(self._called)

    def evaluated(self, x: np.ndarray, fixed: Any, rows: Any) -> Any:
        """Return the points, and what computes values, their sum, and its gradient."""
        at = torch.tensor(x, dtype=self._dtype).view(-1, *self._shape).requires_grad_(True)
        self._points, self._fewer = at.detach(), False

        def compute() -> tuple[torch.Tensor, ...]:
            with _extensions():
                whole = with_features(at, fixed or {}, False)
                losses = self._f(self._gen.fix_features(at, fixed, False) if whole is None else whole)
                loss = losses.sum()
                return losses, loss, *torch.autograd.grad(loss, at)

        return (at,), compute

    def put(self, x: np.ndarray, fixed: Any, rows: Any) -> bool:
        """Write points to where the recorded ones were; sets that were dropped keep their last points."""
        sets, recorded = self._sets(x), len(self._points)
        apart = rows is not None and self._results[0].shape == (recorded,)
        fits = sets == recorded or (sets < recorded and apart)
        if not fits or not np.isfinite(x).all():
            return False
        self.unlike, self._fewer = sets < recorded and not self._fewer, self._fewer or sets < recorded
        self._points[:sets].copy_(torch.from_numpy(x).view(sets, *self._shape))
        return True

    def result(self, results: tuple[torch.Tensor, ...], x: np.ndarray, fixed: Any, rows: Any) -> Found | None:
        """Return values and gradient of the first points, None if a gradient is not finite."""
        losses, loss, gradient = results
        slopes = gradient.numpy().astype(np.float64).ravel()[: x.size].reshape(x.shape)
        if not np.isfinite(slopes).all():
            return None
        return (loss.item() if rows is None else losses.numpy().reshape(-1)[: self._sets(x)].copy()), slopes

    def _sets(self, x: np.ndarray) -> int:
        return int(x.size // max(1, math.prod(self._shape)))

    def numbers(self, found: Found) -> Found:
        """Return values and gradient."""
        return found
