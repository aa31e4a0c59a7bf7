"""Real models with autokern off and on, interleaved in one run; writes `end_to_end.json` and `co2.png`.

Three workloads: `diabetes` (exact training), `co2` (online learning, one fantasy update per week) and `cg` (conjugate
gradients on a dense kernel matrix). Each steps two independent copies in turn, one under stock and one under autokern,
and compares them pair by pair. Tables, the plot and the README's block are made in `figures.py`. This is a script: it
may import the public names of `autokern` and `figures`, and nothing but the tests imports it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import figures
import gpytorch
import linear_operator
import numpy as np
import psutil
import torch
from linear_operator.operators import DenseLinearOperator
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

SIDES = ("off", "on")
START, FORECAST, CHECK_EVERY = 100, 52, 200
RHS, ITERATIONS, CG_NOISE = 11, 20, 0.1

Toggles = Mapping[str, Callable[[], AbstractContextManager[Any]]]
Report = Callable[[str], None]


@dataclass(frozen=True)
class Scale:
    """How much of everything one run does: training steps, weeks of the stream, sizes and rounds of CG."""

    steps: int = 40
    last: int = 2200
    sizes: tuple[int, ...] = (1000, 2000, 4000, 8000)
    solves: int = 4
    warmup: int = 4


FULL = Scale()
QUICK = Scale(steps=12, last=500, sizes=(1000, 2000), solves=4, warmup=2)


# ---------------------------------------------------------------------------------------------------- comparing


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """Keep the garbage collector out of timed sections, and make collecting between them cheap."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def interleave(
    toggles: Toggles,
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 0,
    after: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return the seconds of `rounds` steps of each side, taken in turn; the side that goes first alternates.

    Entering the toggle is not timed: users enable once. Garbage is collected between rounds because a model replaced
    by its fantasy model is a reference cycle, which holds its matrices until the collector comes by; `after` is called
    before that.
    """
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    with quiet_collector():
        for turn in range(warmup + rounds):
            for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
                with toggles[side]():
                    start = time.perf_counter()
                    steps[side]()
                    elapsed = time.perf_counter() - start
                if turn >= warmup:
                    seconds[side].append(elapsed)
            after()
            gc.collect()
    return seconds


def compare(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the median seconds of each side, and median and quartiles of the paired ratios off / on."""
    ratios = np.divide(seconds["off"], seconds["on"])
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    medians = {side: statistics.median(seconds[side]) for side in SIDES}
    return {**medians, "ratio": middle, "quartiles": [low, high], "pairs": len(ratios)}


def difference(ours: Tensor, reference: Tensor) -> dict[str, float]:
    """Return the largest absolute difference, and the largest one relative to the reference, element by element."""
    gap = (ours - reference).abs().double()
    tiny = torch.finfo(reference.dtype).tiny
    return {"absolute": gap.max().item(), "relative": (gap / reference.abs().clamp_min(tiny)).max().item()}


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


# ------------------------------------------------------------------------------------------------------- models


