"""Times of products and training steps over ranks, against one process of one thread; writes `ranks.json`.

Jobs of 1, 2 and 4 processes of one thread each run on this machine, then of 2 and 1 once more. `--readme` and
`--check` write and check the tables of a document: what was measured, and what the model of costs predicts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import documents

JSON_PATH, BLOCK = Path(__file__).with_name("ranks.json"), "ranks"
DIMENSIONS, COLUMNS = 3, 11
COUNTS, SIMULATED = (1, 2, 4), (1, 2, 16, 128, 1024)
WORKS = {
    "product": (60_000, "product and its gradients"),
    "step": (12_000, "training step, pivots"),
    "rough": (12_000, "training step, neighbours"),
}
LENGTHSCALES = {"step": 0.7, "rough": 0.03}
LIMIT = 240.0


def product(points: int, begin: Callable[[], None]) -> dict[str, Any]:
    """Time one product and its gradients in this rank."""
    import torch

    from autokern.kernels import matmul, tiles
    from autokern.kernels.tree import Node, Tree

    drawn = torch.rand(points, DIMENSIONS + COLUMNS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, v = drawn[:, :DIMENSIONS].contiguous(), drawn[:, DIMENSIONS:].contiguous()
    tree, plan = Tree(Node("leaf", "matern52"), [3 * x], [], []), tiles.usual(x.device)
    begin()
    began = time.perf_counter()
    out = matmul.product(tree, None, v, plan)
    between = time.perf_counter()
    (by_points, *_), _ = matmul.gradients(tree, None, out, v, plan)
    end = time.perf_counter()
    sums = [float(out.sum()), float(out.abs().max()), float(by_points.square().sum())]
    return {"seconds": [between - began, end - between], "values": sums}


def step(points: int, lengthscale: float, begin: Callable[[], None]) -> dict[str, Any]:
    """Time training steps of a model; the second one, for which pivots or neighbours are known."""
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
            self.covar_module.base_kernel.lengthscale = lengthscale
            self.likelihood.noise = 0.05

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Model().double()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    for _ in range(2):
        model.zero_grad()
        begin()
        began = time.perf_counter()
        loss = -mll(model(x), y)
        between = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
    values = [loss.item(), *(p.grad.sum().item() for p in model.parameters())]
    return {"seconds": [between - began, end - between], "values": values}


class Counted:
    """Seconds in collectives, their number and bytes, and seconds of processor time, since the last beginning."""

    def __init__(self, here: Any) -> None:
        self.here = here
        self.begin()
        if here is not None:
            waiting, summed = here._wait, here.summed

            def timed(start: Any) -> None:
                began = time.perf_counter()
                waiting(start)
                self.waited += time.perf_counter() - began
                self.collectives += 1

            def counted(kind: Any, sizes: Any, data: Any, like: Any, count: int, work: Any) -> Any:
                self.bytes += count * like.element_size()
                return summed(kind, sizes, data, like, count, work)

            here._wait, here.summed = timed, counted

    def begin(self) -> None:
        """Forget what was counted, and let all ranks begin together."""
        if self.here is not None:
            self.here.barrier()
        self.waited, self.collectives, self.bytes, self.processor = 0.0, 0, 0, time.process_time()

    def found(self) -> dict[str, Any]:
        """Return what was counted."""
        return {
            "processor": time.process_time() - self.processor,
            "waited": self.waited,
            "collectives": self.collectives,
            "bytes": self.bytes,
            "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def child(what: str, points: int) -> None:
    """Run one rank, and let rank 0 print what all found."""
    import autokern
    from autokern.runtime import ranks
    from autokern.system import ranks as system

    autokern.enable()
    if system.is_job():
        ranks.begin(timeout=LIMIT)
    here = system.held
    counted = Counted(here)
    lengthscale = LENGTHSCALES.get(what)
    found = product(points, counted.begin) if lengthscale is None else step(points, lengthscale, counted.begin)
    mine = counted.found()
    found["each"] = [mine] if here is None else here.objects(mine)
    found["link"] = None if here is None else here.link._asdict()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found), flush=True)
    if here is not None:
        here.barrier()
        ranks.end()


def job(what: str, points: int, count: int) -> dict[str, Any]:
    """Run a job of so many processes of one thread."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "AUTOKERN_CALIBRATE": "never"}
    if count > 1:
        common |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", what, str(points)]
    with tempfile.TemporaryDirectory() as folder:  # processes that start at once must not share KeOps's list
        started = []
        for rank in range(count):
            own = {"KEOPS_CACHE_FOLDER": os.path.join(folder, str(rank))} | ({"RANK": str(rank)} if count > 1 else {})
            started.append(subprocess.Popen(command, env=common | own, stdout=subprocess.PIPE))
        outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"{what} by {count} processes failed: {[process.returncode for process in started]}")
    return {"what": what, "points": points, "ranks": count, **json.loads(outputs[0])}


