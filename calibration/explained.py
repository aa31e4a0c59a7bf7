"""What `explain` tells of answers that iterate: steps and a prediction of one model; writes `explained.json`.

The text in the documents is made of the recorded decisions by the package as it is.

    python calibration/explained.py
    python calibration/explained.py --readme docs/evidence.md
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import documents
import msgspec
import torch
from end_to_end import describe
from figures import origin, save
from large import Stepper
from large_models import MODELS, model_of
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor
from training import forced_exact
from workloads import uniform

import autokern
from autokern.core.decision import Decision
from autokern.runtime import dispatch

JSON_PATH, BLOCK = Path(__file__).parent / "explained.json", "explained"
MODEL, N, POINTS, STEPS = "surface", 2000, 100, 3
ORDERS = {
    "preconditioned": {"exact_log_prob": "preconditioned"},
    "stock": {"exact_log_prob": "stock", "inv_quad_logdet": "stock"},
}
PREDICTED = {"predict": "stock", "solve": "cholesky"}


def steps(order: Mapping[str, str] | None) -> tuple[list[tuple[Decision, int]], Stepper]:
    """Return the decisions of some training steps under an order, and the steps; without one exact ones."""
    torch.manual_seed(N)
    stepper = Stepper(model_of(MODEL, N))
    if order is None:
        with forced_exact():
            stepper()
        return [], stepper
    dispatch.reset()
    with autokern.enabled(), autokern.using(force=order):
        for _ in range(STEPS):
            stepper()
    return autokern.explain().decisions, stepper


def predicted(order: Mapping[str, str] | None) -> tuple[list[tuple[Decision, int]], Tensor]:
    """Return the decisions of a prediction under an order, and its mean; without one of an exact prediction."""
    model, x = model_of(MODEL, N).eval(), uniform(POINTS, MODELS[MODEL].d, seed=1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        if order is None:
            with forced_exact():
                return [], model(x).mean
        dispatch.reset()
        with autokern.enabled(), autokern.using(force=order):
            mean = model(x).mean
    return autokern.explain().decisions, mean


def one(decisions: Sequence[tuple[Decision, int]], op: str) -> Any:
    """Return the decision of an op as plain data."""
    (found,) = (decision for decision, _ in decisions if decision.problem.op == op)
    return msgspec.to_builtins(found)


def run() -> dict[str, Any]:
    """Run the model under every order."""
    _, truth = steps(None)
    found: dict[str, Any] = {}
    for name, order in ORDERS.items():
        decisions, stepper = steps(order)
        found[name] = {"decision": one(decisions, "exact_log_prob"), "errors": stepper.errors(truth)}
    mean = predicted(None)[1]
    decisions, own = predicted(PREDICTED)
    gap = float((own - mean).abs().max() / mean.abs().max())
    return {**found, "predicted": {"decision": one(decisions, "predict"), "errors": {"mean": gap}}}


def told(figure: Mapping[str, Any], whole: bool) -> str:
    """Return a decision as it prints, without the candidates that cannot serve; of a part the first lines alone."""
    lines = str(msgspec.convert(figure["decision"], Decision)).splitlines()
    kept = (line for line in lines if " cannot: " not in line and (whole or not line.startswith(("   ", "  →"))))
    return "\n".join(kept)


def block(results: Mapping[str, Any]) -> str:
    """Return the texts as Markdown."""
    found = results["explained"]
    parts = [f"```\n{told(found[name], name == 'preconditioned')}\n```" for name in (*ORDERS, "predicted")]
    worth = "; ".join(
        f"`{name}` {found[name]['errors']['loss']:.0e} / {found[name]['errors']['gradient']:.0e}" for name in ORDERS
    )
    note = (
        f"{origin(results)}; no profile of the machine. {MODELS[MODEL].what}, {N:,} points, float64; {STEPS} steps at "
        f"the same hyperparameters, and {POINTS} test points. Errors of loss / gradient, "
        f"relative to exact ones: {worth}; of the predicted mean {found['predicted']['errors']['mean']:.0e}."
    )
    return "\n\n".join([*parts, note]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; 0 is fine, 1 a document that does not hold the texts of the JSON."""
    parser = argparse.ArgumentParser(description="Record what explain tells of answers that iterate.")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--readme", type=Path, metavar="FILE", help="run nothing, rewrite the texts in FILE")
    task.add_argument("--check", type=Path, metavar="FILE", help="run nothing, exit 1 if those texts are out of date")
    parser.add_argument("--output", type=Path, default=JSON_PATH, help="the JSON to write or to read")
    options = parser.parse_args(arguments)
    if (served := documents.served(parser, options, {BLOCK: block})) is not None:
        return served
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOKERN_HOME"], os.environ["AUTOKERN_CALIBRATE"] = folder, "never"
        dispatch.reset()
        save({**describe(autokern.profile().host, quick=False), "explained": run()}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
