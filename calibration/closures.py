"""BoTorch's fits and the closure that they evaluate, beside the arithmetic alone; writes `closures.json`.

Four ways from the vector of an optimiser to loss and gradient of the default `SingleTaskGP` take turns in one process:
BoTorch's closure without and with autokern, some thirty calls of NumPy and LAPACK on one thread, and JAX, compiled.
Then whole fits, without and with autokern. `--readme` and `--check` write and check the table of a document.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import documents
import numpy as np
import torch
from botorch.models import SingleTaskGP
from botorch.optim.closures import get_loss_closure_with_grads
from botorch.optim.closures.core import NdarrayOptimizationClosure
from end_to_end import describe
from figures import console, origin, save
from fits import DIMENSIONS, compare_fits
from gpytorch.mlls import ExactMarginalLogLikelihood
from measuring import compare, geomean, quiet_collector, turns
from numpy.typing import NDArray
from rows import factor, small
from scipy.linalg.lapack import dpotrf, dpotri, dpotrs
from threadpoolctl import threadpool_limits
from workloads import noisy, uniform

import autokern
from autokern.core.output import duration

JSON_PATH, BLOCK = Path(__file__).with_name("closures.json"), "closures"
SIZES, FITTED = (20, 50, 100, 200, 300), (20, 50, 100, 200, 400)
ROUNDS, SECONDS = 25, 0.03
TOGGLES = {"off": contextlib.nullcontext, "on": autokern.enabled}
ALONE = {"lapack": "NumPy and LAPACK alone", "jax": "JAX, compiled"}

Vector = NDArray[np.float64]
Evaluate = Callable[[Vector], tuple[float, Vector]]


class Case:
    """The default model on n points, and the priors that its loss adds up."""

    def __init__(self, n: int) -> None:
        x = uniform(n, DIMENSIONS, seed=n)
        self.model = SingleTaskGP(x, noisy((3 * x).sin().sum(-1), seed=n + 1).unsqueeze(-1))
        self.mll = ExactMarginalLogLikelihood(self.model.likelihood, self.model).train()
        self.parameters = {name: p for name, p in self.mll.named_parameters() if p.requires_grad}
        self.x, self.y = x.numpy(), self.model.train_targets.numpy()
        noise, lengthscale = (
            (prior.loc.item(), prior.scale.item())
            for prior in (self.model.likelihood.noise_covar.noise_prior, self.model.covar_module.lengthscale_prior)
        )
        self.priors = {"noise": noise, "lengthscale": lengthscale}

    def closure(self) -> Evaluate:
        """Return BoTorch's own, of the vector (noise, mean, lengthscales)."""
        inner = get_loss_closure_with_grads(self.mll, self.parameters)
        made: Evaluate = NdarrayOptimizationClosure(inner, self.parameters)
        return made

    def start(self) -> Vector:
        """Return the vector at which the fit starts."""
        joined: Vector = torch.cat([p.detach().reshape(-1) for p in self.parameters.values()]).numpy()
        return joined


