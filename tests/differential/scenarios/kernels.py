"""Kernel matrices: values, gradients of each order, products, diagonals, what a user does to kernels."""

from __future__ import annotations

import contextlib

import gpytorch
import torch
from builders import GRAPHLESS, KERNELS, NO_SECOND, PLAIN, STRUCTURED, points
from gpytorch.kernels import RBFKernel, ScaleKernel
from table import See, cases, scenarios
from user_code import Own, Tasked

NONE = torch.Size()


def made(see: See, kernel: str, batch: tuple[int, ...] = ()):
    return KERNELS[kernel](torch.Size(batch)).float().to(see.dtype)


@scenarios(
    cases(kernel=[k for k in KERNELS if k not in ("inducing", "features")]),
    cases(kernel=[*PLAIN, "rq", "mixture"], dtype="float32", kappa=0.1),
)
def matrix(see: See, kernel: str):
    """With gradients by hyperparameters and points, of equal points and of others; diagonals and parts too."""
    k, x = made(see, kernel), points(see, 21).requires_grad_()
    z, w = points(see, 13, seed=1), torch.linspace(-1, 1, 21 * 13).to(see.dtype).view(21, 13)
    square, across = k(x).to_dense(), k(x, z).to_dense()
    see("square", square)
    see("across", across)
    with see.attempt("diagonals"):
        see("diagonal", k(x, diag=True))
        see("diagonal of the lazy", k(x).diagonal())
    see("part", k(x)[3:9, 2:11].to_dense())
    see.grads("square", square * w.new_ones(21).cumsum(0), {**dict(k.named_parameters()), "x": x})
    see.grads("across", across * w, {**dict(k.named_parameters()), "x": x})


@scenarios(cases(kernel=[*PLAIN, "rbf + matern"], n=[1, 2, 70]), cases(kernel=["rbf", "own"], n=130))
def sized_matrix(see: See, kernel: str, n: int):
    k, x = made(see, kernel), points(see, n)
    square = k(x).to_dense()
    see("square", square)
    see("across", k(x, points(see, 66, seed=1)).to_dense())
    see("product", k(x) @ values_like(x))
    see.grads("square", square.sin(), k)


def values_like(x: torch.Tensor) -> torch.Tensor:
    return x.detach().sin()


@scenarios(
    cases(kernel=["scaled rbf", "scaled matern52", "rbf + matern"], batch=["2", "3x1", "2 of points", "broadcast"]),
    cases(kernel=["own"], batch=["2", "broadcast"]),
)
def batched_matrix(see: See, kernel: str, batch: str):
    b = {"2": (2,), "3x1": (3, 1), "2 of points": (), "broadcast": (2,)}[batch]
    k = made(see, kernel, b)
    lead = {"2": (2,), "3x1": (2,), "2 of points": (2,), "broadcast": ()}[batch]
    x = points(see, *lead, 9).requires_grad_()
    square = k(x).to_dense()
    see("square", square)
    see("across", k(x, points(see, 4, seed=1)).to_dense())
    with see.attempt("diagonals"):
        see("diagonal", k(x, diag=True))
    see.grads("square", square.sin(), {**dict(k.named_parameters()), "x": x})
    if b:
        see("one", k[0](x if not lead else x[0]).to_dense())


@scenarios(
    cases(kernel=["rbf", *PLAIN, "rq", "periodic"], order=[3], kappa=100.0),
    cases(kernel=["rbf", "scaled matern52"], order=[4], kappa=1e4),
    cases(kernel=["rbf"], order=[6], kappa=1e6),
    cases(kernel=["scaled matern32", "scaled matern52"], order=[2], n=5, formula=NO_SECOND),
)
def higher_derivatives(see: See, kernel: str, order: int, n: int = 28):
    """By points, of different points: the issue's gemm fails from the third on."""
    k, x, z = made(see, kernel), points(see, n).requires_grad_(), points(see, 4, seed=1)
    found = k(x, z).to_dense().sum()
    weights = torch.linspace(-1, 1, 2 * n, dtype=see.dtype).view(n, 2)
    for one in range(order):
        (gradient,) = torch.autograd.grad(found, x, create_graph=True)
        see(f"derivative {one + 1}", gradient)
        found = (gradient * weights).sum()
    see.grads("mixed", found, k)


@scenarios(
    cases(kernel=["rbf", *PLAIN, "own"], dtype=["float64", "float32"], formula=GRAPHLESS),
    cases(kernel=["rq", "periodic", "rbf + matern", "periodic * rbf"], formula=GRAPHLESS),
)
def second_derivatives_of_equal_points(see: See, kernel: str):
    if "matern12" in kernel or "matern32" in kernel:
        k, x = made(see, kernel), points(see, 6)
    else:
        k, x = made(see, kernel), points(see, 6).requires_grad_()
    square = k(x).to_dense()
    of = [p for p in k.parameters() if p.requires_grad]
    first = torch.autograd.grad(square.sin().sum(), of, create_graph=True)
    see("first", list(first))
    see.grads("second", sum(g.sin().sum() for g in first), k)