def predicted(points: int, count: int, rate: float, latency: float, bandwidth: float) -> float:
    """Return the seconds of a product over so many ranks: tiles over their rate, and a ring's all-reduce."""
    moved = 2 * (count - 1) / count * 8 * points * COLUMNS
    return points**2 / (rate * count) + moved / bandwidth + 4 * (count - 1) * latency


def best(results: Mapping[str, Any], what: str, count: int) -> Any:
    """Return the faster one of the jobs of a kind."""
    of = [job for job in results["jobs"] if (job["what"], job["ranks"]) == (what, count)]
    return min(of, key=lambda job: sum(job["seconds"]))


def gap(one: Sequence[float], two: Sequence[float]) -> float:
    """Return the largest difference of two lists of numbers, in units of the largest number."""
    return max(abs(a - b) for a, b in zip(one, two, strict=True)) / max(map(abs, one))


def block(results: Mapping[str, Any]) -> str:
    """Return the tables as Markdown."""
    from figures import origin

    lines = [
        "| work | processes | time | times as fast | processor time of each | in collectives | collectives | sent | "
        "memory of each | agreement |",
        f"|---|{'---:|' * 9}",
    ]
    for what, (_, label) in WORKS.items():
        alone = best(results, what, 1)
        for count in results["counts"]:
            found = best(results, what, count)
            seconds, each = sum(found["seconds"]), found["each"]
            columns = [
                f"{label}, n = {found['points']:,}", f"{count}", f"{seconds:.2f} s",
                f"{sum(alone['seconds']) / seconds:.2f}", f"{max(one['processor'] for one in each):.2f} s",
                f"{max(one['waited'] for one in each):.2f} s", f"{each[0]['collectives']}",
                f"{each[0]['bytes'] / 1e6:.1f} MB", f"{max(one['mebibytes'] for one in each):.0f} MiB",
                "" if count == 1 else f"{gap(alone['values'], found['values']):.0e}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(columns)} |")
    alone, both = best(results, "product", 1), best(results, "product", 2)
    link, points = both["link"], alone["points"]
    rate = points**2 / alone["seconds"][0]
    foretold = predicted(points, 2, rate, **link)
    rough = " **Rough: other programs ran on the machine.**" if results["rough"] else ""
    note = (
        f"{origin(results)}, {results['cores']} cores; processes of one thread, so that more processes than cores "
        f"share them.{rough} Jobs of one and two processes ran twice, in both orders; the faster run counts. Agreement "
        "is the largest difference from one process of loss and gradients (or of sums of the product and its "
        "gradients), in units of the largest."
    )
    model = (
        f"The model of costs is tiles over the rate of one process ({rate:.2g} elements of a symmetric matrix in a "
        f"second) and a ring's all-reduce over the links. With the links measured here ({link['bandwidth'] / 1e9:.2g} "
        f"GB/s, {link['latency'] * 1e3:.2g} ms) it predicts {foretold:.3g} s for the product alone by two ranks; "
        f"{both['seconds'][0]:.3g} s were measured. With links of 1 GB/s and that latency it predicts for one product "
        f"with {COLUMNS} columns, **as a simulation and not as a measurement**:"
    )
    table = [
        "| points |" + "".join(f" {count:,} rank{'s' * (count > 1)} |" for count in SIMULATED),
        f"|---|{'---:|' * len(SIMULATED)}",
    ]
    for n in (60_000, 1_000_000, 10_000_000):
        times = [predicted(n, count, rate, link["latency"], 1e9) for count in SIMULATED]
        table.append(f"| {n:,} |" + "".join(f" {seconds:,.3g} s |" for seconds in times))
    return "\n".join([*lines, "", note, "", model, "", *table, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; 0 is fine, 1 a document that does not hold the figures of the JSON."""
    parser = argparse.ArgumentParser(description="Time products and training steps over ranks.")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--readme", type=Path, metavar="FILE", help="run nothing, rewrite the tables in FILE")
    task.add_argument("--check", type=Path, metavar="FILE", help="run nothing, exit 1 if the tables are out of date")
    task.add_argument("--child", nargs=2, metavar=("WORK", "POINTS"), help=argparse.SUPPRESS)
    parser.add_argument("--rough", action="store_true", help="say that other programs ran on the machine")
    parser.add_argument("--points", type=int, help="so many points for all work")
    parser.add_argument("--output", type=Path, default=JSON_PATH, help="the JSON to write or to read")
    options = parser.parse_args(arguments)
    if options.child is not None:
        child(options.child[0], int(options.child[1]))
        return 0
    if (served := documents.served(parser, options, {BLOCK: block})) is not None:
        return served
    from end_to_end import describe
    from figures import save

    import autokern

    cores = len(os.sched_getaffinity(0))
    results: dict[str, Any] = {**describe(autokern.profile().host, quick=False), "rough": options.rough}
    results |= {"cores": cores, "counts": list(COUNTS), "jobs": []}
    for counts in (COUNTS, COUNTS[1::-1]):
        for what, (points, _) in WORKS.items():
            for count in counts:
                results["jobs"].append(job(what, options.points or points, count))
                print(what, count, [round(seconds, 2) for seconds in results["jobs"][-1]["seconds"]], flush=True)
    save(results, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
