"""Products of kernel matrices with few columns, for `study.py`, up to sizes where the matrix has no place.

`products` times KeOps, the matrix itself and every candidate at one size in turns, and compares them with a floor;
`scaling` times the dispatched product over n²; `peaks` measures its memory in fresh processes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import gpytorch
import torch
from children import Peak, in_child
from measuring import Report, interleave
from torch import Tensor
from workloads import scaled

import autokern
from autokern.core.registry import get
from autokern.core.state import inside
from autokern.runtime.dispatch import explain
from autokern.system import host, memory, threads
from autokern.tuning import timer
from autokern.tuning.measuring import trial

Call = Callable[[], object]
COLUMNS = 11
DTYPES = {"float32": torch.float32, "float64": torch.float64}
FAMILIES = ("rbf", "matern52")
ROOT5 = math.sqrt(5.0)
SIZES = {"cpu": (20_000, (10,)), "accelerator": (100_000, (3, 10, 50, 110, 112, 300))}
"""Points and dimensions of `products`."""
GROWN = {
    "cpu": (3000, 5000, 10_000, 20_000, 30_000, 50_000, 100_000),
    "accelerator": (10_000, 30_000, 100_000, 300_000, 1_000_000),
}
HELD = (20_000, 100_000)
TILES = {"cpu": ((512, 1024), 16), "accelerator": ((4096, 8192), 4)}
"""Sizes of the tiles that the floor is measured on, and how many each thread takes in a row."""


def on(device: str) -> str:
    """Return under which name sizes for a device are kept."""
    return "cpu" if device == "cpu" else "accelerator"


class Case(NamedTuple):
    """A scaled ARD kernel with the points of rows and columns, the same tensor or not, and right-hand sides."""

    family: str
    kernel: gpytorch.kernels.ScaleKernel
    x1: Tensor
    x2: Tensor
    rhs: Tensor


def case(family: str, n: int, d: int, same: bool, dtype: torch.dtype, device: str, grad: bool = False) -> Case:
    """Return a case with points of a normal distribution and lengthscales that grow with the dimensions."""
    generator = torch.Generator().manual_seed(n + d)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype=dtype, device=device)

    kernel = scaled(family, d)
    kernel.base_kernel.lengthscale = d**0.5 * torch.linspace(0.75, 1.25, d)
    kernel = kernel.to(dtype=dtype, device=device).requires_grad_(grad)
    x = random(n, d)
    return Case(family, kernel, x, x if same else random(n, d), random(n, COLUMNS))


def without_keops() -> str:
    """Return why KeOps takes no part, or nothing if it works: a small product is compiled to know."""
    if importlib.util.find_spec("pykeops") is None:
        return "pykeops is not installed"
    try:
        import pykeops

        pykeops.set_verbose(False)
        small = case("rbf", 50, 2, True, torch.float32, "cpu")
        torch.testing.assert_close(by_keops(small)(), whole(small)(), rtol=1e-3, atol=1e-3)
    except Exception as error:
        return f"pykeops does not work here: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def by_keops(of: Case) -> Call:
    """Return the product by KeOps; its formula is compiled when the function is first called."""
    from pykeops.torch import LazyTensor

    scale, lengthscale = of.kernel.outputscale.detach(), of.kernel.base_kernel.lengthscale.detach()
    rows, columns = of.x1 / lengthscale, of.x2 / lengthscale

    def product() -> Tensor:
        i, j = LazyTensor(rows.unsqueeze(1)), LazyTensor(columns.unsqueeze(0))
        squared = ((i - j) ** 2).sum(-1)
        if of.family == "rbf":
            k = (-squared / 2).exp()
        else:
            distance = ROOT5 * squared.sqrt()
            k = (1 + distance + distance**2 / 3) * (-distance).exp()
        out: Tensor = scale * (k @ of.rhs)
        return out

    return product


def layouts(v: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the ways to multiply a matrix by few columns: as they stand or transposed, padded to 16 or not."""
    wide = v.new_zeros(v.shape[0], -(-v.shape[1] // 16) * 16)
    wide[:, : v.shape[1]] = v
    turned, turned_wide = v.mT.contiguous(), wide.mT.contiguous()
    return {
        "columns": lambda k: k @ v,
        "columns, padded": lambda k: (k @ wide)[:, : v.shape[1]],
        "rows": lambda k: (turned @ k.mT).mT,
        "rows, padded": lambda k: (turned_wide @ k.mT)[: v.shape[1]].mT,
    }


def whole(of: Case) -> Call:
    """Return the product with the matrix itself: distances by one GEMM, the formula in place, the best layout.

    The layout is found when the function is first called.
    """
    scale, lengthscale = of.kernel.outputscale.detach(), of.kernel.base_kernel.lengthscale.detach()
    centre = of.x1.mean(0)
    rows, columns = (of.x1 - centre) / lengthscale, (of.x2 - centre) / lengthscale
    ways = layouts(of.rhs)
    best: list[str] = []

    def product() -> Tensor:
        r, c = rows.square().sum(-1, keepdim=True), columns.square().sum(-1, keepdim=True)
        left = torch.cat((-2 * rows, r, torch.ones_like(r)), -1)
        right = torch.cat((columns, torch.ones_like(c), c), -1)
        k = left @ right.mT
        if of.family == "rbf":
            k.mul_(-0.5).clamp_(max=0).exp_()
        else:
            k.clamp_(min=0).sqrt_().mul_(ROOT5)
            fading = (-k).exp_()
            k.mul_((k / 3).add_(1)).add_(1).mul_(fading)
        if not best:
            wait = synchronizer(k.device.type)
            best.append(min(ways, key=lambda name: timer.once(lambda: ways[name](k), wait)))
        return ways[best[0]](k) * scale

    return product


def synchronizer(device: str) -> Callable[[], None]:
    """Return a function that waits until queued work is done."""
    return host.settle


class Floor(NamedTuple):
    """The least seconds for one element of the matrix: exponential, distance, and product with the columns."""

    exp: float
    distance: float
    product: float

    def seconds(self, elements: int, same: bool) -> float:
        """Return the least time for so many elements; where both sides are the same, each is evaluated for two."""
        return elements * ((self.exp + self.distance) * (0.5 if same else 1.0) + self.product)

    def half(self, elements: int) -> float:
        """Return half the time of everything: a bound for the symmetric case that nothing can reach."""
        return elements * (self.exp + self.distance + self.product) / 2


def floor(d: int, dtype: torch.dtype, device: str) -> Floor:
    """Measure the pieces of the floor, each by its best tile and layout.

    As many threads work at once, each on tiles of its own, as torch uses for one operation.
    """
    members, (sizes, turns) = threads.members(torch.device(device)), TILES[on(device)]
    least = dict.fromkeys(Floor._fields, math.inf)
    for size in sizes:
        tiles = [pieces(size, d, dtype, device) for _ in range(members)]
        for name in Floor._fields:
            calls = [together([tile[name][way] for tile in tiles], turns) for way in tiles[0][name]]
            each = min(timer.once(call, synchronizer(device)) for call in calls for _ in range(5))
            least[name] = min(least[name], each / (members * turns * size**2))
    return Floor(**least)


def pieces(size: int, d: int, dtype: torch.dtype, device: str) -> dict[str, dict[str, Call]]:
    """Return the ways to do each piece on one tile, with buffers of its own."""
    tile = torch.rand(size, size, dtype=dtype, device=device).neg_()
    out = torch.empty_like(tile)
    left, right = (tile.new_ones(size, d + 2) for _ in range(2))
    products: dict[str, Call] = {}
    for name, way in layouts(torch.rand_like(tile[:, :COLUMNS])).items():
        products[name] = lambda way=way: way(tile)
        products[f"{name}, turned"] = lambda way=way: way(tile.mT)
    return {
        "exp": {"": lambda: torch.exp(tile, out=out)},
        "distance": {"": lambda: torch.mm(left, right.mT, out=out)},
        "product": products,
    }


def together(each: list[Call], turns: int) -> Call:
    """Return a function in which every member of the pool does its call some times."""

    def work(member: threads.Member) -> None:
        for _ in range(turns):
            each[member.number]()

    return lambda: threads.together(work, len(each))


def run_products(device: str, seconds: float, report: Report) -> dict[str, Any]:
    """Time every way at one size in turns; after `seconds` no further case is begun."""
    reason, (n, dimensions) = without_keops(), SIZES[on(device)]
    if reason:
        report(f"KeOps takes no part: {reason}")
    cases = list(itertools.product(dimensions, FAMILIES, DTYPES, (True, False)))
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    for d, family, dtype, same in cases:
        what = f"products, {family}, d={d}, {dtype}, {'same' if same else 'other'} points"
        if rows and time.perf_counter() - began > seconds:
            report(f"{what}: left out, no time")
            continue
        of = case(family, n, d, same, DTYPES[dtype], device)
        row = {"family": family, "d": d, "dtype": dtype, "same": same}
        rows.append(row | compared(of, not reason, seconds / len(cases)))
        report(f"{what}: done")
    return {"n": n, "columns": COLUMNS, "keops": reason or "works", "rows": rows}


def compared(of: Case, keops: bool, seconds: float) -> dict[str, Any]:
    op, args, device = get("kernel_matmul"), (of.kernel, of.x1, of.x2, of.rhs), of.rhs.device.type
    problem, elements = op.problem_of(*args), len(of.x1) * len(of.x2)
    calls: dict[str, Call] = {"KeOps": by_keops(of)} if keops else {}
    if memory.fits(2 * elements * of.rhs.itemsize, device):
        calls["the matrix"] = whole(of)
    able = [c for c in op.feasible(problem) if keops or not c.compiles]
    fitting = [c for c in able if memory.fits(c.memory(problem), device)]
    calls |= {c.name: trial(op, c.run, problem, args) for c in fitting}
    failed = {}
    inside.active = True  # what a candidate calls itself is not dispatched
    try:
        with torch.no_grad():
            warm = {}
            for name, call in list(calls.items()):
                try:
                    call()
                    warm[name] = timer.once(call, synchronizer(device))
                except Exception as error:
                    failed[name] = f"{type(error).__name__}: {error}"[:200]
                    del calls[name]
            wait = synchronizer(device)
            found = timer.compare(calls, synchronize=wait, seconds=seconds, rounds=(3, 9), warm=warm)
            least = floor(of.x1.shape[-1], of.rhs.dtype, device)
    finally:
        inside.active = False
    return {
        "rounds": max(timing.rounds for timing in found.values()), "chosen": explain(problem).candidate,
        "seconds": {name: timing.seconds for name, timing in found.items()},
        "too large": sorted(c.name for c in able if c not in fitting), "failed": failed,
        "floor": {**least._asdict(), "seconds": least.seconds(elements, of.x1 is of.x2), "half": least.half(elements)},
    }  # fmt: skip


def run_scaling(device: str, seconds: float, report: Report) -> dict[str, Any]:
    """Time the dispatched product over n², all sizes in turn."""
    calls: dict[str, Call] = {}
    chosen, grown = {}, GROWN[on(device)]
    for n in grown:
        of = case("rbf", n, 3, True, torch.float32, device)
        calls[str(n)] = lambda of=of: (
            autokern.covariance.matmul(of.kernel, of.x1, None, of.rhs),
            host.settle(),
        )
        chosen[n] = explain(get("kernel_matmul").problem_of(of.kernel, of.x1, of.x1, of.rhs)).candidate
    with torch.no_grad():
        taken = interleave(dict.fromkeys(calls, contextlib.nullcontext), calls, 5, warmup=1, seconds=seconds, least=1)
    middle = {n: statistics.median(taken[str(n)]) for n in grown}
    usual = statistics.median(middle[n] / n**2 for n in grown)
    rows = [
        {"n": n, "chosen": chosen[n], "seconds": middle[n], "each": middle[n] / n**2, "ratio": middle[n] / n**2 / usual}
        for n in grown
    ]
    report(f"scaling: {min(r['ratio'] for r in rows):.2f} to {max(r['ratio'] for r in rows):.2f} of the median")
    return {"d": 3, "columns": COLUMNS, "dtype": "float32", "rows": rows}


def peak(n: int, d: int, dtype: str, grad: bool) -> dict[str, Any]:
    """Return seconds and the peak of memory of one dispatched product, above what goes in and comes out."""
    seconds, taken, given = 0.0, 0, 0
    for size in (min(n, 2000), n):  # the first one loads what it needs
        of = case("rbf", size, d, True, DTYPES[dtype], "cpu", grad)
        meter, start = Peak(), time.perf_counter()
        out = autokern.covariance.matmul(of.kernel, of.x1, None, of.rhs)
        given = out.nbytes
        if grad:
            gradients = torch.autograd.grad(out.sum(), list(of.kernel.parameters()))
            given += sum(t.nbytes for t in gradients)
        seconds, taken = time.perf_counter() - start, meter.bytes()
    candidates = autokern.stats()["kernel_matmul"]
    return {"seconds": seconds, "bytes": max(0, taken - given), "candidates": candidates}


def run_peaks(device: str, seconds: float, report: Report) -> dict[str, Any]:
    """Measure the peak of products on the CPU in fresh processes, forward and with gradients."""
    rows = []
    for n, dtype, grad in itertools.product(HELD, DTYPES, (False, True)):
        found = in_child("products", "peak", n, 3, dtype, grad, limit=seconds)
        rows.append({"n": n, "dtype": dtype, "gradients": grad, **found})
        result = found.get("failed") or f"{found['bytes'] / 2**20:.0f} MiB, {found['seconds']:.2f} s"
        report(f"peaks, n={n}, {dtype}, {'with gradients' if grad else 'forward'}: {result}")
    return {"d": 3, "columns": COLUMNS, "rows": rows}
