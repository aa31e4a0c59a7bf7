"""One rank of a job of tests: what it finds goes to standard output as JSON, one line for each rank."""

import json
import os
import signal
import sys
import time

import torch

from autokern.core.errors import RanksError
from autokern.kernels import matmul, products
from autokern.kernels.tiles import Plan
from autokern.kernels.tree import Node, Tree
from autokern.system import ranks

N, T = 700, 3
PLAN = Plan(96)
DATA = torch.rand(N, 2 + T, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
X, V = DATA[:, :2].contiguous(), DATA[:, 2:].contiguous()


def tree(x: torch.Tensor = X, family: str = "matern52") -> Tree:
    return Tree(Node("scale", "", (Node("leaf", family),)), [3 * x], [], [torch.tensor(1.7, dtype=torch.float64)])


def gap() -> float:
    """How far a product over ranks is from one of this process alone; `rank_sweep` has all of them."""
    found, truth = matmul.product(tree(), None, V, PLAN), products.product(tree(), None, V, PLAN)
    return float((found - truth).abs().max() / truth.abs().max())


def error_of(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except (RanksError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def usual(here: ranks.Ranks) -> dict[str, object]:
    found: dict[str, object] = {"before": gap()}
    mine = V.clone()
    mine[5, 1] += here.rank * 1e-15
    found["vectors"] = error_of(lambda: matmul.product(tree(), None, mine, PLAN))
    moved = tree(X + here.rank * 1e-12)
    found["points"] = error_of(lambda: matmul.gradients(moved, None, V, V, PLAN))
    heavier = tree()
    heavier.weights[0].add_(here.rank * 1e-15)
    found["hyperparameters"] = error_of(lambda: matmul.product(heavier, None, V, PLAN))
    other = tree(family="rbf" if here.rank else "matern52")
    found["kernels"] = error_of(lambda: matmul.product(other, None, V, PLAN))
    if here.rank:
        found["program"] = error_of(lambda: matmul.gradients(tree(), None, V, V, PLAN))
    else:
        found["program"] = error_of(lambda: matmul.product(tree(), None, V, PLAN))

    def short(out: torch.Tensor) -> None:
        if here.rank:
            raise MemoryError("no more")

    found["memory"] = error_of(lambda: here.summed("product", (1,), {}, V, 4, short))
    return {**found, "after": gap()}


def lost(here: ranks.Ranks, way: str) -> dict[str, object]:
    if here.rank == here.size - 1 and way == "absent":
        time.sleep(3600)
    if here.rank == here.size - 1:
        os.kill(os.getpid(), signal.SIGKILL if way == "killed" else signal.SIGSTOP)
    began = time.monotonic()
    first = error_of(lambda: matmul.product(tree(), None, V, PLAN))
    return {"error": first, "seconds": time.monotonic() - began,
            "again": error_of(lambda: matmul.product(tree(), None, V, PLAN))}  # fmt: skip


def main() -> None:
    way, timeout = sys.argv[1], float(sys.argv[2])
    here = ranks.join(timeout)
    matmul.LEAST, matmul._MOST = 1, 0.0
    ranks.held = here
    found = usual(here) if way == "usual" else lost(here, way)
    print(json.dumps({"rank": here.rank, **found}), flush=True)
    if way == "usual":
        here.barrier()
    here.leave()


if __name__ == "__main__":
    main()
