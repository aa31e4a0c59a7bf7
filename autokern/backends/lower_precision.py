"""Candidates of class ``approximate``: float32, TF32 and half precision for products, mixed precision for densities.

They run only under ``accuracy="approximate"``, and where the error measured on this machine is at most `max_error`.

In mixed precision, a float64 matrix is factorised and inverted in float32, and solutions are refined to float64 by
conjugate gradients with the float32 factor as preconditioner. They take a few products, also at condition numbers far
above the 1e7 at which plain iterative refinement fails (Carson and Higham 2018, "Accelerating the solution of linear
systems by iterative refinement in three precisions", with CG in place of GMRES, as the matrix is positive definite).
Log determinant and inverse come from the float32 factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autokern.core.problem import Problem
from autokern.density.factors import factorised, inverted
from autokern.kernels import embedded as forms
from autokern.kernels import matmul as products
from autokern.kernels.partition import usual
from autokern.ops._shared.problems import needs_few, only, squares
from autokern.ops._shared.product_costs import in_tiles, of_outputs
from autokern.ops._shared.quadratic_forms import Method, closed_form, factorise
from autokern.ops.inv_quad_logdet import INV_QUAD_LOGDET, dense_and_diagonal
from autokern.ops.kernel_matmul import KERNEL_MATMUL


def in_lower_precision(
    kernel: Any, x1: torch.Tensor, x2: torch.Tensor, rhs: torch.Tensor, precision: str = ""
) -> torch.Tensor:
    """Return the product of a kernel matrix with `rhs`, computed tile by tile in float32, in the dtype of `rhs`.

    `precision` (float16, bfloat16, tf32) rounds the points of products further. Points are centred in their own dtype
    first: float32 has too few digits for points far from the origin.
    """
    tree, others = forms.both(kernel, x1, x2)
    centres = [z.detach().mean(-2, keepdim=True) for z in tree.points]

    def centred(points: list[torch.Tensor]) -> list[torch.Tensor]:
        return [_low(z - c) for z, c in zip(points, centres, strict=True)]

    low = tree._replace(points=centred(tree.points)).each(_low)
    columns, plan = None if others is None else centred(others), usual(x1.device)._replace(precision=precision)
    return products.matmul(low, columns, _low(rhs), plan).to(rhs.dtype)


def _low(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.float32)


_only_float64 = only("the data is float32 already", lambda p: p.dtype == "float64")


def _tensor_cores_unsupported(problem: Problem) -> str | None:
    if problem.device != "cuda":
        return "only a GPU has tensor cores of this precision"
    return needs_few(problem)


def _low_memory(problem: Problem) -> int:
    """Return the bytes of the embedded float64 points, and of a product in float32."""
    low = problem.replace(dtype="float32")
    doubled = of_outputs(problem) // 4 if problem.dtype == "float64" else 0
    return doubled + in_tiles(usual(torch.device(problem.device)).tile)(low)


def _add(name: str, precision: str, summary: str, unsupported: Callable[[Problem], str | None]) -> None:
    def run(kernel: Any, x1: torch.Tensor, x2: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
        return in_lower_precision(kernel, x1, x2, rhs, precision)

    run.__doc__ = summary
    KERNEL_MATMUL.candidate(name, accuracy="approximate", unsupported=unsupported, memory=_low_memory)(run)


_add(
    "float32", "", "Tile by tile in float32, for points and columns in float64.",
    lambda problem: _only_float64(problem) or needs_few(problem),
)  # fmt: skip
_add("tf32", "tf32", "Tile by tile, products in TF32 on tensor cores.", _tensor_cores_unsupported)
_add("float16", "float16", "Tile by tile, points in float16 on tensor cores.", _tensor_cores_unsupported)
_add("bfloat16", "bfloat16", "Tile by tile, points in bfloat16 on tensor cores.", _tensor_cores_unsupported)


_ROUNDS = 40
"""Most iterations of conjugate gradients."""
_RESIDUAL = 1e-10
"""Norm of the residual, relative to the right-hand side, at which a column has converged."""
_ALLOWED = 1e-8
"""Bound of the true residual, which is computed at the end."""


def _low_factor(matrix: torch.Tensor, diagonal: torch.Tensor | None) -> torch.Tensor | None:
    """Return the lower float32 factor in new memory, None if the factorisation fails."""
    low = matrix.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    if diagonal is not None:
        low.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    lower, info = factorised(low)
    return None if torch.any(info) else lower


def solved(
    matrix: torch.Tensor, diagonal: torch.Tensor | None, rhs: torch.Tensor, low: torch.Tensor
) -> torch.Tensor | None:
    """Solve ``(matrix + diag(diagonal)) x = rhs`` in float64 by the lower float32 factor; None if not converged."""

    def times(x: torch.Tensor) -> torch.Tensor:
        y = matrix @ x
        return y if diagonal is None else y.addcmul_(diagonal.unsqueeze(-1), x)

    def preconditioned(r: torch.Tensor) -> torch.Tensor:
        white = torch.linalg.solve_triangular(low, r.to(low.dtype), upper=False)  # cholesky_solve copies the factor
        return torch.linalg.solve_triangular(low.mT, white, upper=True).to(r.dtype)

    largest = rhs.abs().amax(-2, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)  # tiny or huge columns leave float32's range
    b = rhs / largest
    sizes = b.norm(dim=-2, keepdim=True)
    x, r, z = torch.zeros_like(b), b, preconditioned(b)
    p, rz = z, (r * z).sum(-2, keepdim=True)
    for _ in range(_ROUNDS):
        q = times(p)
        step = _quotient(rz, (p * q).sum(-2, keepdim=True))
        x, r = x + step * p, r - step * q
        if bool((r.norm(dim=-2, keepdim=True) <= _RESIDUAL * sizes).all()):
            break
        z = preconditioned(r)
        before, rz = rz, (r * z).sum(-2, keepdim=True)
        p = z + _quotient(rz, before) * p
    left = (b - times(x)).norm(dim=-2, keepdim=True)
    return x * largest if bool((left <= _ALLOWED * sizes).all()) else None


def _quotient(over: torch.Tensor, under: torch.Tensor) -> torch.Tensor:
    """Return a quotient, 0 where the divisor is not positive: such columns have converged."""
    return torch.where(under > 0, over / under, 0.0)


def _factorise(
    matrix: torch.Tensor, diagonal: torch.Tensor | None, rhs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a lower factor (float32, or float64 if refinement fails), float64 solutions and quadratic forms."""
    lower = _low_factor(matrix, diagonal)
    found = None if lower is None else solved(matrix, diagonal, rhs, lower)
    if lower is None or found is None:
        lower = None  # frees its memory
        lower = factorise(matrix, diagonal)
        found = torch.cholesky_solve(rhs, lower)
    return lower, found, (found * rhs).sum(-2)


MIXED = Method(_factorise, lambda lower, found: found, lambda lower: inverted(lower).to(torch.float64))


def _mixed_memory(problem: Problem) -> int:
    """Return the bytes of a call: half a matrix more on a GPU."""
    return squares(0.6, 1.6)(problem) if problem.device == "cpu" else squares(1.1, 2.1)(problem)


@INV_QUAD_LOGDET.candidate("mixed", accuracy="approximate", unsupported=_only_float64, memory=_mixed_memory)
def dense_mixed(operator: Any, rhs: torch.Tensor, reduce: bool, exact: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Factor and inverse in float32, solutions refined to float64 by conjugate gradients."""
    return closed_form(*dense_and_diagonal(operator), rhs, MIXED, reduce)
