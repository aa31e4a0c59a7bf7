"""Times of products and training steps over ranks, against one process of one thread, for `docs/ranks.md`.

``python calibration/ranks.py`` starts jobs of 1 and 2 processes on this machine, one thread each, and prints a JSON
document and the rows of the table.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DIMENSIONS, COLUMNS = 3, 11


def product(points: int) -> dict[str, Any]:
    """Time one product and its gradients in this rank."""
    import torch

    from autokern.kernels import over_ranks, partition
    from autokern.kernels.tree import Node, Tree

    drawn = torch.rand(points, DIMENSIONS + COLUMNS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, v = drawn[:, :DIMENSIONS].contiguous(), drawn[:, DIMENSIONS:].contiguous()
    tree, plan = Tree(Node("leaf", "matern52"), [3 * x], [], []), partition.usual(x.device)
    began = time.perf_counter()
    out = over_ranks.product(tree, None, v, plan)
    between = time.perf_counter()
    (by_points, *_), _ = over_ranks.gradients(tree, None, out, v, plan)
    end = time.perf_counter()
    sums = [float(out.sum()), float(out.abs().max()), float(by_points.square().sum())]
    return {"seconds": [between - began, end - between], "values": sums}


def step(points: int) -> dict[str, Any]:
    """Time training steps of a model; the second one, for which neighbours are known."""
    import gpytorch
    import torch

    drawn = torch.rand(points, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = drawn[:, :2].contiguous()
    y = (6 * x[:, 0]).sin() + (5 * x[:, 1]).cos() + 0.3 * (drawn[:, 2] - 0.5)

    class Model(gpytorch.models.ExactGP):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(2.5))

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Model().double()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    for _ in range(2):
        model.zero_grad()
        began = time.perf_counter()
        loss = -mll(model(x), y)
        between = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
    values = [loss.item(), *(p.grad.sum().item() for p in model.parameters())]
    return {"seconds": [between - began, end - between], "values": values}


def child(what: str, points: int) -> None:
    """Run one rank, and let rank 0 print what it found."""
    import autokern
    from autokern.runtime import ranks
    from autokern.system import ranks as system

    autokern.enable()
    link = None
    if system.is_job():
        ranks.begin()
        link = system.held().link._asdict()  # type: ignore[union-attr]
    found = {"product": product, "step": step}[what](points)
    found |= {"link": link, "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found), flush=True)
    if system.held() is not None:
        system.held().barrier()  # type: ignore[union-attr]
        ranks.end()


def job(what: str, points: int, count: int) -> dict[str, Any]:
    """Run a job of so many processes of one thread."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "AUTOKERN_CALIBRATE": "never"}
    if count > 1:
        common |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(Path(__file__).resolve()), what, str(points)]
    started = [
        subprocess.Popen(command, env=common | ({"RANK": str(rank)} if count > 1 else {}), stdout=subprocess.PIPE)
        for rank in range(count)
    ]
    outputs = [process.communicate()[0] for process in started]
    return {"what": what, "points": points, "ranks": count, **json.loads(outputs[0])}


def predicted(points: int, count: int, rate: float, latency: float, bandwidth: float) -> float:
    """Return the seconds of a product over so many ranks: tiles over their rate, and a ring's all-reduce."""
    moved = 2 * (count - 1) / count * 8 * points * COLUMNS
    return points**2 / (rate * count) + moved / bandwidth + 4 * (count - 1) * latency


def simulated(rate: float, latency: float, bandwidth: float) -> None:
    """Print what the model of costs predicts: a simulation."""
    for points in (60_000, 1_000_000, 10_000_000):
        each = [predicted(points, count, rate, latency, bandwidth) for count in (1, 2, 16, 128, 1024)]
        print(f"| {points:,} | " + " | ".join(f"{seconds:.3g} s" for seconds in each) + " |")


def main() -> None:
    """Run all jobs and print what they found."""
    found = [job(w, n, c) for w, n in (("step", 12_000), ("product", 60_000)) for c in (1, 2)]
    print(json.dumps(found, indent=1))
    for alone, both in zip(found[::2], found[1::2], strict=True):
        apart = max(abs(a - b) / max(abs(a), 1e-300) for a, b in zip(alone["values"], both["values"], strict=True))
        one, two = sum(alone["seconds"]), sum(both["seconds"])
        print(f"| {alone['what']}, n = {alone['points']:,} | {one:.1f} s | {two:.1f} s | {one / two:.2f} | {apart:.0e} "
              f"| {alone['mebibytes']:.0f} | {both['mebibytes']:.0f} |")  # fmt: skip
    simulated(60_000**2 / found[2]["seconds"][0], found[3]["link"]["latency"], 1e9)


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 2 else main()
