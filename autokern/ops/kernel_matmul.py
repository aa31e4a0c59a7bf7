"""The Op `kernel_matmul`: the covariance matrix of two sets of points times few columns, for any number of points.

Arguments: ``kernel, x1, x2, rhs``. The kernel is a gpytorch kernel or an `Embedded` one; the points have its active
dimensions only. Both sets are the same if they are the same tensor. The op supports every kernel tree.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from linear_operator import to_linear_operator

from autokern.core.op import Op
from autokern.core.problem import Features, Problem
from autokern.core.state import inside
from autokern.kernels import embedded as forms
from autokern.kernels import matmul as products
from autokern.kernels import tree as trees
from autokern.kernels.embedded import Embedded
from autokern.kernels.family import known_family
from autokern.kernels.tiles import Plan, usual
from autokern.ops._candidates import every, needs_few, on_other_devices, only
from autokern.ops._problems import families, is_ours, kernel_of, kernel_problem, random_matrix
from autokern.system import ranks, threads

_MANY, _MANY_ELSEWHERE = 2**18, 2**24
"""Elements of the matrix above which tiles are the default, on the CPU and on an accelerator.

Stock makes several passes over the matrix. On an H100, tiles of smaller matrices took up to 2.9 times as long as stock.
"""


def of_outputs(problem: Problem) -> int:
    """Return the bytes of results and of copies of the points, embedded and centred with norms, also for gradients."""
    sets = (3 if problem.grad else 2) if "same" in problem.words else (5 if problem.grad else 3)
    sides = sets * (problem.m + problem.n) * (problem.d + 2) * len(families(problem))
    return problem.itemsize * (sides + problem.batch * 3 * problem.rhs * (problem.m + problem.n))


def in_tiles(problem: Problem, tile: int) -> int:
    """Return the bytes of a product tile by tile."""
    held = len(families(problem)) * (1 + 3 * bool(problem.grad)) + bool(problem.grad)
    workers = threads.members(torch.device(problem.device))
    return of_outputs(problem) + workers * held * min(tile, problem.m) * min(tile, problem.n) * problem.itemsize


def in_matrices(problem: Problem, matrices: int) -> int:
    """Return the bytes of a product that holds the matrix once, or with gradients `matrices` times."""
    return (matrices if problem.grad else 1) * problem.elements * problem.itemsize + of_outputs(problem)


class _KernelMatmul(Op):
    name = "kernel_matmul"
    summary = "covariance matrix of two sets of points times few columns, of any size"
    nesting = 1

    def key(self, kernel: Any, x1: torch.Tensor, x2: torch.Tensor, rhs: torch.Tensor) -> Any:
        tensors = [(t.__class__, t.shape, t.dtype, t.device, t.layout, t.requires_grad) for t in (x1, x2, rhs)]
        return forms.key(kernel), *tensors, x1 is x2, torch.is_grad_enabled()

    def problem_of(self, kernel: Any, x1: torch.Tensor, x2: torch.Tensor, rhs: torch.Tensor) -> Problem | None:
        node = kernel.node if isinstance(kernel, Embedded) else trees.form(kernel, keops=True)
        if node is None or not is_ours(x1, x2, rhs) or rhs.shape[-2] != x2.shape[-2]:
            return None
        return kernel_problem(self.name, node, kernel, x1, x2, rhs)

    def reference(self, kernel: Any, x1: torch.Tensor, x2: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
        return trees.dense(*forms.both(kernel, x1, x2)) @ rhs

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        wanted = problem.grad.split("/")
        kernel = kernel_of(problem, generator).requires_grad_("theta" in wanted)
        x1 = random_matrix(problem, generator, problem.m, problem.d).requires_grad_("x" in wanted)
        x2 = x1 if "same" in problem.words else random_matrix(problem, generator, problem.n, problem.d)
        return kernel, x1, x2, random_matrix(problem, generator, problem.n, problem.rhs).requires_grad_("rhs" in wanted)

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        size = 3000 if device == "cpu" else 12000
        little = size // 3  # for quick calibrations
        base = Problem(op="kernel_matmul", m=little, n=little, d=10, rhs=11, dtype=dtype, device=device)
        same, cross = base.replace(variant="rbf/same"), base.replace(variant="rbf/cross")
        problems = [same, cross, same.replace(grad="theta"), same.replace(variant="matern52/same")]
        problems += [p.replace(m=size, n=size) for p in (same, cross)]
        if level == "full":
            both = (same, cross)
            shapes = [(1, 11), (3, 1), (3, 64), (50, 11), (200, 1), (200, 64)]
            problems += [p.replace(d=d, rhs=t) for d, t in shapes for p in both]
            problems += [p.replace(m=n, n=n, d=3) for n in (size // 4, 4 * size) for p in both]
            problems += [cross.replace(m=size // 10), cross.replace(m=size), cross.replace(m=size // 10, n=size)]
            names = ("matern12", "matern32", "matern52", "rq", "periodic", "matern52+rbf")
            wide = [p.replace(m=n, n=n) for p in both for n in (little, size)]
            problems += [p.replace(variant=p.variant.replace("rbf", name)) for name in names for p in wide]
            problems += [p.replace(grad=g) for p in wide for g in ("theta", "rhs", "theta/x/rhs")]
            problems += [p.replace(m=size // 10, n=size // 10, batch=8) for p in both]
        return list(dict.fromkeys(problems))

    def features(self, problem: Problem) -> Features:
        passes = sum(
            of.stock_passes(problem.d) if (of := known_family(name)) else 60.0 * problem.d for name in families(problem)
        )
        backward, parts = 1 + 2 * bool(problem.grad), len(families(problem))
        count = problem.elements * backward
        flops = 2.0 * count * (parts * (problem.d + 2) + problem.rhs)
        return Features(10.0 * parts * backward * problem.batch, flops, count * problem.itemsize * passes)

    def memory(self, problem: Problem) -> int:
        return in_matrices(problem, 2)

    def default_candidate(self, problem: Problem) -> str:
        most = _MANY if problem.device == "cpu" else _MANY_ELSEWHERE
        if problem.m * problem.n < most or needs_few(problem) is not None:
            return "stock"
        here = None if _distributed_unsupported(problem) or inside.measuring else ranks.active()
        if here and products.pays(here, problem.m * problem.n, problem.m * problem.rhs * problem.itemsize):
            return "distributed"
        name = "tiled-symmetric" if "same" in problem.words else "tiled"
        return name if problem.device == "cpu" else f"{name}@4096"


KERNEL_MATMUL = _KernelMatmul()


@KERNEL_MATMUL.candidate("stock", memory=lambda p: in_matrices(p, 4))
def stock(kernel: Any, x1: torch.Tensor, x2: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """The covariance matrix by gpytorch, then torch.matmul."""
    if isinstance(kernel, Embedded):
        return KERNEL_MATMUL.reference(kernel, x1, x2, rhs)
    return to_linear_operator(kernel.forward(x1, x2)).to_dense() @ rhs


def _unsupported(plan: Plan, problem: Problem) -> str | None:
    if plan.symmetric and "same" not in problem.words:
        return "x1 and x2 are different points"
    if (problem.device == "cpu") != (plan.tile <= 2048):
        return f"tiles of {plan.tile} are for {'an accelerator' if plan.tile > 2048 else 'a CPU'}"
    return needs_few(problem)


def _add(name: str, plan: Plan, summary: str) -> None:
    unsupported, memory = functools.partial(_unsupported, plan), functools.partial(in_tiles, tile=plan.tile)
    register = KERNEL_MATMUL.candidate(name, unsupported=unsupported, memory=memory, summary=summary)
    register(lambda kernel, x1, x2, rhs: products.matmul(*forms.both(kernel, x1, x2), rhs, plan))


_add("tiled", Plan(1024, symmetric=False), "Tile by tile: evaluate, multiply, drop.")
_add("tiled-symmetric", Plan(768), "Tile by tile; each tile serves both halves of the matrix.")
_add("tiled-symmetric@512", Plan(512), "The same with smaller tiles.")
_add("tiled@4096", Plan(4096, symmetric=False), "Tile by tile, with tiles for an accelerator.")
_add("tiled@8192", Plan(8192, symmetric=False), "The same with larger tiles.")
_add("tiled-symmetric@4096", Plan(4096), "Tiles for an accelerator; each serves both halves of the matrix.")


on_other_devices(
    KERNEL_MATMUL,
    lambda tree, others, rhs: products.matmul(tree, others, rhs, usual(rhs.device)),
    "Tile by tile on the {}; points and columns are copied, the matrix is not.",
    read=lambda kernel, x1, x2, rhs: (*forms.both(kernel, x1, x2), rhs),
    on_cpu=None,
    memory=of_outputs,
)


_distributed_unsupported = every(
    only("only for the CPU", lambda p: p.device == "cpu"),
    only(f"only for matrices of {products.LEAST} elements or more", lambda p: p.m * p.n >= products.LEAST),
    needs_few,
)


def _distributed_unavailable(device: str) -> str | None:
    if inside.measuring:
        return "it is not measured by itself: ranks measure their links and products when they join"
    return None if ranks.active() else "this process shares its work with no other rank (AUTOKERN_RANKS)"


@KERNEL_MATMUL.candidate(
    "distributed",
    unsupported=_distributed_unsupported,
    unavailable=_distributed_unavailable,
    memory=lambda p: in_tiles(p, usual(torch.device("cpu")).tile) + of_outputs(p),
)
def distributed(kernel: Any, x1: torch.Tensor, x2: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """Tile by tile: each rank of a job computes its share of the tiles, then one all-reduce."""
    return products.matmul(*forms.both(kernel, x1, x2), rhs, usual(x1.device), products.product)


def _low_memory(problem: Problem) -> int:
    """Return the bytes of the embedded float64 points, and of a product in float32."""
    doubled = of_outputs(problem) // 4 if problem.dtype == "float64" else 0
    return doubled + in_tiles(problem.replace(dtype="float32"), usual(torch.device(problem.device)).tile)


def in_lower_precision(
    kernel: Any, x1: torch.Tensor, x2: torch.Tensor, rhs: torch.Tensor, precision: str = ""
) -> torch.Tensor:
    """Return the product of a kernel matrix with `rhs`, computed tile by tile in float32, in the dtype of `rhs`.

    `precision` (float16, bfloat16) rounds the points of products further. Points are centred in their own dtype
    first: float32 has too few digits for points far from the origin.
    """
    tree, others = forms.both(kernel, x1, x2)
    centres = [z.detach().mean(-2, keepdim=True) for z in tree.points]

    def centred(points: list[torch.Tensor]) -> list[torch.Tensor]:
        return [(z - c).float() for z, c in zip(points, centres, strict=True)]

    low = tree._replace(points=centred(tree.points)).each(torch.Tensor.float)
    columns, plan = None if others is None else centred(others), usual(x1.device)._replace(precision=precision)
    return products.matmul(low, columns, rhs.float(), plan).to(rhs.dtype)


_doubled = only("the data is float32 already", lambda p: p.dtype == "float64")
_on_cores = only("only a GPU has tensor cores of this precision", lambda p: p.device == "cuda")
for _name, _precision, _of, _summary in (
    ("float32", "", _doubled, "Tile by tile in float32, for points and columns in float64."),
    ("float16", "float16", _on_cores, "Tile by tile, points in float16 on tensor cores."),
    ("bfloat16", "bfloat16", _on_cores, "Tile by tile, points in bfloat16 on tensor cores."),
):
    KERNEL_MATMUL.candidate(
        _name, accuracy="approximate", unsupported=every(_of, needs_few), memory=_low_memory, summary=_summary
    )(functools.partial(in_lower_precision, precision=_precision))
