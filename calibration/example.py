"""The worked example of `docs/how-it-decides.md`: two decisions on a recorded host, written out from its profile.

Candidates that cannot serve are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import documents
import torch
from machines import Replayed

from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.core.settings import Settings
from autokern.tuning.chooser import Chooser, fitted
from autokern.tuning.forest import CONFIDENCE, NOISE
from autokern.tuning.policy import decide, described
from autokern.tuning.store import read_file

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "how-it-decides.md"
HOST = "intel-xeon-processor"
ASKED = Problem(op="kernel_matmul", m=6000, n=6000, d=10, rhs=11, dtype="float64", variant="rbf/same")
NEARLY = Problem(op="cholesky", m=1500, n=1500, dtype="float64")


def markdown() -> str:
    chooser = Chooser(fitted(read_file(HERE / "hosts" / f"{HOST}.json")))
    torch.set_num_threads(chooser.profile.host["cpu"]["torch_threads"])  # tiles take memory for each thread
    parts = []
    for problem in (ASKED, NEARLY):
        table = Replayed(get(problem.op), problem, chooser.profile)
        decision = described(decide(table, chooser, Settings()), chooser, Settings())
        estimates = chooser.estimates(problem)
        others = [name for name in estimates if name != "stock" and name not in decision.excluded]
        runner = min(others, key=lambda name: estimates[name].log_ratio + CONFIDENCE * estimates[name].sigma)
        result = estimates[runner]
        reach = result.log_ratio + CONFIDENCE * result.sigma
        printed = "\n".join(line for line in str(decision).splitlines() if " cannot: " not in line)
        told_of = f"{reach:.2f}, below" if reach <= -NOISE else f"{reach:.2f}, not below"
        parts.append(
            f"```\n{printed}\n```\n\nThe logarithm of the time of `{runner}` over stock's is predicted as "
            f"{result.log_ratio:.2f} ± {result.sigma:.2f}.\n"
            f"{CONFIDENCE} standard deviations up it is {told_of} the {-NOISE} that counts as a gain.\n"
        )
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the example into the docs, or with ``--check`` tell by the exit status whether it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if the example is out of date")
    options = parser.parse_args(arguments)
    same = documents.refresh(DOCUMENT, "example", markdown(), options.check)
    return int(options.check and not same)


if __name__ == "__main__":
    sys.exit(main())
