"""The support matrix of `docs/support.md`: models of GPyTorch and BoTorch run, and the ops are noted that serve them.

Nothing is measured and stock answers every call, so the page is the same on every machine with these libraries.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import botorch
import documents
import gpytorch
import linear_operator
import numpy
import scipy
import torch
from support_cases import Case, cases

import autokern
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.runtime import dispatch
from autokern.runtime.session import Session

DOCUMENT = Path(__file__).parents[1] / "docs" / "support.md"

Candidates = dict[str, set[str]]
"""Of each op asked, the candidates other than stock that can serve."""


def able(problem: Problem) -> set[str]:
    """Return the candidates other than stock that serve a problem to full accuracy, whatever this machine has.

    Those with one thread (``fused@1``) count as what they limit; one that moves the data to a GPU does not count.
    """
    usable = (c for c in get(problem.op).candidates if c.accuracy != "approximate" and c.unsupported(problem) is None)
    return {c.name.partition("@")[0] for c in usable} - {"stock", "accelerator"}


@contextlib.contextmanager
def noted() -> Iterator[Candidates]:
    """Note the ops that are asked: of nested ones the outermost that anything but stock can serve."""
    found: Candidates = {}
    made, served = Session.made, 0

    def noting(self: Session, table: Any, decision: Any, *args: Any, **options: Any) -> Any:
        entry = made(self, table, decision, *args, **options)
        run, others = entry.run, able(table.problem)

        def counted(*arguments: Any) -> Any:
            nonlocal served
            if not served:
                found.setdefault(table.op.name, set()).update(others)
            served += bool(others)
            try:
                return run(*arguments)
            finally:
                served -= bool(others)

        entry.run = counted
        return entry

    Session.made = noting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Session.made = made  # type: ignore[method-assign]


def asked(case: Case) -> tuple[Candidates, Candidates]:
    """Run a case; return the ops that its training step asked for, and those of its prediction."""
    torch.manual_seed(0)
    dispatch.reset()
    with autokern.enabled(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models trained by so little
        made = case.make()
        with noted() as trained:
            made.train()
        dispatch.reset()
        with noted() as predicted:
            made.predict()
    return trained, predicted


def cell(found: Candidates) -> str:
    """Return the ops of a cell, those that only stock can serve left out."""
    return ", ".join(f"`{op}`" for op in sorted(found) if found[op]) or "stock"


HEADS = {
    "kernels": "## Kernels\n\nAn `ExactGP` with a `GaussianLikelihood`, 80 points, float64.\n",
    "models": "## Models and likelihoods of GPyTorch\n\nRBF kernels, 80 points (40 with derivatives), float64.\n",
    "botorch": "## Models of BoTorch\n\nTraining is `fit_gpytorch_mll`, prediction `posterior(X)`.\n",
}


def markdown(rows: Sequence[tuple[Case, Candidates, Candidates]]) -> str:
    lines, every = [], Candidates()
    for group, head in HEADS.items():
        lines += [head, f"| {group if group != 'botorch' else 'model'} | training | prediction |", "|---|---|---|"]
        for case, trained, predicted in rows:
            if case.group == group:
                lines.append(f"| {case.name} | {cell(trained)} | {cell(predicted)} |")
                for op, names in (*trained.items(), *predicted.items()):
                    every.setdefault(op, set()).update(names)
        lines.append("")
    lines += ["## Candidates\n", "| op | computes | may run in some row above |", "|---|---|---|"]
    for op, names in sorted(every.items()):
        if names:
            lines.append(f"| `{op}` | {get(op).summary} | {', '.join(f'`{name}`' for name in sorted(names))} |")
    libraries = (torch, gpytorch, linear_operator, botorch, numpy, scipy)
    versions = ", ".join(f"{library.__name__} {library.__version__.partition('+')[0]}" for library in libraries)
    return "\n".join([f"Run with {versions}.\n", *lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the models and write the page, or with ``--check`` tell by the exit status whether it says the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DOCUMENT, help="the page that holds the tables")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if the page says otherwise")
    options = parser.parse_args(arguments)
    for name in [name for name in os.environ if name.startswith("AUTOKERN")]:
        del os.environ[name]
    os.environ["AUTOKERN_DETERMINISTIC"] = "1"
    with tempfile.TemporaryDirectory() as home:
        os.environ["AUTOKERN_HOME"] = home
        rows = [(case, *asked(case)) for case in cases()]
    same = documents.refresh(options.output, "support", markdown(rows), options.check)
    if options.check and not same:
        print(f"{options.output.name} says otherwise than the models that ran: run calibration/support.py")
    return int(options.check and not same)


if __name__ == "__main__":
    sys.exit(main())
