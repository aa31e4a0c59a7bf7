"""Whole fits for `end_to_end.py`: BoTorch's, and a thousand models fitted and dropped to see what memory they leave.

`acquisition` evaluates BoTorch's knowledge gradient and expected improvement with gradients, on a fitted model.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any
from unittest import mock

import psutil
import torch
from measuring import SIDES, Report, Scale, Toggles, compare, interleave, largest, nothing
from rows import sentence
from torch import Tensor
from training import forced_exact
from workloads import noisy, smooth_trainer, uniform

DIMENSIONS = 6
DROPPED_SIZE, DROPPED_STEPS = 100, 5
FANTASIES, EVALUATIONS = 16, 5


class Fit:
    """A fit of BoTorch's default model to its test function; each call makes a new model on the same data."""

    def __init__(self, n: int) -> None:
        from botorch.test_functions import Hartmann

        self.x = uniform(n, DIMENSIONS, seed=n)
        self.y, self.evaluations = Hartmann(DIMENSIONS, dtype=self.x.dtype)(self.x).unsqueeze(-1), 0

    def __call__(self) -> None:
        """Make and fit a model; SciPy counts evaluations of the objective."""
        from botorch import fit_gpytorch_mll
        from botorch.models import SingleTaskGP
        from botorch.optim import core
        from gpytorch.mlls import ExactMarginalLogLikelihood

        minimise, self.evaluations = core.minimize_with_timeout, 0

        def counted(*args: Any, **options: Any) -> Any:
            found = minimise(*args, **options)
            self.evaluations += found.nfev
            return found

        model = SingleTaskGP(self.x, self.y)
        self.objective = ExactMarginalLogLikelihood(model.likelihood, model)
        with mock.patch.object(core, "minimize_with_timeout", counted):
            fit_gpytorch_mll(self.objective)

    def optimum(self) -> tuple[Tensor, float]:
        """Return lengthscales and noise as one vector, and the constant mean of the standardised targets."""
        model = self.objective.model
        parts = (model.covar_module.lengthscale, model.likelihood.noise)
        return torch.cat([part.detach().flatten() for part in parts]), model.mean_module.constant.item()

    @torch.no_grad()
    def log_likelihood(self) -> float:
        """Return the objective at the optimum, evaluated by stock without approximations."""
        self.objective.train()
        model = self.objective.model
        with forced_exact():
            return self.objective(model(*model.train_inputs), model.train_targets).item()


def fit_differences(ours: Fit, stock: Fit) -> dict[str, float]:
    """Return the largest differences of hyperparameters, relative; of the mean; and of the objective."""
    (positive, mean), (stock_positive, stock_mean) = ours.optimum(), stock.optimum()
    return {
        "relative_parameter_difference": ((positive - stock_positive) / stock_positive).abs().max().item(),
        "mean_difference": abs(mean - stock_mean),
        "objective_difference": abs(ours.log_likelihood() - stock.log_likelihood()),
    }


def compare_fits(n: int, toggles: Toggles, least: int, most: int, seconds: float) -> dict[str, Any]:
    """Fit the same data with a new model each time, in turn; compare times, optima and numbers of evaluations.

    How far an optimiser magnifies rounding is seen from a stock fit to the same points in reverse order.
    """
    fits = {side: Fit(n) for side in SIDES}
    figure = compare(interleave(toggles, fits, most, warmup=1, seconds=seconds, least=least))
    reordered = Fit(n)
    reordered.x, reordered.y = reordered.x.flip(0), reordered.y.flip(0)
    with toggles["off"]():
        reordered()
    fits["reordered"] = reordered
    figure |= {"n": n, "evaluations": {name: fit.evaluations for name, fit in fits.items()}}
    figure |= fit_differences(fits["on"], fits["off"])
    figure["reordered"] = fit_differences(reordered, fits["off"])
    return figure


def run_memory(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Make, train and drop models under autokern; look at resident memory after each."""
    process, resident = psutil.Process(), []
    with toggles["on"]():
        for _ in range(scale.dropped):
            trainer = smooth_trainer("matern52", DROPPED_SIZE, torch.float64)
            for _ in range(DROPPED_STEPS):
                trainer()
            del trainer
            resident.append(process.memory_info().rss)
    settled = resident[min(scale.settling, scale.dropped - 1) :]
    report(f"memory: {settled[0] / 2**20:.0f} MiB after {scale.settling} fits, {settled[-1] / 2**20:.0f} at the end")
    return {
        "n": DROPPED_SIZE,
        "steps": DROPPED_STEPS,
        "fits": scale.dropped,
        "settling": scale.settling,
        "resident_bytes": {"first": settled[0], "last": settled[-1], "peak": max(settled)},
    }


class Acquisition:
    """One evaluation of an acquisition function with its gradient, on a fitted model of BoTorch."""

    def __init__(self, name: str, n: int, batch: int) -> None:
        from botorch.acquisition import qExpectedImprovement, qKnowledgeGradient
        from botorch.models import SingleTaskGP
        from botorch.sampling import SobolQMCNormalSampler

        d = DIMENSIONS
        x = uniform(n, d, seed=n)
        y = noisy((3 * x.sum(-1)).sin(), seed=n + 1).unsqueeze(-1)
        model = SingleTaskGP(x, y).eval()
        if name == "qKG":
            sampler = SobolQMCNormalSampler(torch.Size([FANTASIES]), seed=3)
            self.function: Any = qKnowledgeGradient(model, num_fantasies=FANTASIES, sampler=sampler)
            q = 1 + FANTASIES
        else:
            sampler = SobolQMCNormalSampler(torch.Size([128]), seed=3)
            with warnings.catch_warnings():  # BoTorch recommends qLogExpectedImprovement
                warnings.simplefilter("ignore")
                self.function, q = qExpectedImprovement(model, best_f=y.max(), sampler=sampler), 4
        self.x = uniform(batch * q, d, seed=23).view(batch, q, d)
        self.value = self.gradient = self.x

    def __call__(self) -> None:
        x = self.x.clone().requires_grad_()
        value = self.function(x)
        self.gradient = torch.autograd.grad(value.sum(), x)[0]
        self.value = value.detach()


def run_acquisition(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Evaluate both acquisition functions for two copies of a model in turn; compare times, values and gradients."""
    if importlib.util.find_spec("botorch") is None:
        report("acquisition: skipped, because BoTorch is not installed")
        return {}
    cases = []
    for name in ("qKG", "qEI"):
        for batch in scale.restarts:
            sides = {}
            for side in SIDES:
                with toggles[side]():
                    sides[side] = Acquisition(name, scale.acquired, batch)
            figure: dict[str, Any] = compare(
                interleave(toggles, sides, scale.evaluations, 2, settle=nothing, times=EVALUATIONS)
            )
            off, on = (sides[side] for side in SIDES)
            figure |= {"function": name, "n": scale.acquired, "restarts": batch}
            figure["difference"] = {
                what: largest(getattr(on, what) - getattr(off, what)) for what in ("value", "gradient")
            }
            cases.append(figure)
            report(f"acquisition, {name}, {batch} restarts: {sentence(figure)}")
    return {"d": DIMENSIONS, "fantasies": FANTASIES, "cases": cases}
