"""What products of kernel matrices are compared with in `products.py`: KeOps, the matrix itself, and a floor.

Every contender is a function without arguments that returns ``K rhs``; the pieces of the floor return nothing. May
import `measuring`, and public names and the crew of `autokern`.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import gpytorch
import torch
from measuring import quiet_collector
from torch import Tensor

from autokern import crew
from autokern.crew import Member

Call = Callable[[], object]
ROOT5 = math.sqrt(5.0)
TILES = {"cpu": ((512, 1024), 16), "accelerator": ((4096, 8192), 4)}
"""Sizes of the tiles that the floor is measured on, and how many each thread takes in a row."""


class Case(NamedTuple):
    """A scaled ARD kernel with the points of rows and columns, the same tensor or not, and right-hand sides."""

    family: str
    kernel: gpytorch.kernels.ScaleKernel
    x1: Tensor
    x2: Tensor
    rhs: Tensor


def case(
    family: str, n: int, d: int, columns: int, same: bool, dtype: torch.dtype, device: str, grad: bool = False
) -> Case:
    """Return a case with points of a normal distribution and lengthscales that grow with the dimensions."""
    generator = torch.Generator().manual_seed(n + d)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype=dtype, device=device)

    base = {"rbf": gpytorch.kernels.RBFKernel, "matern52": gpytorch.kernels.MaternKernel}[family](ard_num_dims=d)
    base.lengthscale = d**0.5 * torch.linspace(0.75, 1.25, d)
    kernel = gpytorch.kernels.ScaleKernel(base).to(dtype=dtype, device=device).requires_grad_(grad)
    x = random(n, d)
    return Case(family, kernel, x, x if same else random(n, d), random(n, columns))


def without_keops() -> str:
    """Return why KeOps takes no part, or nothing if it works: a small product is compiled to know."""
    if importlib.util.find_spec("pykeops") is None:
        return "pykeops is not installed"
    try:
        import pykeops

        pykeops.set_verbose(False)
        small = case("rbf", 50, 2, 3, True, torch.float32, "cpu")
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
            seconds = {name: _seconds(lambda way=way: way(k)) for name, way in ways.items()}
            best.append(min(seconds, key=seconds.__getitem__))
        return ways[best[0]](k) * scale

    return product


def floor_pieces(d: int, columns: int, dtype: torch.dtype, device: str) -> dict[str, tuple[Call, int]]:
    """Return the pieces of the floor: what to time, and how many elements of the matrix that does.

    Names are ``exp``, ``distance`` and ``product`` with size and layout of the tile. As many threads work at once, each
    on tiles of its own, as torch uses for one operation.
    """
    members = crew.size(torch.device(device))
    sizes, turns = TILES["cpu" if device == "cpu" else "accelerator"]
    found: dict[str, tuple[Call, int]] = {}
    for size in sizes:
        count = members * turns * size**2
        steps: dict[str, list[Call]] = {}
        for _ in range(members):
            for name, step in _steps(size, d, columns, dtype, device).items():
                steps.setdefault(name, []).append(step)
        for name, each in steps.items():
            found[f"{name}, {size}"] = (_together(each, turns), count)
    return found


def _steps(size: int, d: int, columns: int, dtype: torch.dtype, device: str) -> dict[str, Call]:
    """Return each piece on one tile, with buffers of its own."""
    options = {"dtype": dtype, "device": device}
    tile = torch.rand(size, size, **options).neg_()
    out = torch.empty_like(tile)
    left, right = (torch.rand(size, d + 2, **options) for _ in range(2))
    ways = layouts(torch.rand(size, columns, **options))
    steps: dict[str, Call] = {
        "exp": lambda: torch.exp(tile, out=out),
        "distance": lambda: torch.mm(left, right.mT, out=out),
    }
    for name, way in ways.items():
        steps[f"product, {name}"] = lambda way=way: way(tile)
        steps[f"product, {name}, turned"] = lambda way=way: way(tile.mT)
    return steps


def _together(each: list[Call], turns: int) -> Call:
    def work(member: Member) -> None:
        for _ in range(turns):
            each[member.number]()

    return lambda: crew.run(work, len(each))


class Floor(NamedTuple):
    """Seconds an element by piece, with the best tile and layout of each."""

    exp: float
    distance: float
    product: float

    def seconds(self, elements: int, same: bool) -> float:
        """Return the least time for so many elements; where both sides are the same, each is evaluated for two."""
        return elements * ((self.exp + self.distance) * (0.5 if same else 1.0) + self.product)

    def half(self, elements: int) -> float:
        """Return half the time of everything: a bound for the symmetric case that nothing can reach."""
        return elements * (self.exp + self.distance + self.product) / 2


def floor_of(seconds: Mapping[str, float], pieces: Mapping[str, tuple[Call, int]]) -> Floor:
    """Return the floor from the seconds of each piece."""
    return Floor(
        *(
            min(seconds[name] / count for name, (_, count) in pieces.items() if name.startswith(f"{piece},"))
            for piece in Floor._fields
        )
    )


def _seconds(call: Call, synchronize: Call = lambda: None) -> float:
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def interleaved(
    calls: Mapping[str, Call], rounds: int, seconds: float, least: float, synchronize: Call
) -> dict[str, list[float]]:
    """Return seconds a call, round by round; each round begins with another, and every other one runs backwards.

    No round but the first is begun after `seconds`; what is shorter than `least` seconds is called several times.
    """
    times: dict[str, int] = {}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad(), quiet_collector():
        for name, call in calls.items():
            call()
            times[name] = max(1, math.ceil(least / max(_seconds(call, synchronize), 1e-7)))
        began = time.perf_counter()
        for turn in range(rounds):
            if turn and time.perf_counter() - began > seconds:
                break
            names = list(calls)[turn % len(calls) :] + list(calls)[: turn % len(calls)]
            for name in names if turn % 2 == 0 else reversed(names):
                repeats, call = times[name], calls[name]
                taken[name].append(_seconds(lambda: [call() for _ in range(repeats)], synchronize) / repeats)  # noqa: B023
    return taken
