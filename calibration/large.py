"""Loss, gradient and time of a training step from 1,500 points on, stock and autokern by default; writes `large.json`.

`models`: the ten of `large_models.py` in float64. Both sides take turns in one process, forward and backward pass
together; errors are those against stock forced to factorise. Products of stock's conjugate gradients are counted.
`steps`: one model at more points (`--steps 20000` takes minutes) beside stock's conjugate gradients to its own
tolerance and to a tight one. Where stock's matrices do not fit the memory, its conjugate gradients run on products of
tiles (`matrix-free`).
`--ship` writes what the package says of stock's gradients, `autokern/ops/iterations.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import documents
import gpytorch
import linear_operator
import torch
from end_to_end import describe, since
from figures import console, save
from large_models import MODELS, model_of
from large_tables import EXACT, STEPPED, TIGHT, block, written
from linear_operator.utils.warnings import NumericalWarning
from matrixfree import stock_bytes
from measuring import compare, interleave, nothing
from torch import Tensor
from training import error, forced_exact
from workloads import Regression

import autokern
from autokern.runtime import dispatch
from autokern.system import host

FOLDER = Path(__file__).parent
JSON_PATH, BLOCK = FOLDER / "large.json", "large"
SHIPPED = FOLDER.parent / "autokern" / "ops" / "iterations.json"
SIZES, STEPS = (1500, 2000, 4000), (2000, 4000, 8000)
ROUNDS, SECONDS = 8, 5.0
ALONE = 2000
"""Points up to which the library is compared with its own density on dispatched parts."""
MATRICES = 12
"""Matrices that a step of stock takes at its peak, at most."""


class Stepper:
    """A model whose loss and gradient are computed at the same hyperparameters again and again."""

    def __init__(self, model: Regression) -> None:
        self.model = model
        self.objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        self.losses: list[float] = []
        self.gradients: list[Tensor] = []

    def __call__(self) -> None:
        self.model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)
            loss = -self.objective(self.model(*self.model.train_inputs), self.model.train_targets)
            loss.backward()
        self.losses.append(loss.item())
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]))

    def errors(self, truth: Stepper) -> dict[str, float]:
        """Return the medians of the relative errors of all losses and gradients."""
        loss = statistics.median(error(value, truth.losses[0]) for value in self.losses)
        gradient = statistics.median(error(value, truth.gradients[0]) for value in self.gradients)
        return {"loss": loss, "gradient": gradient}


class Counter:
    """The products of each run of the library's conjugate gradients inside the context."""

    def __init__(self) -> None:
        self.found: list[int] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        stock = linear_operator.utils.linear_cg

        def counted(closure: Any, *args: Any, **kwargs: Any) -> Any:
            multiply = closure.matmul if torch.is_tensor(closure) else closure
            self.found.append(0)

            def product(vectors: Tensor) -> Any:
                self.found[-1] += 1
                return multiply(vectors)

            return stock(product, *args, **kwargs)

        linear_operator.utils.linear_cg = counted
        try:
            yield
        finally:
            linear_operator.utils.linear_cg = stock


@contextlib.contextmanager
def on(seen: list[dict[str, Any]]) -> Iterator[None]:
    """Enable autokern, and note what served."""
    before = autokern.stats()
    with autokern.enabled():
        yield
    seen.append(since(before, autokern.stats()))


def served(seen: Sequence[Mapping[str, Any]]) -> str:
    """Return the candidates of the density that served, the last first."""
    names = [name for one in reversed(seen) for name in one.get("exact_log_prob", {})]
    return ", ".join(dict.fromkeys(names)) or "stock"


def run_model(name: str, n: int) -> dict[str, Any]:
    """Compare one model: time, loss and gradient."""
    torch.manual_seed(n)
    sides = {side: Stepper(model_of(name, n)) for side in ("off", "on", "truth")}
    with forced_exact():
        sides["truth"]()
    counter, seen = Counter(), []
    toggles = {"off": counter, "on": lambda: on(seen), "stock": forced_stock}
    steps: dict[str, Stepper] = {side: sides[side] for side in ("off", "on")}
    if n <= ALONE:
        steps["stock"] = Stepper(model_of(name, n))
    least = 3 if n <= ALONE else 2
    seconds = interleave(toggles, steps, ROUNDS, seconds=SECONDS, least=least, settle=nothing)
    figure: dict[str, Any] = {
        "model": name, "n": n, "candidate": served(seen), "products": max(counter.found), **compare(seconds),
        "errors": {side: sides[side].errors(sides["truth"]) for side in ("off", "on")},
    }  # fmt: skip
    if n <= ALONE:
        figure["alone"] = compare(seconds, on="stock")["ratio"]
    return figure


@contextlib.contextmanager
def forced_stock() -> Iterator[None]:
    """Enable autokern, and let the library's own density run on dispatched parts."""
    with autokern.enabled(), autokern.using(force={"exact_log_prob": "stock"}):
        yield