class Regression(gpytorch.models.ExactGP):
    """An exact GP with constant mean."""

    def __init__(self, x: Tensor, y: Tensor, kernel: gpytorch.kernels.Kernel, noise_floor: float = 1e-4) -> None:
        constraint = gpytorch.constraints.GreaterThan(noise_floor)
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood(noise_constraint=constraint))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel
        self.to(x)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """Return the prior at `x`, shape ``(..., n, d)``."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Trainer:
    """A model, and one step of Adam on its exact marginal log likelihood per call."""

    def __init__(self, model: Regression, learning_rate: float = 0.05) -> None:
        self.model, self.loss = model, math.nan
        self.x, self.y = model.train_inputs[0], model.train_targets
        self.objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        free = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(free, lr=learning_rate)
        model.train()

    def __call__(self) -> None:
        """Take one step."""
        self.optimizer.zero_grad()
        loss = -self.objective(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.item()


def standardise(values: Tensor) -> Tensor:
    """Return the columns with mean 0 and standard deviation 1."""
    return (values - values.mean(0)) / values.std(0)


# ----------------------------------------------------------------------------------------------------- diabetes


def diabetes_data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scikit-learn's diabetes data, standardised: inputs ``(442, 10)`` and targets ``(442,)``."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=False)
    return standardise(torch.from_numpy(x)).to(dtype), standardise(torch.from_numpy(y)).to(dtype)


def ard_kernel(name: str, dimensions: int) -> gpytorch.kernels.Kernel:
    """Return a scaled ARD kernel, ``"rbf"`` or ``"matern52"``."""
    makers = {"rbf": gpytorch.kernels.RBFKernel, "matern52": gpytorch.kernels.MaternKernel}
    return gpytorch.kernels.ScaleKernel(makers[name](ard_num_dims=dimensions))


def positives(model: Regression) -> Tensor:
    """Return lengthscales, outputscale and noise as one vector."""
    kernel = model.covar_module
    parts = (kernel.base_kernel.lengthscale, kernel.outputscale, model.likelihood.noise)
    return torch.cat([part.detach().flatten() for part in parts])


def run_diabetes(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Train two copies of each model step by step, and compare times, final losses and hyperparameters."""
    cases = []
    for name in ("rbf", "matern52"):
        for dtype in (torch.float32, torch.float64):
            x, y = diabetes_data(dtype)
            trainers = {side: Trainer(Regression(x, y, ard_kernel(name, x.shape[-1]))) for side in SIDES}
            figure = compare(interleave(toggles, trainers, scale.steps, scale.warmup))
            off, on = (trainers[side] for side in SIDES)
            figure |= {"kernel": name, "dtype": str(dtype).removeprefix("torch."), "loss": off.loss}
            figure["loss_difference"] = abs(on.loss - off.loss)
            figure["hyperparameters"] = difference(positives(on.model), positives(off.model))
            cases.append(figure)
            report(f"diabetes {name} {figure['dtype']}: {figures.sentence(figure)}")
    n, d = x.shape
    return {"n": n, "d": d, "steps": scale.warmup + scale.steps, "cases": cases}


# ---------------------------------------------------------------------------------------------------------- co2


def co2_data() -> tuple[Tensor, Tensor]:
    """Return the weekly CO2 series of Mauna Loa: time ``(weeks, 1)`` and value ``(weeks,)``, both standardised.

    The 59 weeks without a value are interpolated, so that the stream has one update for every week.
    """
    from statsmodels.datasets import co2

    values = co2.load_pandas().data["co2"].interpolate().to_numpy(dtype=float)
    time_ = torch.arange(len(values), dtype=torch.float64).unsqueeze(-1)
    return standardise(time_), standardise(torch.tensor(values))


def co2_model(x: Tensor, y: Tensor) -> Regression:
    """Return trend (RBF, given) plus season (Matérn 5/2, to be fitted), with a noise that is not tiny."""
    season = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel())
    trend = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    model = Regression(x, y, trend + season, noise_floor=1e-3)
    trend.outputscale, trend.base_kernel.lengthscale = 1.0, 1.0
    season.outputscale, season.base_kernel.lengthscale = 0.05, 0.05
    model.likelihood.noise = 0.01
    trend.requires_grad_(False)
    return model