def by_lapack(case: Case) -> Evaluate:
    """Return the same by NumPy and LAPACK."""
    x, y, n = case.x, case.y, len(case.y)
    (noise_loc, noise_scale), (loc, scale) = case.priors["noise"], case.priors["lengthscale"]
    diagonal = np.diag_indices(n)
    constant = 0.5 * n * math.log(2 * math.pi)

    def evaluate(theta: Vector) -> tuple[float, Vector]:
        noise, mean, lengthscale = theta[0], theta[1], theta[2:]
        z = x / lengthscale
        norms = np.einsum("ij,ij->i", z, z)
        s = z @ z.T
        s *= -2.0
        s += norms
        s += norms[:, None]
        np.maximum(s, 0.0, out=s)
        s *= -0.5
        kernel = np.exp(s, out=s)
        kernel[diagonal] = 1.0
        noisy_kernel = kernel.copy()
        noisy_kernel[diagonal] += noise
        factor_, _ = dpotrf(noisy_kernel, lower=1, clean=0)
        weights, _ = dpotrs(factor_, y - mean, lower=1)
        density = -0.5 * ((y - mean) @ weights) - np.log(factor_[diagonal]).sum() - constant
        inverse, _ = dpotri(factor_, lower=1)
        slopes = np.outer(weights, weights)
        inverse = np.tril(inverse) + np.tril(inverse, -1).T
        slopes -= inverse
        by_noise = 0.5 * slopes.trace()
        slopes *= kernel
        rows = slopes.sum(1)
        by_lengthscale = (z * (z * rows[:, None] - slopes @ z)).sum(0) / lengthscale
        by_prior = []
        for value, at, width in ((theta[:1], noise_loc, noise_scale), (lengthscale, loc, scale)):
            u = (np.log(value) - at) / width
            density -= (0.5 * u * u + np.log(value * width) + 0.5 * math.log(2 * math.pi)).sum()
            by_prior.append((1 + u / width) / value)
        gradient = np.concatenate(([by_noise - by_prior[0].item(), weights.sum()], by_lengthscale - by_prior[1]))
        return -density / n, gradient / -n

    return evaluate


def by_jax(case: Case) -> Evaluate:
    """Return the same by JAX."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    x, y, n = jnp.asarray(case.x), jnp.asarray(case.y), len(case.y)

    def log_normal(value: Any, prior: tuple[float, float]) -> Any:
        u = (jnp.log(value) - prior[0]) / prior[1]
        return -(0.5 * u * u + jnp.log(value * prior[1]) + 0.5 * math.log(2 * math.pi)).sum()

    def loss(theta: Any) -> Any:
        z = x / theta[2:]
        norms = (z * z).sum(-1)
        squared = jnp.maximum(norms[:, None] + norms - 2.0 * z @ z.T, 0.0)
        lower = jnp.linalg.cholesky(jnp.exp(-0.5 * squared) + theta[0] * jnp.eye(n))
        white = jax.scipy.linalg.solve_triangular(lower, y - theta[1], lower=True)
        density = -0.5 * white @ white - jnp.log(jnp.diagonal(lower)).sum() - 0.5 * n * math.log(2 * math.pi)
        priors = log_normal(theta[:1], case.priors["noise"]) + log_normal(theta[2:], case.priors["lengthscale"])
        return -(density + priors) / n

    compiled = jax.jit(jax.value_and_grad(loss))

    def evaluate(theta: Vector) -> tuple[float, Vector]:
        value, slopes = compiled(theta)
        return float(value), np.asarray(slopes)

    return evaluate


def run_closures(n: int) -> dict[str, Any]:
    """Time all ways in turn, in changing order; compare their values and gradients with stock's."""
    case = Case(n)
    ways: dict[str, Evaluate] = {"off": case.closure(), "on": case.closure(), "lapack": by_lapack(case)}
    if importlib.util.find_spec("jax") is not None:
        ways["jax"] = by_jax(case)
    start = case.start()
    points = [start * (1 + 0.01 * k) for k in range(4)]
    answers, seconds, calls = {}, {name: [] for name in ways}, {}
    for name, way in ways.items():
        with surroundings(name):
            answers[name] = [tuple(map(np.array, way(point))) for point in points]
            began = time.perf_counter()
            for _ in range(20):
                way(start)
            calls[name] = max(4, round(20 * SECONDS / (time.perf_counter() - began)))
    with quiet_collector():
        for order in turns(ways, ROUNDS):
            for name in order:
                with surroundings(name):
                    ways[name](start)
                    began = time.perf_counter()
                    for k in range(calls[name]):
                        ways[name](points[k & 3])
                    seconds[name].append((time.perf_counter() - began) / calls[name])
    figure: dict[str, Any] = {"n": n, "seconds": {name: statistics.median(taken) for name, taken in seconds.items()}}
    for name in ways:
        if name != "off":
            both = zip(answers[name], answers["off"], strict=True)
            figure[name] = {**compare(seconds, on=name), "difference": max(gap(*pair) for pair in both)}
        if name in ALONE:
            figure[name]["over"] = compare(seconds, off="on", on=name)["ratio"]
    return figure


