"""One rank of a job of tests: what it finds goes to standard output as JSON, one line for each rank."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch

from autokern.core.errors import RanksError
from autokern.kernels import over_ranks, products
from autokern.kernels.partition import Plan
from autokern.kernels.tree import Node, Tree
from autokern.system import ranks

N, T = 700, 3
PLAN = Plan(96)
DATA = torch.rand(N + 50, 2 + T, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
X, OTHER, V = DATA[:N, :2].contiguous(), [DATA[100:, :2].contiguous()], DATA[:N, 2:].contiguous()


def tree(x: torch.Tensor = X, family: str = "matern52") -> Tree:
    return Tree(Node("scale", "", (Node("leaf", family),)), [3 * x], [], [torch.tensor(1.7, dtype=torch.float64)])


def gap(found: object, truth: object) -> float:
    pairs = zip(found, truth, strict=True) if isinstance(found, list) else [(found, truth)]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-300)) for a, b in pairs)


def together() -> dict[str, object]:
    """Compute products and gradients, alike and cross, long and wide."""
    found: dict[str, object] = {}
    wide = DATA[:650, 2:].contiguous()
    for name, own, others, rhs in (
        ("same", tree(), None, V), ("long", tree(), OTHER, wide), ("wide", tree(X[:90]), OTHER, wide),
    ):  # fmt: skip
        out, truth = over_ranks.product(own, others, rhs, PLAN), products.product(own, others, rhs, PLAN)
        ours, by = over_ranks.gradients(own, others, truth, rhs, PLAN, True)
        exact, rhs_truth = products.gradients(own, others, truth, rhs, PLAN, True)
        found[name] = max(gap(out, truth), gap(ours, exact), gap(by, rhs_truth))
        again = over_ranks.product(own, others, rhs, PLAN), over_ranks.gradients(own, others, truth, rhs, PLAN, True)
        found[f"{name} bits"] = torch.equal(again[0], out) and all(map(torch.equal, again[1][0], ours))
    return found


def error_of(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except (RanksError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def usual(here: ranks.Ranks) -> dict[str, object]:
    found = together()
    mine = V.clone()
    mine[5, 1] += here.rank * 1e-15
    found["vectors"] = error_of(lambda: over_ranks.product(tree(), None, mine, PLAN))
    moved = tree(X + here.rank * 1e-12)
    found["points"] = error_of(lambda: over_ranks.gradients(moved, None, V, V, PLAN))
    heavier = tree()
    heavier.weights[0].add_(here.rank * 1e-15)
    found["hyperparameters"] = error_of(lambda: over_ranks.product(heavier, None, V, PLAN))
    other = tree(family="rbf" if here.rank else "matern52")
    found["kernels"] = error_of(lambda: over_ranks.product(other, None, V, PLAN))
    if here.rank:
        found["program"] = error_of(lambda: over_ranks.gradients(tree(), None, V, V, PLAN))
    else:
        found["program"] = error_of(lambda: over_ranks.product(tree(), None, V, PLAN))

    def short(out: torch.Tensor) -> None:
        if here.rank:
            raise MemoryError("no more")

    found["memory"] = error_of(lambda: here.summed("product", (1,), {}, V, 4, short))
    found["after"] = together()["same"]
    return found


def lost(here: ranks.Ranks, way: str) -> dict[str, object]:
    if here.rank == here.size - 1 and way == "absent":
        time.sleep(3600)
    if here.rank == here.size - 1:
        os.kill(os.getpid(), signal.SIGKILL if way == "killed" else signal.SIGSTOP)
    began = time.monotonic()
    first = error_of(lambda: over_ranks.product(tree(), None, V, PLAN))
    return {"error": first, "seconds": time.monotonic() - began,
            "again": error_of(lambda: over_ranks.product(tree(), None, V, PLAN))}  # fmt: skip


def main() -> None:
    way, timeout = sys.argv[1], float(sys.argv[2])
    here = ranks.join(timeout)
    over_ranks.LEAST, over_ranks._MOST = 1, 0.0
    ranks.use(here)
    found = usual(here) if way == "usual" else lost(here, way)
    print(json.dumps({"rank": here.rank, **found}), flush=True)
    if way == "usual":
        here.barrier()
    here.leave()


if __name__ == "__main__":
    main()
