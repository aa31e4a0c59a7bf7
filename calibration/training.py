"""Exact training for `end_to_end.py`: a step against both of stock's ways and the floor, and stock's jump at 801 rows.

`training` times a step of Adam under stock with default settings, under stock forced to stay exact, and under
autokern. All copies go back to the library's initial values before every step, where training begins and where
conjugate gradients have their easiest problem. `jump` looks at loss and gradient where stock goes from one way to the
other.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import gpytorch
import torch
from measuring import DTYPES, SIDES, Report, Scale, Toggles, compare, geomean, interleave, word
from rows import sentence, small
from torch import Tensor
from workloads import SURFACE_NOISE, Trainer, dense_kernel, smooth_trainer, surface_trainer

DIMENSIONS = 8
PASSES = 4


def forced_exact() -> gpytorch.settings.max_cholesky_size:
    """Return the setting under which stock factorises matrices of any size."""
    return gpytorch.settings.max_cholesky_size(10**9)


def rewinder(trainers: Mapping[str, Trainer]) -> Callable[[], None]:
    """Return a function that puts the parameters of all models back to what they are now."""
    states = [(trainer.model, copy.deepcopy(trainer.model.state_dict())) for trainer in trainers.values()]

    def rewind() -> None:
        for model, state in states:
            model.load_state_dict(state)

    return rewind


def error(ours: Tensor | float, truth: Tensor | float) -> float:
    """Return the norm of the difference, relative to the norm of the truth."""
    ours, truth = torch.as_tensor(ours, dtype=torch.float64), torch.as_tensor(truth, dtype=torch.float64)
    return ((ours - truth).norm() / truth.norm()).item()


def disagreement(ours: Trainer, truth: Trainer) -> dict[str, float]:
    """Return the relative errors of loss and gradient of the last step."""
    return {"loss": error(ours.loss, truth.loss), "gradient": error(ours.gradient(), truth.gradient())}


class Floor:
    """What no exact step can avoid: LAPACK's potrf and potri, and a few passes over the matrix.

    The outputs are warm and have LAPACK's own layout, so that torch neither allocates nor transposes.
    """

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        self.covariance = dense_kernel(n, dtype)
        self.factor, self.inverse = (torch.zeros_like(self.covariance).mT for _ in range(2))
        self.info = torch.zeros((), dtype=torch.int32)

    def __call__(self) -> None:
        torch.linalg.cholesky_ex(self.covariance, out=(self.factor, self.info))
        torch.cholesky_inverse(self.factor, out=self.inverse)
        for _ in range(PASSES):
            self.inverse.mul_(1.0)


def training_case(family: str, n: int, dtype: torch.dtype, scale: Scale, toggles: Toggles) -> dict[str, Any]:
    """Compare one model's step with both of stock's and, at one size, with the floor."""
    trainers = {side: smooth_trainer(family, n, dtype, DIMENSIONS) for side in ("default", "exact", "on")}
    steps: dict[str, Callable[[], object]] = {**trainers}
    if n == scale.floor:
        steps["floor"] = Floor(n, dtype)
    least, most = scale.rounds
    warmup = scale.warmup if n <= 1000 else 1
    rewind = rewinder(trainers)
    seconds = interleave(toggles, steps, most, warmup, rewind, scale.seconds, least, settle=rewind)
    case = {"kernel": family, "dtype": word(dtype), "n": n}
    case |= {f"against_{side}": compare(seconds, off=side) for side in ("exact", "default")}
    case["agreement"] = {side: disagreement(trainers[side], trainers["exact"]) for side in ("on", "default")}
    if "floor" in steps:
        figure = compare(seconds, off="on", on="floor")
        case["floor"] = {"seconds": figure["on"], "ratio": figure["ratio"], "quartiles": figure["quartiles"]}
    return case


def spread(cases: Sequence[Mapping[str, Any]], side: str, least: int = 0, most: float = math.inf) -> dict[str, float]:
    """Return the least and the geometric mean of the ratios against one of stock's ways, for some sizes."""
    ratios = [case[f"against_{side}"]["ratio"] for case in cases if least <= case["n"] <= most]
    return {"least": min(ratios), "geomean": geomean(ratios)} if ratios else {}


def run_training(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Step copies of each model in turn; compare times, losses and gradients."""
    ways: Toggles = {"default": toggles["off"], "exact": forced_exact, "on": toggles["on"], "floor": nullcontext}
    cases = []
    for n in scale.training:
        for family in ("rbf", "matern52"):
            for dtype in DTYPES:
                case = training_case(family, n, dtype, scale, ways)
                cases.append(case)
                against = ", ".join(f"{side} {sentence(case[f'against_{side}'])}" for side in ("exact", "default"))
                report(f"training, n={n}, {family}, {word(dtype)}: against {against}")
    summary = {
        "exact, all sizes": spread(cases, "exact"),
        "exact, n ≤ 100": spread(cases, "exact", most=100),
        "exact, n ≥ 2,000": spread(cases, "exact", least=2000),
        "default, n ≤ 800": spread(cases, "default", most=800),
        "default, n > 800": spread(cases, "default", least=801),
    }
    return {"d": DIMENSIONS, "passes": PASSES, "cases": cases, "summary": {k: v for k, v in summary.items() if v}}


def run_jump(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    """Step two copies in turn at sizes around stock's limit; compare loss and gradient with those of exact float64."""
    cases = []
    for dtype in DTYPES:
        for n in scale.edge:
            truth = surface_trainer(n, torch.float64)
            with forced_exact():
                truth()
            trainers = {side: surface_trainer(n, dtype) for side in SIDES}
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(n)  # the probes of stock's conjugate gradients
                seconds = interleave(toggles, trainers, scale.edge_steps, warmup=1, after=rewinder(trainers))
            errors = {side: disagreement(trainers[side], truth) for side in SIDES}
            everyone = {"truth": truth, **trainers}
            case = {"n": n, "dtype": word(dtype), **compare(seconds), "error": errors}
            case["loss"] = {name: trainer.loss for name, trainer in everyone.items()}
            case["gradient_norm"] = {name: trainer.gradient().norm().item() for name, trainer in everyone.items()}
            cases.append(case)
            losses = " and ".join(small(errors[side]["loss"]) for side in SIDES)
            report(f"jump, n={n}, {word(dtype)}: {sentence(case)}, errors of the loss {losses}")
    return {"noise": SURFACE_NOISE, "cases": cases}
