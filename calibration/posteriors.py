"""Predictions and online learning for `end_to_end.py`.

`posterior` times a model's first prediction and a later one; `points` asks for very many test points, in processes of
their own so that their memory is seen; `fantasies` times one update at several sizes, and looks at what 500 of them
leave of the accuracy; `stream` takes 4,900 points one by one.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import gpytorch
import psutil
import torch
from children import status
from measuring import SIDES, Report, Scale, Toggles, compare, interleave, largest, nothing
from rows import sentence
from torch import Tensor
from training import forced_exact
from workloads import Regression, noisy, scaled, uniform

DIMENSIONS = 4
NOISE = 0.01
NEW_POINTS = 100
FEW = 100
UPDATED = (1, 2)
SHORT = 3


def fitted(n: int, d: int = DIMENSIONS) -> Regression:
    """Return a model on n points of a smooth function with given hyperparameters, ready to predict, in float64."""
    x = uniform(n, d, seed=n)
    model = Regression(x, noisy((3 * x.sum(-1)).sin(), seed=n + 1), scaled("rbf", d))
    model.covar_module.base_kernel.lengthscale = 0.5
    model.likelihood.noise = NOISE
    return model.eval()


class Prediction:
    """Predictions of noisy values at new points; each call reads means and variances."""

    def __init__(self, n: int, first: bool, fast: bool) -> None:
        self.model, self.first, self.fast = fitted(n), first, fast
        self.x = uniform(NEW_POINTS, DIMENSIONS, seed=7)
        self.mean = self.variance = self.x[:, 0]

    @torch.no_grad()
    def __call__(self) -> None:
        """Predict, from nothing if it is to be a first prediction."""
        if self.first:
            self.model.prediction_strategy = None
        with gpytorch.settings.fast_pred_var(self.fast):
            posterior = self.model.likelihood(self.model(self.x))
            self.mean, self.variance = posterior.mean, posterior.variance


def factorisations(prediction: Prediction) -> int:
    """Return how many Cholesky factorisations of the training covariance one call makes."""
    n, plain, count = len(prediction.model.train_targets), torch.linalg.cholesky_ex, 0

    def counted(matrix: Tensor, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += matrix.shape[-1] == n
        return plain(matrix, *args, **options)

    with mock.patch.object(torch.linalg, "cholesky_ex", counted):
        prediction()
    return count


def run_posterior(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Predict with two copies of each model in turn; compare times, values and numbers of factorisations."""
    cases = []
    for n in scale.posterior:
        for fast in (False, True):
            for first in (True, False):
                sides = {side: Prediction(n, first, fast) for side in SIDES}
                seconds = interleave(toggles, sides, scale.predictions, warmup=2, settle=nothing, times=SHORT)
                truth = Prediction(n, True, False)
                with forced_exact():
                    truth()
                counts = {}
                for side in SIDES:
                    with toggles[side]():
                        counts[side] = factorisations(sides[side])
                case = {"n": n, "fast": fast, "first": first, **compare(seconds), "factorisations": counts}
                case["error"] = {
                    side: {what: largest(getattr(sides[side], what) - getattr(truth, what)) for what in READ}
                    for side in SIDES
                }
                cases.append(case)
                report(f"posterior, n={n}, fast_pred_var {fast}, first {first}: {sentence(case)}")
    return {"d": DIMENSIONS, "points": NEW_POINTS, "cases": cases}


READ = ("mean", "variance")


def many_points(m: int, on: bool) -> dict[str, Any]:
    """Return seconds, memory above the start, and values of one prediction at m points after one at few; in MiB."""
    if on:
        import autokern

        autokern.enable()
    model, process = fitted(FEW), psutil.Process()
    x = uniform(m, DIMENSIONS, seed=3)
    with torch.no_grad():
        model.likelihood(model(x[:8])).variance  # noqa: B018  # reading it computes it
        gc.collect()
        before, start = process.memory_info().rss, time.perf_counter()
        posterior = model.likelihood(model(x))
        mean, variance = posterior.mean, posterior.variance
        lower, upper = posterior.confidence_region()
        seconds = time.perf_counter() - start
    k = model.covar_module(x[:512], model.train_inputs[0]).to_dense().detach()
    noise = model.likelihood.noise.item()
    full = model.covar_module(*model.train_inputs).to_dense().detach() + noise * torch.eye(FEW, dtype=x.dtype)
    exact = model.covar_module.outputscale.item() + noise - (k * torch.linalg.solve(full, k.mT).mT).sum(-1)
    return {
        "seconds": seconds,
        "mebibytes": (peak_bytes() - before) / 2**20,
        "error": max(largest(variance[:512] - exact), largest((upper + lower) / 2 - mean)),
    }


