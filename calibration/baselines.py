"""Exact models of many points beside what approximates them; writes `baselines.json` and plots.

Each method runs in a fresh process, from the hyperparameters of an exact model of 2,000 points, whose seconds count.
Seconds are those of training and of one forecast of all points held out; errors are looked at along the way, which
does not count. `heights` and `all-heights` are the elevation model, `roads` is simulated, `co2` is the series by the
states of Markov chains beside dense matrices.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import documents
import torch
from approximations import METHODS, Forecast, noisy_forecast
from baseline_tables import block, plot
from children import Peak, in_child
from elevation import LEARNING_RATE
from end_to_end import describe, differences
from figures import console, save
from matrixfree import rmse
from regressions import DATA, Data
from torch import Tensor
from training import forced_exact
from workloads import Regression, Trainer

FOLDER = Path(__file__).parent
JSON_PATH, BLOCK = FOLDER / "baselines.json", "baselines"
PART, PART_STEPS = 2000, 60
SHORT_STEPS = 30
FOR_NLL = 300
"""Points held out at which variances are asked."""
LIMIT = 400.0
WORKLOADS: dict[str, dict[str, Any]] = {
    "co2": {
        "data": "co2", "n": 0, "exact": [SHORT_STEPS], "variances": True, "sides": ["stock", "exact stock"],
        "methods": [],
    },
    "heights": {
        "data": "heights", "n": 20_000, "seconds": 20.0, "exact": [10], "variances": True,
        "methods": [("SVGP", 512), ("SVGP", 1024), ("SGPR", 512), ("Falkon", 2048), ("Falkon", 6144)],
    },
    "all-heights": {
        "data": "heights", "n": 134_813, "seconds": 30.0, "exact": [0], "variances": False, "begin": "heights",
        "methods": [("SVGP", 1024), ("Falkon", 2048)],
    },
    "roads": {
        "data": "roads", "n": 434_874, "exact_n": 20_000, "seconds": 30.0, "exact": [0, 1], "variances": False,
        "methods": [("SVGP", 512), ("SVGP", 1024), ("Falkon", 2048)],
    },
}  # fmt: skip

State = dict[str, list[float]]


def begun(data: Data, n: int, state: State, dtype: torch.dtype) -> Regression:
    """Return a model of the first n points at hyperparameters; no state means those of the kernel as it is made."""
    model = Regression(data.x[:n].to(dtype), data.y[:n].to(dtype), data.kernel().to(dtype))
    if state:
        known = model.state_dict()
        model.load_state_dict({**known, **{key: torch.tensor(v).to(known[key]) for key, v in state.items()}})
    else:
        model.likelihood.noise = 0.01
    return model


def state_of(model: Regression) -> State:
    return {name: parameter.detach().double().tolist() for name, parameter in model.named_parameters()}


class Trace:
    """Errors of forecasts beside the seconds of all training so far and of that forecast."""

    def __init__(self, data: Data, dtype: torch.dtype, before: float) -> None:
        self.data, self.dtype, self.training, self.points = data, dtype, before, list[dict[str, float]]()

    def look(self, forecast: Forecast, spread: Forecast | None = None) -> None:
        """Note the errors of a forecast; variances are those of `spread` where it is given, in seconds of their own."""
        data, start = self.data, time.perf_counter()
        mean, variance = forecast(data.held_x.to(self.dtype))
        middle = time.perf_counter()
        point = {"seconds": self.training + middle - start, "forecast": middle - start}
        point["rmse"] = data.scale * rmse(mean.double(), data.held_y)
        if spread is not None:
            mean, variance = spread(data.held_x[:FOR_NLL].to(self.dtype))
            point["variances"] = time.perf_counter() - middle
        if variance is not None:
            few = slice(0, min(FOR_NLL, len(mean)))
            gap, width = mean[few].double() - data.held_y[few], variance[few].double()
            nll = 0.5 * ((2 * math.pi * width).log() + gap.square() / width).mean()
            point["nll"] = nll.item() + math.log(data.scale)
        self.points.append(point)


def part(workload: str) -> dict[str, Any]:
    """Train an exact model of a few points in stock; return its hyperparameters, seconds and error."""
    data = DATA[WORKLOADS[workload]["data"]]()
    start = time.perf_counter()
    with forced_exact():
        trainer = Trainer(begun(data, PART, {}, torch.float64), LEARNING_RATE)
        for _ in range(PART_STEPS):
            trainer()
        seconds = time.perf_counter() - start
        trace = Trace(data, torch.float64, seconds)
        trace.look(noisy_forecast(trainer.model, trainer.model.likelihood))
    return {"state": state_of(trainer.model), "training": seconds, "points": trace.points}


def approximated(workload: str, method: str, size: int, state: State, before: float) -> dict[str, Any]:
    """Train an approximation for the seconds of its workload."""
    of = WORKLOADS[workload]
    data, dtype = DATA[of["data"]](), torch.float64 if method == "SGPR" else torch.float32
    like, n = begun(data, PART, state, dtype), of["n"]
    x, y = data.x[:n].to(dtype), data.y[:n].to(dtype)
    meter, trace, steps, after = Peak(), Trace(data, dtype, before), 0, 1.0
    forecasts, shown = METHODS[method](like, x, y, size), True
    while trace.training - before < of["seconds"]:
        start = time.perf_counter()
        forecast = next(forecasts, None)
        trace.training += time.perf_counter() - start
        if forecast is None:
            break
        steps, last, shown = steps + 1, forecast, False
        if trace.training - before > after:
            trace.look(last)
            after, shown = 1.6 * (trace.training - before), True
    if not shown:
        trace.look(last)
    return {"n": n, "size": size, "steps": steps, "bytes": meter.bytes(), "points": trace.points}


class Reports(logging.Handler):
    """What autokern's log says of densities that are solved to a residual."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a report."""
        if isinstance(record.args, tuple) and hasattr(found := record.args[-1], "residual"):
            self.found.append({"residual": found.residual, "products": found.iterations})