def gap(ours: Sequence[Vector], stock: Sequence[Vector]) -> float:
    """Return the largest difference of a value and its gradient, relative to the largest entry of each."""
    return float(max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(ours, stock, strict=True)))


@contextlib.contextmanager
def surroundings(name: str) -> Any:
    """Enter what a way runs under."""
    around = threadpool_limits(1, user_api="blas") if name == "lapack" else TOGGLES.get(name, contextlib.nullcontext)()
    with around:
        yield


def run_fits(n: int) -> dict[str, Any]:
    """Fit the same data in turn; how far an optimiser magnifies rounding is seen from points in reverse order."""
    figure = compare_fits(n, TOGGLES, 5, 15, 15.0)
    kept = {key: figure[key] for key in ("n", "off", "on", "ratio", "quartiles", "pairs")}
    own, stock = (of["objective_difference"] for of in (figure, figure["reordered"]))
    return {**kept, "difference": own, "stock_difference": stock}


def block(results: Mapping[str, Any]) -> str:
    """Return the table as Markdown."""
    lines = [f"| | stock | autokern | faster | {' | '.join(ALONE.values())} | agreement |", f"|---|{'---:|' * 6}"]
    for figure in results["closures"]:
        seconds = figure["seconds"]
        alone = [duration(seconds[name]) if name in seconds else "" for name in ALONE]
        lines.append(
            f"| loss and gradient in BoTorch's closure, n = {figure['n']} | {duration(seconds['off'])} | "
            f"{duration(seconds['on'])} | {factor(figure['on'])} | {' | '.join(alone)} | "
            f"{small(figure['on']['difference'])} |"
        )
    lines += [
        f"| BoTorch fit, n = {figure['n']} | {duration(figure['off'])} | {duration(figure['on'])} | "
        f"{factor(figure)} | | | {small(figure['difference'])} ({small(figure['stock_difference'])}) |"
        for figure in results["fits"]
    ]
    note = (
        f"{origin(results)}. `SingleTaskGP`, d = {DIMENSIONS}, float64; all "
        "ways in turn in one process. Agreement is the largest relative difference from stock's value and gradient; of "
        "fits, the difference of objectives at the optimum (stock's own, with the points in reverse order)."
    )
    return "\n".join([*lines, "", note, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; 0 is fine, 1 a document that does not hold the figures of the JSON."""
    parser = argparse.ArgumentParser(description="Time BoTorch's closure and fits beside the arithmetic alone.")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--readme", type=Path, metavar="FILE", help="run nothing, rewrite the table in FILE")
    task.add_argument("--check", type=Path, metavar="FILE", help="run nothing, exit 1 if that table is out of date")
    parser.add_argument("--sizes", type=int, nargs="+", help="only these numbers of points")
    parser.add_argument("--output", type=Path, default=JSON_PATH, help="the JSON to write or to read")
    options = parser.parse_args(arguments)
    if (served := documents.served(parser, options, {BLOCK: block})) is not None:
        return served
    results = {**describe(autokern.profile().host, quick=False), "closures": [], "fits": []}
    for kind, run, sizes in (("closures", run_closures, SIZES), ("fits", run_fits, FITTED)):
        for n in options.sizes or sizes:
            results[kind].append(run(n))
            console.print(block(results).splitlines()[2:-2][-1])
    small_ones = [figure["ratio"] for figure in results["fits"] if figure["n"] <= 100]
    if small_ones:
        console.print(f"fits of at most 100 points: {geomean(small_ones):.2f} times as fast")
    save(results, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
