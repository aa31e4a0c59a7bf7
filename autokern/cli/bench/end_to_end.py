"""Real models with autokern off and on, in turn: training an exact GP, and one-point fantasy updates."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import gpytorch
import msgspec
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood

from autokern.hooks.install import enabled
from autokern.system.progress import Progress, silent

_SIDES: Mapping[str, Callable[[], AbstractContextManager[None]]] = {"off": nullcontext, "on": enabled}
_WARMUP = 3
"""Uncounted steps: in them autokern decides, and measures new problems."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One workload, off against on."""

    name: str
    dtype: str
    off: float  # median seconds of one step
    on: float
    speedup: float  # median of the paired ratios off over on
    low: float  # quartiles of these ratios
    high: float
    pairs: int
    difference: float  # relative gap between the final losses or predictions

    @property
    def is_slower(self) -> bool:
        """Whether it takes over 5 % longer than stock, and longer in three quarters of the pairs."""
        return self.speedup < 1 / 1.05 and self.high < 1.0


def slower(found: Iterable[Workload]) -> list[str]:
    """Return in words which workloads autokern makes slower on this machine, and what helps; nothing if none."""
    lines = [
        f"{one.name} in {one.dtype} is slower with autokern here: it takes {1 / one.speedup:.2f} times as long as stock"
        for one in found
        if one.is_slower
    ]
    advice = "`autokern calibrate --full` measures more sizes; AUTOKERN=0 leaves autokern out of a program"
    return [*lines, advice] if lines else []


class _Model(gpytorch.models.ExactGP):  # type: ignore[misc]
    """An exact GP with a constant mean and a scaled ARD Matérn 5/2 kernel."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__(x, y, GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=x.shape[-1]))
        self.to(x)

    def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        """Return the prior at points ``(n, d)``."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class _Training:
    """Each call is one step of Adam on the exact marginal log likelihood."""

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        self._model = _Model(*_data(n, dtype)).train()
        self._objective = ExactMarginalLogLikelihood(self._model.likelihood, self._model)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=0.05)
        self.result = math.nan

    def __call__(self) -> None:
        self._optimizer.zero_grad()
        loss = -self._objective(self._model(*self._model.train_inputs), self._model.train_targets)
        loss.backward()
        self._optimizer.step()
        self.result = loss.item()


class _Stream:
    """Each call adds one point by a fantasy update and predicts at a fixed one."""

    def __init__(self, n: int, dtype: torch.dtype, most: int) -> None:
        x, y = _data(n + most, dtype)
        self._model, self._rest = _Model(x[:n], y[:n]).eval(), zip(x[n:], y[n:], strict=True)
        self._at = x[:1] + 0.05
        self.result = math.nan
        with torch.no_grad():
            self._model(self._at)

    def __call__(self) -> None:
        x, y = next(self._rest)
        with torch.no_grad():
            self._model = self._model.get_fantasy_model(x.unsqueeze(0), y.unsqueeze(0))
            self.result = self._model(self._at).mean.item()


def _data(n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    x = torch.rand(n, 6, generator=generator, dtype=torch.float64)
    y = (3 * x[:, 0]).sin() + x[:, 1] * x[:, 2] + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def end_to_end(
    deadline: float, *, rounds: int = 20, dtypes: Iterable[str] = ("float32", "float64"), progress: Progress = silent
) -> list[Workload]:
    """Time training steps at n = 500 and one-point updates at n = 400, off against on, step by step in turn.

    A workload ends at the deadline with the pairs that it has.
    """
    makers: dict[str, Callable[[torch.dtype], _Training | _Stream]] = {
        "training step, n=500": lambda dtype: _Training(500, dtype),
        "one-point update, n=400": lambda dtype: _Stream(400, dtype, _WARMUP + rounds),
    }
    plan, found = list(itertools.product(dtypes, makers.items())), []
    for index, (dtype, (name, make)) in enumerate(plan):
        progress(index / len(plan), f"{name}, {dtype}")
        share = (deadline - time.perf_counter()) / (len(plan) - index)
        found.append(_workload(name, dtype, make, rounds=rounds, until=time.perf_counter() + share))
    progress(1.0, "done")
    return found


def _workload(
    name: str, dtype: str, make: Callable[[torch.dtype], _Training | _Stream], *, rounds: int, until: float
) -> Workload:
    steps = {}
    for side, switch in _SIDES.items():
        with switch():
            steps[side] = make(getattr(torch, dtype))
    seconds: dict[str, list[float]] = {side: [] for side in _SIDES}
    for turn in range(_WARMUP + rounds):
        for side in ("off", "on") if turn % 2 == 0 else ("on", "off"):
            gc.collect(0)
            with _SIDES[side]():
                start = time.perf_counter()
                steps[side]()
                seconds[side].append(time.perf_counter() - start)
        if turn >= _WARMUP + 2 and time.perf_counter() > until:
            break
    kept = {side: values[_WARMUP:] for side, values in seconds.items()}
    ratios = [a / b for a, b in zip(kept["off"], kept["on"], strict=True)]
    low, median, high = statistics.quantiles(ratios if ratios[1:] else 2 * ratios, n=4, method="inclusive")
    off, on = (steps[side].result for side in ("off", "on"))
    return Workload(
        name=name,
        dtype=dtype,
        off=statistics.median(kept["off"]),
        on=statistics.median(kept["on"]),
        speedup=median,
        low=low,
        high=high,
        pairs=len(kept["on"]),
        difference=abs(on - off) / max(abs(off), 1e-12),
    )