@contextlib.contextmanager
def side_of(name: str, reports: Reports) -> Iterator[None]:
    """Let autokern, stock or stock without conjugate gradients run."""
    import autokern

    log = logging.getLogger("autokern")
    with autokern.enabled() if name == "autokern" else forced_exact() if "exact" in name else contextlib.nullcontext():
        log.addHandler(reports)
        log.setLevel(logging.DEBUG)
        yield


def exact(workload: str, side: str, state: State, before: float) -> dict[str, Any]:
    """Train an exact model, look at its forecasts after some steps, and at the residual of the last one."""
    import autokern

    of = WORKLOADS[workload]
    data, dtype = DATA[of["data"]](), torch.float32 if state else torch.float64
    n = of.get("exact_n") or of["n"] or len(data.x)
    meter, reports = Peak(), Reports()
    model = begun(data, n, state, dtype)
    trainer, trace, losses, seconds = Trainer(model, LEARNING_RATE), Trace(data, dtype, before), [], []
    with side_of(side, reports):
        for step in range(1 + max(of["exact"])):
            if step:
                start = time.perf_counter()
                model.train()
                trainer()
                seconds.append(time.perf_counter() - start)
                trace.training += seconds[-1]
                losses.append(trainer.loss)
            if step in of["exact"]:
                last = step == max(of["exact"])
                trace.look(
                    means_of(model), noisy_forecast(model, model.likelihood) if last and of["variances"] else None
                )
        found = {
            "n": n, "bytes": meter.bytes(), "points": trace.points, "steps": seconds, "loss": losses,
            "reports": reports.found, "calls": autokern.stats(), "state": state_of(model), "training": trace.training,
        }  # fmt: skip
        if side == "autokern" and state:
            found |= solved(model)
    return found


def means_of(model: Regression) -> Forecast:
    def forecast(points: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            return model.eval()(points).mean, None

    return forecast


@torch.no_grad()
def solved(model: Regression) -> dict[str, float]:
    """Return the residual of the forecasts' system, and the seconds of a product with one column and with eleven."""
    from autokern import covariance

    x, y = model.train_inputs[0], model.train_targets
    cache = model.prediction_strategy.mean_cache.unsqueeze(-1)
    residual = (y - model.mean_module(x)).unsqueeze(-1)
    seconds = {}
    for columns in (11, 1):
        start = time.perf_counter()
        image = covariance.matmul(model.covar_module, x, None, cache.expand(-1, columns).contiguous())
        seconds[f"product_{columns}"] = time.perf_counter() - start
    gap = image + model.likelihood.noise * cache - residual
    return {"residual": (gap.norm() / residual.norm()).item(), **seconds}


def measured(
    name: str, results: Mapping[str, Any], report: Any, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Run the methods of a workload that are not known, each in a process of its own."""
    of, found = WORKLOADS[name], dict(known or {})
    state, before = {}, 0.0

    def run(key: str, function: str, *arguments: Any) -> None:
        if key not in found:
            one = found[key] = in_child("baselines", function, name, *arguments, limit=LIMIT, returned=False)
            report(f"{name}, {key}: {one.get('failed') or one['points'][-1]}")

    if of["n"]:
        run("part", "part")
        state, before = found["part"]["state"], found["part"]["training"]
    for method, size in of["methods"]:
        run(f"{method}, {size:,}", "approximated", method, size, state, before)
    if "begin" in of:
        began = results["workloads"][of["begin"]]["methods"]["autokern"]
        state, before = began["state"], began["training"]
    for side in ("autokern", *of.get("sides", ())):
        run(side, "exact", side, state, before)
    return {"date": describe({}, False)["date"], "methods": found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; 0 is fine, 1 a document that does not hold the figures of the JSON, 2 bad usage."""
    parser = argparse.ArgumentParser(description="Compare exact models of many points with approximations.")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"any of {', '.join(WORKLOADS)}; default all")
    parser.add_argument("--failed", action="store_true", help="run the methods that failed, and keep the others")
    parser.add_argument("--output", type=Path, default=JSON_PATH, help="the JSON to write or to read")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--readme", type=Path, metavar="FILE", help="run nothing, rewrite tables in FILE and plots")
    task.add_argument("--check", type=Path, metavar="FILE", help="run nothing, exit 1 if the tables are out of date")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.workloads) - set(WORKLOADS)):
        parser.error(f"unknown workload {', '.join(unknown)}; known are {', '.join(WORKLOADS)}")
    if (status := documents.served(parser, options, {BLOCK: block})) is not None:
        if options.readme is not None:
            plot(json.loads(options.output.read_text(encoding="utf-8")), options.output.parent)
        return status
    import autokern

    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOKERN_HOME"], os.environ["AUTOKERN_CALIBRATE"] = folder, "never"
        results = {**describe(autokern.profile().host, quick=False), "workloads": {}}
        if options.workloads and options.output.exists():
            earlier = json.loads(options.output.read_text(encoding="utf-8"))
            if differences(earlier, results):
                parser.error(f"{options.output.name} is of another machine or other versions: run all workloads")
            results["workloads"] = earlier["workloads"]
        for name in [name for name in WORKLOADS if name in (options.workloads or WORKLOADS)]:
            before = results["workloads"].get(name, {}).get("methods", {}) if options.failed else {}
            known = {method: one for method, one in before.items() if "failed" not in one}
            results["workloads"][name] = measured(name, results, console.print, known)
            save(results, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
