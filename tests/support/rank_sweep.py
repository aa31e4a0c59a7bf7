"""One rank of a job that sweeps products over ranks: each case against this process alone, one JSON line of results."""

import itertools
import json
import sys
from typing import Any, NamedTuple

import torch
from tiling import KERNELS, distinct, prepared

from autokern.kernels import embedded, matmul, products
from autokern.kernels.tiles import Plan
from autokern.system import ranks

SOME = ("scaled rbf", "matern 1/2", "matern 5/2", "sum of products")


class Case(NamedTuple):
    """One product: ``m`` is None for the same points; `wanted` names what requires gradients."""

    n: int = 300
    m: int | None = None
    columns: int = 3
    dtype: str = "float64"
    kernel: str = "matern 5/2"
    batch: tuple[int, ...] = ()
    kernel_batch: tuple[int, ...] = ()
    wanted: tuple[str, ...] = ("x1", "x2", "rhs", "theta")
    layout: str = "plain"
    tile: int = 96


def cases() -> list[Case]:
    sides = [None, 300, 77, 700]
    found = [Case(m=m, dtype=d, kernel=k) for m in sides for d in ("float64", "float32") for k in SOME]
    found += [Case(m=m, columns=t) for m in sides for t in (1, 2, 65)]
    found += [Case(n, m, t) for n in (1, 2, 5, 17, 33, 97) for m in (None, 1, 20, 640) for t in (1, 4)]
    found += [Case(n=640, m=m) for m in (1, 5, 16)]
    names = ("x1", "x2", "rhs", "theta")
    sets = [w for size in range(4) for w in itertools.combinations(names, size)]
    found += [Case(m=m, wanted=w) for m in (None, 120) for w in sets]
    found += [
        Case(m=m, batch=b, kernel_batch=k) for m in (None, 120) for b, k in (((2,), ()), ((2, 3), (3,)), ((), (2,)))
    ]
    found += [Case(m=m, layout=layout) for m in (None, 120) for layout in ("strided", "turned", "expanded")]
    found += [Case(m=m, tile=tile) for m in (None, 120) for tile in (16, 4096)]
    return list(dict.fromkeys(found))


def laid(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in memory that is not contiguous."""
    if layout == "strided":
        return t.repeat_interleave(2, -1)[..., ::2]
    if layout == "turned":
        return t.mT.contiguous().mT
    return t[..., :1].expand(t.shape) if layout == "expanded" else t


def arguments(case: Case, number: int, exact: bool = False) -> tuple[Any, list[torch.Tensor]]:
    """Kernel and points, columns, right-hand sides: of the numbers of a case, or the same in double precision."""
    generator, dtype = torch.Generator().manual_seed(number), getattr(torch, case.dtype)

    def drawn(*shape: int) -> torch.Tensor:
        found = torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype)
        return laid(found.double() if exact else found, case.layout)

    kernel = prepared(KERNELS[case.kernel], torch.Size(case.kernel_batch), dtype, number)
    kernel = kernel.requires_grad_("theta" in case.wanted).to(torch.float64 if exact else dtype)
    x1 = drawn(*case.batch, case.n, 3).detach().requires_grad_("x1" in case.wanted)
    x2 = x1 if case.m is None else drawn(*case.batch, case.m, 3).detach().requires_grad_("x2" in case.wanted)
    rhs = drawn(*case.batch, case.n if case.m is None else case.m, case.columns).detach()
    return kernel, [x1, x2, rhs.requires_grad_("rhs" in case.wanted)]


def computed(case: Case, number: int, by: Any, exact: bool = False, twice: bool = False) -> list[torch.Tensor]:
    """Value and first derivatives, or derivatives of a sum of squared first derivatives."""
    kernel, (x1, x2, rhs) = arguments(case, number, exact)
    out = matmul.matmul(*embedded.both(kernel, x1, x2), rhs, Plan(case.tile), by)
    leaves = distinct(x1, x2, rhs, *kernel.parameters())
    if not leaves:
        return [out]
    if twice:
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(t.square().sum() for t in first), leaves))
    turned = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, turned, materialize_grads=True)]


def gap(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """The largest difference of two lists, each tensor's in units of its largest number."""
    gaps = [0.0]
    for one, two in zip(found, truth, strict=True):
        assert one.shape == two.shape
        if one.numel():
            gaps.append(float(((one - two).abs().max() / two.abs().max().clamp_min(1e-30)).detach()))
    return max(gaps)


def apart(case: Case, number: int, own: list[torch.Tensor], alone: list[torch.Tensor]) -> float:
    """How far ranks are from one process; in single precision, what they err more than one does."""
    assert all(a.dtype is b.dtype for a, b in zip(own, alone, strict=True))
    if case.dtype == "float64":
        return gap(own, alone)
    truth = computed(case, number, products.product, exact=True)
    return gap(own, truth) - 3 * gap(alone, truth)


def main() -> None:
    timeout, step = float(sys.argv[1]), int(sys.argv[2])
    here = ranks.join(timeout)
    matmul.LEAST, matmul._MOST = 1, 0.0
    found = []
    second = [Case(60, m, kernel=k, tile=16) for m in (None, 40) for k in ("scaled rbf", "matern 5/2")]
    sweep = [(case, False) for case in cases()] + [(case, True) for case in second]
    for number, (case, twice) in list(enumerate(sweep))[::step]:
        alone = computed(case, number, products.product, twice=twice)
        ranks.held = here
        own, again = (computed(case, number, matmul.product, twice=twice) for _ in range(2))
        ranks.held = None
        same = all(map(torch.equal, own, again))
        found.append((f"{number} {case}, {twice}", case.dtype, apart(case, number, own, alone), same, ranks._sum(own)))
    print(json.dumps({"cases": found, "collectives": here.calls}), flush=True)
    here.barrier()
    here.leave()


if __name__ == "__main__":
    main()