def conditioned(x: Tensor, y: Tensor, state: Mapping[str, Tensor]) -> Regression:
    """Return a new model on all of `x` and `y` with given hyperparameters, ready to predict."""
    model = co2_model(x, y)
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def predict(model: Regression, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance at `x` as a streaming user reads them: from the model's caches."""
    with gpytorch.settings.fast_pred_var():
        posterior = model(x)
        return posterior.mean, posterior.variance


class Stream:
    """A model that takes in one week per call; the model of the week before is dropped."""

    def __init__(self, x: Tensor, y: Tensor, state: Mapping[str, Tensor]) -> None:
        self.x, self.y, self.n = x, y, START
        self.model = conditioned(x[:START], y[:START], state)
        predict(self.model, x[:1])

    @torch.no_grad()
    def __call__(self) -> None:
        """Update the model with the next week."""
        week = slice(self.n, self.n + 1)
        self.model = self.model.get_fantasy_model(self.x[week], self.y[week])
        self.n += 1


def started(x: Tensor, y: Tensor, state: Mapping[str, Tensor], toggles: Toggles) -> dict[str, Stream]:
    """Return a stream for each side, each started under its own toggle."""
    streams = {}
    for side in SIDES:
        with toggles[side]():
            streams[side] = Stream(x, y, state)
    return streams


def refit_errors(streams: Mapping[str, Stream], state: Mapping[str, Tensor], toggles: Toggles) -> dict[str, Any]:
    """Compare forecasts of both streams, and of a refit under default settings, with an exact refit in stock.

    Above `max_cholesky_size` rows a refit under the library's defaults is conjugate gradients to a tolerance and a
    Lanczos root of rank 100, far less accurate than the streams: the truth has to be a Cholesky refit.
    """
    stream = streams["off"]
    x, y, n = stream.x, stream.y, stream.n
    ahead = x[n : n + FORECAST]
    with gpytorch.settings.max_cholesky_size(n), torch.no_grad():
        posterior = conditioned(x[:n], y[:n], state)(ahead)
        mean, variance = posterior.mean, posterior.variance
    forecasts = {}
    for side in SIDES:
        with toggles[side]():
            forecasts[side] = predict(streams[side].model, ahead)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        forecasts["default_refit"] = predict(conditioned(x[:n], y[:n], state), ahead)
    errors: dict[str, Any] = {"n": n}
    for name, forecast in forecasts.items():
        pairs = zip(("mean", "variance"), forecast, (mean, variance), strict=True)
        errors[name] = {what: difference(ours, truth)["absolute"] for what, ours, truth in pairs}
    return errors


def run_co2(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Stream the series into two models week by week, and compare times and, every 200 weeks, forecasts."""
    x, y = co2_data()
    fitter = Trainer(co2_model(x[:START], y[:START]))
    for _ in range(200):
        fitter()
    state = fitter.model.state_dict()
    interleave(toggles, started(x, y, state, toggles), scale.warmup)
    streams = started(x, y, state, toggles)
    process, resident, checks = psutil.Process(), [], []
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    while (n := streams["off"].n) < scale.last:
        weeks = min(scale.last, n - n % CHECK_EVERY + CHECK_EVERY) - n
        block = interleave(toggles, streams, weeks, after=lambda: resident.append(process.memory_info().rss))
        for side in SIDES:
            seconds[side] += block[side]
        checks.append(refit_errors(streams, state, toggles))
        report(f"co2 n={n + weeks}: {figures.sentence(compare({side: block[side][-25:] for side in SIDES}))}")
    return {
        "start": START,
        "last": scale.last,
        "noise": fitter.model.likelihood.noise.item(),
        "seconds": {side: [round(value, 7) for value in seconds[side]] for side in SIDES},
        "total": {side: sum(seconds[side]) for side in SIDES},
        "at": [figures.window(seconds, START, n, compare) for n in figures.marks(START, scale.last)],
        "checks": checks,
        "peak_resident_bytes": max(resident),
    }


# ----------------------------------------------------------------------------------------------------------- cg


def dense_kernel(n: int, dtype: torch.dtype) -> Tensor:
    """Return an RBF kernel matrix plus noise, ``(n, n)``, on uniform points of the unit cube, built in place."""
    points = torch.rand(n, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(dtype)
    covariance = torch.cdist(points, points).square_().mul_(-0.5 / 0.2**2).exp_()
    covariance.diagonal().add_(CG_NOISE)
    return covariance


def run_cg(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Solve by a fixed number of CG iterations through `DenseLinearOperator`, and compare times and iterates."""
    cases = []
    for n in scale.sizes:
        for dtype in (torch.float32, torch.float64):
            operator = DenseLinearOperator(dense_kernel(n, dtype))
            rhs = torch.randn(n, RHS, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
            iterates: dict[str, Tensor] = {}
            steps = {side: Solve(operator, rhs, iterates, side) for side in SIDES}
            figure = compare(interleave(toggles, steps, scale.solves, warmup=1))
            scales = iterates["off"].abs().amax(0)
            gap = ((iterates["on"] - iterates["off"]).abs().amax(0) / scales).max().item()
            residual = {side: ((operator.tensor @ iterates[side] - rhs).norm() / rhs.norm()).item() for side in SIDES}
            figure |= {"n": n, "dtype": str(dtype).removeprefix("torch."), "difference": gap, "residual": residual}
            cases.append(figure)
            report(f"cg n={n} {figure['dtype']}: {figures.sentence(figure)}")
    return {"rhs": RHS, "iterations": ITERATIONS, "cases": cases, "geomean": geomean([c["ratio"] for c in cases])}


@dataclass(frozen=True)
class Solve:
    """One run of CG, with no stopping rule, as `LinearOperator.solve` would start it; keeps its last iterate."""

    operator: DenseLinearOperator
    rhs: Tensor
    iterates: dict[str, Tensor]
    side: str

    def __call__(self) -> None:
        """Run all iterations."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)  # says that the tolerance of 0 was not reached
            solve, limits = linear_operator.utils.linear_cg, {"max_iter": ITERATIONS, "max_tridiag_iter": ITERATIONS}
            self.iterates[self.side] = solve(self.operator._matmul, self.rhs, tolerance=0.0, **limits)


# ------------------------------------------------------------------------------------------------- command line

WORKLOADS: dict[str, Callable[[Scale, Toggles, Report], dict[str, Any]]] = {
    "diabetes": run_diabetes,
    "co2": run_co2,
    "cg": run_cg,
}


def describe(quick: bool, host: Mapping[str, Any]) -> dict[str, Any]:
    """Return when, on what and with which versions a run was made."""
    modules = {"torch": torch, "gpytorch": gpytorch, "linear_operator": linear_operator}
    versions = {"python": platform.python_version()} | {name: str(m.__version__) for name, m in modules.items()}
    fallback = {"system": platform.system(), "machine": platform.machine(), "threads": torch.get_num_threads()}
    date = datetime.now(timezone.utc).date().isoformat()
    return {"schema": 1, "date": date, "quick": quick, "host": dict(host) or fallback, "versions": versions}


def plain(value: Any) -> Any:
    """Return `value` with everything that JSON does not know as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return value if isinstance(value, (int, float, str, type(None))) else str(value)


def measure(names: Sequence[str], quick: bool, report: Report) -> dict[str, Any]:
    """Calibrate if nothing is known of this machine, run the workloads, and return all figures."""
    import autokern

    if not autokern.profile().trials:
        autokern.calibrate(level="quick", budget=20.0)
    toggles: Toggles = {"off": contextlib.nullcontext, "on": autokern.enabled}
    results = describe(quick, autokern.profile().host)
    for name in names:
        results[name] = WORKLOADS[name](QUICK if quick else FULL, toggles, report)
    return {**results, "calls": plain(autokern.stats())}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; 0 is fine, 1 a README that does not hold the figures of the JSON, 2 bad usage."""
    parser = argparse.ArgumentParser(description="Compare real models with autokern off and on.")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"any of {', '.join(WORKLOADS)} (all)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a minute in all")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent, help="folder of the JSON and the plot")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="rewrite the block of figures in FILE, run nothing")
    parser.add_argument("--check", type=Path, metavar="FILE", help="exit 1 if the block in FILE is not that of the JSON")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.workloads) - set(WORKLOADS)):
        parser.error(f"unknown workload {', '.join(unknown)}; known are {', '.join(WORKLOADS)}")
    if options.readme and options.check:
        parser.error("--readme and --check exclude each other")
    if document := options.readme or options.check:
        return figures.refresh(document, options.output_dir / figures.JSON_NAME, check=bool(options.check))
    names = [name for name in WORKLOADS if name in (options.workloads or WORKLOADS)]
    results = measure(names, options.quick, figures.console.log)
    figures.write(results, options.output_dir)
    figures.show(results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