@scenarios(cases(kernel=["tasked", "scaled tasked", "rbf", "scaled rbf", "own"], how=["tensor", "number", "none"]))
def keyword_arguments(see: See, kernel: str, how: str):
    """A tensor as a keyword argument of a kernel; kernels that do not know it ignore it."""
    given = {"tensor": {"task": torch.tensor([1, 2])}, "number": {"task": torch.tensor(2)}, "none": {}}[how]
    kinds = {"tasked": Tasked, "rbf": RBFKernel, "own": Own}
    k = kinds[kernel]() if kernel in kinds else ScaleKernel(Tasked() if kernel == "scaled tasked" else RBFKernel())
    k, x = k.to(see.dtype), points(see, 12)
    see("square", k(x, **given).to_dense())
    see("across", k(x, points(see, 7, seed=1), **given).to_dense())
    see("product", k(x, **given) @ x)
    with see.attempt("diagonals"):
        see("diagonal", k(x, **given).diagonal())
    with gpytorch.settings.lazily_evaluate_kernels(False):
        see("eager", k(x, **given).to_dense())


@scenarios(cases(how=["transposed", "every second", "expanded", "column", "sliced", "empty rows", "empty both"]))
def strides(see: See, how: str):
    k, x = made(see, "scaled matern52"), points(see, 40)
    x = {
        "transposed": x.mT.contiguous().mT,
        "every second": x[::2],
        "expanded": x[:1].expand(11, 2),
        "column": torch.cat((x, x), -1)[:, 1:3],
        "sliced": x[5:17],
        "empty rows": x[:0],
        "empty both": x[:0],
    }[how].requires_grad_()
    z = x if how == "empty both" else points(see, 8, seed=1)
    see("square", k(x).to_dense())
    across = k(x, z).to_dense()
    see("across", across)
    see.grads("across", across, {**dict(k.named_parameters()), "x": x})


@scenarios(cases(which=["kernel", "points", "both halves", "scale only"], kappa=30.0))
def mixed_dtypes(see: See, which: str):
    """Parameters of one dtype and points of the other: a float64 result of what was rounded to float32."""
    k, x = made(see, "scaled rbf"), points(see, 15)
    if which == "kernel":
        x = x.float()
    if which == "points":
        k = k.float()
    if which == "both halves":
        k.base_kernel.float()
    if which == "scale only":
        k.base_kernel.float()
        x = x.float()
    with see.attempt("how it went"):
        square = k(x).to_dense()
        see("square", square)
        see("across", k(x, x[:4] + 1).to_dense())
        see.grads("square", square, k)


@scenarios(cases(kernel=["scaled rbf", "scaled matern32", "own"], m=[30, 600]))
def a_sum_of_parts(see: See, kernel: str, m: int):
    """Two lazy matrices on the same points of kernels with other diagonals: each reads its own."""
    one, other, x = made(see, kernel), made(see, "wrong diagonal"), points(see, m)
    both = one(x) + other(x)
    with see.attempt("diagonals"):
        see("diagonal", both.diagonal())
        see("swapped diagonal", (other(x) + one(x)).diagonal())
    see("product", both @ x)
    see("some", both[3, 4:9].sum())


@scenarios(
    cases(kernel=["scaled rbf", "scaled matern32", "rbf + matern", "periodic * rbf", *STRUCTURED], grad=[False, True])
)
def products(see: See, kernel: str, grad: bool):
    """A lazy matrix times a matrix, solves and traces, with and without graphs."""
    k, x, right = made(see, kernel), points(see, 24), points(see, 24, seed=2, d=3)
    with contextlib.nullcontext() if grad else torch.no_grad():
        lazy = k(x)
        product, noisy = lazy @ right, lazy.add_diagonal(torch.tensor(0.5, dtype=see.dtype))
        solved = noisy.solve(right)
        quad, logdet = noisy.inv_quad_logdet(right, logdet=True)
        found = {"product": product, "solved": solved, "quad": quad, "logdet": logdet, "times": lazy * 2.0 @ right}
        for name, value in found.items():
            see(name, value)
            if grad:
                see.grads(name, value.sin(), k)


@scenarios(
    cases(kernel=["scaled rbf", "own", "doubled"], n=[50]), cases(kernel=["scaled rbf", "own"], n=[600], rare=True)
)
def eager_kernels(see: See, kernel: str, n: int):
    """With lazy evaluation off, kernels are called at once."""
    k, x = made(see, kernel), points(see, n)
    with gpytorch.settings.lazily_evaluate_kernels(False):
        square = k(x)
        see("type", type(square).__name__)
        see("square", square.to_dense())
        see("last", k(x[:7], x).to_dense())
        see("of a dimension", k(x[:9], last_dim_is_batch=True).to_dense())
