"""Kernel matrices: values, gradients of each order, products, diagonals, what a user does to kernels."""

import contextlib

import gpytorch
import torch
from builders import GRAPHLESS, KERNELS, NO_SECOND, PLAIN, STRUCTURED, points
from gpytorch.kernels import RBFKernel, ScaleKernel
from table import See, cases, scenarios
from user_code import Own, Tasked


def made(see: See, kernel: str, batch: tuple[int, ...] = ()):
    return KERNELS[kernel](torch.Size(batch)).float().to(see.dtype)


BATCHES = {"": ((), ()), "2": ((2,), (2,)), "3x1": ((3, 1), (2,)), "2 of points": ((), (2,)), "broadcast": ((2,), ()),
           "apart": ((3,), (2,))}  # fmt: skip
"""Batch shapes of kernels and points."""
LAID = {
    "": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: x[::2],
    "expanded": lambda x: x[:1].expand(11, 2),
    "column": lambda x: torch.cat((x, x), -1)[:, 1:3],
    "sliced": lambda x: x[5:17],
    "empty rows": lambda x: x[:0],
    "empty both": lambda x: x[:0],
}


@scenarios(
    cases(kernel=[k for k in KERNELS if k != "inducing"]),
    cases(kernel=[*PLAIN, "rq", "mixture"], dtype="float32", kappa=0.1),
    cases(kernel=[*PLAIN, "rbf + matern"], n=[1, 2, 70]),
    cases(kernel=["rbf", "own"], n=130),
    cases(kernel=["scaled rbf", "scaled matern52", "rbf + matern"], batch=list(BATCHES)[1:], n=9),
    cases(kernel="own", batch=["2", "broadcast"], n=9),
    cases(kernel="scaled matern52", laid=list(LAID)[1:]),
    cases(kernel="scaled rbf", single=["kernel", "points", "base", "base and points"], kappa=30.0),
)
def matrix(see: See, kernel: str, n: int = 21, batch: str = "", laid: str = "", single: str = ""):
    """Of equal points and of others, with gradients; diagonals, parts, a product; some in single precision."""
    b, lead = BATCHES[batch]
    k, x = made(see, kernel, b), LAID[laid](points(see, *lead, n))
    if "base" in single:
        k.base_kernel.float()
    k, x = k.float() if single == "kernel" else k, x.float() if "points" in single else x
    x = x.requires_grad_(n in (9, 21) and not single)
    z = (
        x
        if laid == "empty both"
        else x[..., :4, :].detach() + 1
        if single
        else points(see, 66 if n > 21 else 13, seed=1)
    )
    with see.attempt("went"):
        square, across = k(x).to_dense(), k(x, z).to_dense()
        for name, found in (("square", square), ("across", across)):
            see(name, found)
            weights = torch.linspace(0.5, 1.5, found.shape[-1]).to(found.dtype)
            see.grads(name, (found * weights).sin(), {**dict(k.named_parameters()), "x": x})
        with see.attempt("diagonals"):
            see("diagonal", k(x, diag=True))
            see("diagonal of the lazy", k(x).diagonal())
        with see.attempt("parts"):
            see("part", k(x)[..., 3:9, 2:11].to_dense())
            see("product", k(x) @ x.detach().sin())
            if b:
                see("one", k[0](x[0] if lead else x).to_dense())


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
    k, x = made(see, kernel), points(see, 6).requires_grad_("matern12" not in kernel and "matern32" not in kernel)
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
    k, x = k.to(see.dtype), points(see, 50)
    see("square", k(x, **given).to_dense())
    see("across", k(x, points(see, 7, seed=1), **given).to_dense())
    see("product", k(x, **given) @ x)
    with see.attempt("diagonals"):
        see("diagonal", k(x, **given).diagonal())
    with gpytorch.settings.lazily_evaluate_kernels(False):
        eager = k(x, **given)
        see("type", type(eager).__name__)
        see("eager", eager.to_dense())
        see("last", k(x[:7], x, **given).to_dense())
        with see.attempt("by dimension"):
            see("of a dimension", k(x[:9], last_dim_is_batch=True, **given).to_dense())


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