@contextlib.contextmanager
def iterating(tolerance: float | None, formed: bool) -> Iterator[None]:
    """Let conjugate gradients run as stock does, to a tolerance."""
    with contextlib.ExitStack() as stack:
        if tolerance is not None:
            stack.enter_context(gpytorch.settings.cg_tolerance(tolerance))
        if not formed:
            stack.enter_context(autokern.enabled())
            stack.enter_context(autokern.using(force={"exact_log_prob": "matrix-free"}))
        yield


def run_steps(n: int, tightest: int = EXACT) -> dict[str, Any]:
    """Compare a step of one model with stock's tolerance and, up to so many points, with a tight one."""
    torch.manual_seed(n)
    seen: list[dict[str, Any]] = []
    formed = stock_bytes(n, torch.float64) + MATRICES * n * n * 8 < host.available_memory("cpu")
    ways: dict[str, Callable[[], Any]] = {"on": lambda: on(seen), "off": lambda: iterating(None, formed)}
    if n <= tightest:
        ways["tight"] = lambda: iterating(TIGHT, formed)
    sides = {side: Stepper(model_of(STEPPED, n)) for side in ways}
    rounds, settle = (ROUNDS, nothing) if n < EXACT else (1, None)
    pair = {side: sides[side] for side in ("off", "on")}
    seconds = interleave(ways, pair, rounds, seconds=SECONDS, least=1, settle=settle)
    figure: dict[str, Any] = {"n": n, "candidate": served(seen), "formed": formed}
    figure["against_off"] = compare(seconds)
    truth = None
    if "tight" in ways:
        seconds["tight"] = interleave(ways, {"tight": sides["tight"]}, 1)["tight"] * len(seconds["on"])
        figure["against_tight"] = compare(seconds, off="tight")
        truth = sides["tight"]
    if n <= EXACT:
        truth = Stepper(model_of(STEPPED, n))
        with forced_exact():
            truth()
    if truth is not None:
        figure["errors"] = {side: sides[side].errors(truth) for side in ways}
    return figure


def added(before: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return earlier results with those of a new run on the same machine in their places."""
    if before["host"] != new["host"]:
        raise SystemExit("the results of another machine cannot be added to: leave out --add")
    models = {(row["n"], row["model"]): row for row in [*before["models"], *new["models"]]}
    steps = {row["n"]: row for row in [*before["steps"], *new["steps"]]}
    return {**before, "models": list(models.values()), "steps": [steps[n] for n in sorted(steps)]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; 0 is fine, 1 a document or a file that does not hold the figures of the JSON, 2 bad usage."""
    parser = argparse.ArgumentParser(description="Compare large exact training steps with autokern off and on.")
    parser.add_argument("--models", nargs="*", choices=[*MODELS, "none"], help="only these; default all ten")
    parser.add_argument("--sizes", type=int, nargs="*", help=f"points of the models; default {SIZES}")
    parser.add_argument("--steps", type=int, nargs="*", help=f"points of the steps; default {STEPS}")
    parser.add_argument("--tight", type=int, default=EXACT, help=f"points up to which steps to {TIGHT:g} run as well")
    parser.add_argument("--home", type=Path, help="folder with a profile; default: none, nothing is measured")
    parser.add_argument("--output", type=Path, default=JSON_PATH, help="the JSON to write or to read")
    parser.add_argument("--add", action="store_true", help="keep what the JSON holds of other models and sizes")
    parser.add_argument("--ship", action="store_true", help="run nothing, write what the package ships")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--readme", type=Path, metavar="FILE", help="run nothing, rewrite the tables in FILE")
    task.add_argument("--check", type=Path, metavar="FILE", help="run nothing, exit 1 if anything is out of date")
    options = parser.parse_args(arguments)
    if options.ship:
        SHIPPED.write_text(written(json.loads(options.output.read_text(encoding="utf-8"))), encoding="utf-8")
    if (served_ := documents.served(parser, options, {BLOCK: block})) is not None:
        results = json.loads(options.output.read_text(encoding="utf-8"))
        stale = options.check is not None and SHIPPED.read_text(encoding="utf-8") != written(results)
        if stale:
            print(f"{SHIPPED.name} does not hold the figures of {options.output.name}: run --ship")
        return int(served_ or stale)
    if options.ship:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOKERN_HOME"] = str(options.home or folder)
        os.environ["AUTOKERN_CALIBRATE"] = "never"
        dispatch.reset()
        began = time.perf_counter()
        results: dict[str, Any] = {**describe(autokern.profile().host, quick=False), "models": [], "steps": []}
        names = [name for name in (MODELS if options.models is None else options.models) if name != "none"]
        for n in SIZES if options.sizes is None else options.sizes:
            for name in names:
                results["models"].append(run_model(name, n))
                console.print(block({**results, "models": results["models"][-1:], "steps": []}).splitlines()[2])
        for n in STEPS if options.steps is None else options.steps:
            results["steps"].append(run_steps(n, options.tight))
            console.print(block({**results, "models": [], "steps": results["steps"][-1:]}).splitlines()[-3])
        console.print(f"{time.perf_counter() - began:.0f} s")
    if options.add:
        results = added(json.loads(options.output.read_text(encoding="utf-8")), results)
    save(results, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