def peak_bytes() -> int:
    """Return the most resident memory that this process has ever had (Linux, macOS).

    On Linux, what getrusage tells of a child process begins with its parent's.
    """
    import resource

    if sys.platform == "linux":
        return status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run_points(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Ask for more and more test points in fresh processes; stock only where it fits into half of the memory."""
    cases = []
    for m in scale.points:
        needed = 4 * 8 * m**2
        sides = SIDES if needed < psutil.virtual_memory().available / 2 else ("on",)
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for _ in range(scale.repeats):
            for side in sides:
                code = f"import json, posteriors; print(json.dumps(posteriors.many_points({m}, {side == 'on'})))"
                command = [sys.executable, "-c", code]
                output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=FOLDER).stdout
                found[side].append(json.loads(output.splitlines()[-1]))
        case: dict[str, Any] = {"m": m, "n": FEW, "stock_needs_bytes": needed, "sides": found}
        if "off" in found:
            case |= compare({side: [one["seconds"] for one in found[side]] for side in SIDES})
        cases.append(case)
        on = found["on"][0]
        report(
            f"points, m={m}: {on['seconds']:.3f} s and {on['mebibytes']:.0f} MiB, {case.get('ratio', math.nan):.1f}×"
        )
    return {"d": DIMENSIONS, "cases": cases}


FOLDER = Path(__file__).parent


class Update:
    """One update of a model with new points, from the same model each time; the new model is dropped."""

    def __init__(self, n: int, q: int) -> None:
        self.model, self.x = fitted(n), uniform(q, DIMENSIONS, seed=11)
        self.y = (3 * self.x.sum(-1)).sin()
        self.updated: Any = None

    @torch.no_grad()
    def __call__(self) -> None:
        """Update; the model must have predicted once before."""
        with gpytorch.settings.fast_pred_var():
            if self.model.prediction_strategy is None:
                self.model(self.x).variance  # noqa: B018
            self.updated = self.model.get_fantasy_model(self.x, self.y)


@torch.no_grad()
def refit_error(model: Any, ahead: Tensor) -> dict[str, float]:
    """Return the largest errors of an updated model's mean and variance against an exact refit on the same data."""
    with gpytorch.settings.fast_pred_var():
        posterior = model(ahead)
        mean, variance = posterior.mean, posterior.variance
    refit = fitted(FEW)
    refit.load_state_dict(model.state_dict(), strict=False)
    refit.set_train_data(*model.train_inputs, model.train_targets, strict=False)
    with forced_exact():
        truth = refit.eval()(ahead)
        return {"mean": largest(mean - truth.mean), "variance": largest(variance - truth.variance)}


def run_fantasies(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Update two copies of each model in turn with one and with two points; compare times, and errors with a refit."""
    cases, ahead = [], uniform(NEW_POINTS, DIMENSIONS, seed=5)
    for n in scale.fantasies:
        for q in UPDATED:
            sides = {side: Update(n, q) for side in SIDES}
            case = {
                "n": n,
                "q": q,
                **compare(interleave(toggles, sides, scale.updates, 2, settle=nothing, times=SHORT)),
            }
            errors = {}
            for side in SIDES:
                with toggles[side]():
                    errors[side] = refit_error(sides[side].updated, ahead)
            cases.append({**case, "error": errors})
            report(f"fantasies, n={n}, q={q}: {sentence(case)}, mean {errors['on']['mean']:.0e}")
    return {"d": DIMENSIONS, "cases": cases, "successive": run_successive(scale, toggles, ahead)}


@torch.no_grad()
def run_successive(scale: Scale, toggles: Toggles, ahead: Tensor) -> dict[str, Any]:
    """Update one model again and again under autokern; return its error against a refit."""
    x = uniform(scale.successive, DIMENSIONS, seed=13)
    y, model = (3 * x.sum(-1)).sin(), fitted(400)
    with toggles["on"](), gpytorch.settings.fast_pred_var():
        model(ahead).variance  # noqa: B018
        for i in range(len(x)):
            model = model.get_fantasy_model(x[i : i + 1], y[i : i + 1])
        return {"from": 400, "updates": len(x), "error": refit_error(model, ahead)}


@torch.no_grad()
def run_stream(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Take in points one by one under autokern, and predict ten after each; then repeat one update many times."""
    last, process = scale.streamed, psutil.Process()
    x = uniform(last, DIMENSIONS, seed=17)
    y, ahead = noisy((3 * x.sum(-1)).sin(), seed=18), uniform(10, DIMENSIONS, seed=19)
    seconds, resident = [], []
    with toggles["on"](), gpytorch.settings.fast_pred_var():
        model = fitted(FEW)
        model(ahead).variance  # noqa: B018
        for i in range(FEW, last):
            start = time.perf_counter()
            model = model.get_fantasy_model(x[i : i + 1], y[i : i + 1])
            posterior = model(ahead)
            read = posterior.mean, posterior.variance
            seconds.append(time.perf_counter() - start)
            if i % 50 == 0:
                gc.collect()
        error = refit_error(model, ahead)
        base = fitted(FEW)
        base(ahead).variance  # noqa: B018
        for i in range(scale.dropped_updates):
            base.get_fantasy_model(x[i % last, None], y[i % last, None])(ahead).variance  # noqa: B018
            if i % 50 == 0:
                gc.collect()
                resident.append(process.memory_info().rss)
    del read
    marks = [*(n for n in (200, 500, 1000, 2000, 3000, 4000) if n < last), last]
    at = [{"n": n, "seconds": statistics.median(seconds[max(0, n - FEW - 50) : n - FEW])} for n in marks]
    report(f"stream, to n={last}: {sum(seconds):.1f} s, {at[-1]['seconds'] * 1e3:.1f} ms an update at the end")
    settled = resident[min(4, len(resident) - 1) :]
    return {
        "start": FEW, "last": last, "seconds": seconds, "at": at, "error": error,
        "dropped": scale.dropped_updates,
        "resident_bytes": {"first": settled[0], "last": settled[-1], "peak": max(settled)},
    }  # fmt: skip
