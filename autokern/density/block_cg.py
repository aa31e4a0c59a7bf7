"""Preconditioned conjugate gradients for several columns at once, and the log determinant from their coefficients.

The coefficients are those of a Lanczos process and give ``w^T log(M) w`` of each probe w (Golub and Meurant 2010).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from autokern.kernels import matmul
from autokern.kernels.tiles import usual
from autokern.kernels.tree import Tree, apart

Product = Callable[[torch.Tensor], torch.Tensor]
_SEEN = 8  # iterations before the rate of convergence is extrapolated
_NEARLY = 1e-3  # smallest relative residual that one run of conjugate gradients in a lower precision solves to


class UnfitError(Exception):
    """A preconditioner cannot be computed for a matrix."""


class Probed(NamedTuple):
    """Probes ``w`` and their products and solutions, each of shape ``(n, t)``."""

    w: torch.Tensor  # independent random signs
    u: torch.Tensor  # the solutions of ``S^T K S u = w``
    sw: torch.Tensor  # ``S w``
    su: torch.Tensor  # ``S u``
    kw: torch.Tensor  # ``K S w``
    ku: torch.Tensor  # ``K S u``


class Preconditioner:
    """A square matrix ``S`` for which ``M = S^T K S`` is near the identity.

    `gradients` estimates those of ``log |K|`` less the mean of ``(S u)^T dK (S w)`` over the probes. With this mean
    added, the estimate is unbiased, and its variance vanishes as M approaches the identity.
    """

    logdet: float  # ``-2 log |det S|``, near ``log |K|``
    apply: Product  # ``S v``
    turned: Product  # ``S^T v``
    gradients: Callable[[Probed], list[torch.Tensor]]  # by the noise of each point, ``(n,)``, and a tree's tensors
    _tree: Tree
    _noise: torch.Tensor

    def _summed(
        self, elements: float, write: Callable[[list[torch.Tensor], int, int], None], *data: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the gradients that `write` adds for each range of points; ranks with equal `data` share the ranges."""
        shapes = [t.shape for t in (self._noise, *apart(self._tree)[1])]
        sizes = [shape.numel() for shape in shapes]

        def views(flat: torch.Tensor) -> list[torch.Tensor]:
            return [t.view(shape) for t, shape in zip(flat.split(sizes), shapes, strict=True)]

        given = matmul.agreed(self._tree, None, None, self._noise, *data)
        n, work = len(self._noise), lambda out, first, end: write(views(out), first, end)
        return views(matmul.by_points(n, elements, sum(sizes), self._noise, given, work))


def product_with(tree: Tree, noise: torch.Tensor, dtype: torch.dtype) -> Product:
    """Return the product with a noisy covariance, of the noise's dtype, whose kernel is evaluated in `dtype`."""
    own, added = tree.each(lambda t: t.to(dtype)), noise.unsqueeze(-1)

    def multiply(v: torch.Tensor) -> torch.Tensor:
        found = matmul.product(own, None, v.to(dtype), usual(v.device)).to(noise.dtype)
        return found.addcmul_(added, v.to(noise.dtype))

    return multiply


def in_double(tree: Tree) -> Tree:
    """Return a tree with its tensors detached and in double precision."""
    return tree.each(lambda t: t.detach().double())


def cholesky(matrix: torch.Tensor) -> torch.Tensor:
    """Return the lower factor of a matrix or batch; raises UnfitError if one is not positive definite."""
    lower, info = torch.linalg.cholesky_ex(matrix)
    if info.any():
        raise UnfitError
    return lower


class Solution(NamedTuple):
    """The result of conjugate gradients on ``M = S^T K S``."""

    solution: torch.Tensor  # ``K^-1 r``, ``(n,)``
    probed: Probed
    residual: float  # relative, of ``K a = r``
    left: float  # the largest relative residual of a column, ``K a = r`` or ``M u = w``, in units of its tolerance
    products: int  # products with the matrix that were computed
    expected: float  # products to reach the tolerance, infinite if the residual does not fall
    steps: torch.Tensor  # alpha by iteration and probe, NaN after a column has converged
    ratios: torch.Tensor  # beta, likewise
    shift: torch.Tensor | float = 0.0  # correction to each ``w^T log(M) w`` where alpha and beta are of a K' near K


def solve(
    multiply: Product, by: Preconditioner, rhs: torch.Tensor, probes: torch.Tensor,
    tolerances: tuple[float, float], most: int, patience: float,
) -> Solution:  # fmt: skip
    """Solve ``K a = r`` and ``S^T K S u = w`` for all probes w; `tolerances` are relative residuals of both.

    The iteration stops after `most` products, or when it expects to need more than `patience`.
    """
    count = probes.shape[1] + 1
    r = torch.cat((by.turned(rhs.unsqueeze(-1)), probes), 1)
    b = rhs.clone()
    norms = torch.linalg.vector_norm(r, dim=0)
    norms[0] = size = torch.linalg.vector_norm(b)
    goals = norms * tolerances[1]
    goals[0] = size * tolerances[0]
    x, kx, y = torch.zeros_like(r), torch.zeros_like(r), torch.zeros_like(r)
    p, rho = r.clone(), r.square().sum(0)
    first = torch.zeros_like(r)
    sp = by.apply(p)
    sw = sp[:, 1:].clone()
    active = torch.nonzero(rho > 0).squeeze(-1)
    if len(active) < count:  # columns of zeros are solved by zero
        r, p, rho, sp = r[:, active], p[:, active], rho[active], sp[:, active]
    steps, ratios, worst, made, expected = [], [], [], 0, 0.0
    while len(active) and made < most:
        kp = multiply(sp)
        made += 1
        if made == 1:
            _add(first, kp, active)
        q = by.turned(kp)
        curvature = (p * q).sum(0)
        alpha = rho / curvature
        if not torch.isfinite(alpha).all() or bool((alpha <= 0).any()):
            expected = math.inf
            break
        for total, part in ((y, p), (x, sp), (kx, kp)):
            _add(total, part * alpha, active)
        r = r.addcmul_(q, alpha, value=-1)
        fresh = r.square().sum(0)
        beta = fresh / rho
        left = fresh.sqrt() / goals[active]
        if active[0] == 0:
            left[0] = torch.linalg.vector_norm(b - kx[:, 0]) / goals[0]
        steps.append(_spread(alpha, active, count))
        ratios.append(_spread(beta, active, count))
        worst.append(float(left.max()))
        expected = float(made) if worst[-1] <= 1 else made + still_needed(worst[0], worst[-1], made - 1)
        if expected > patience:
            break
        going = left > 1
        if not going.all():
            active, r, p, fresh, beta = active[going], r[:, going], p[:, going], fresh[going], beta[going]
        p, rho = torch.addcmul(r, p, beta), fresh
        sp = by.apply(p)
    most_left = worst[-1] if worst else math.inf if len(active) else 0.0
    residual = _relative(b - kx[:, 0], size)
    probed = Probed(probes, y[:, 1:], sw, x[:, 1:], first[:, 1:], kx[:, 1:])
    kept = [torch.stack(each)[:, 1:] if each else r.new_empty(0, count - 1) for each in (steps, ratios)]
    return Solution(
        x[:, 0], probed, residual, max(most_left, residual / tolerances[0]), made, expected, kept[0], kept[1]
    )


def refined(
    nearly: Product, multiply: Product, by: Preconditioner, rhs: torch.Tensor, probes: torch.Tensor,
    tolerances: tuple[float, float], most: int, patience: float,
) -> Solution:  # fmt: skip
    """Solve as `solve` does, mostly by products `nearly` ``K' v`` in a lower precision, with residuals of K itself.

    The log determinant is corrected for ``K - K'`` to first order: ``u^T S^T (K - K') S w``.
    """
    found = solve(nearly, by, rhs, probes, (max(tolerances[0], _NEARLY), tolerances[1]), most, patience)
    if found.left > 1:
        return found
    x, done, count = found.solution, found.probed, probes.shape[1]
    kx, kw, ku = multiply(torch.cat((x.unsqueeze(-1), done.sw, done.su), 1)).split((1, count, count), 1)
    made, size, kx = found.products + 1, torch.linalg.vector_norm(rhs), kx[:, 0]
    shift = torch.linalg.vecdot(done.su, kw - done.kw, dim=0)
    off = torch.linalg.vector_norm(probes - by.turned(ku), dim=0) / torch.linalg.vector_norm(probes, dim=0)
    residual, before = _relative(rhs - kx, size), math.inf
    while residual > tolerances[0] and residual < 0.5 * before and made < most:
        goal = max(0.5 * tolerances[0] / residual, _NEARLY)
        more = solve(nearly, by, rhs - kx, probes[:, :0], (goal, 1.0), most - made, math.inf)
        x, kx, made = x + more.solution, kx + multiply(more.solution.unsqueeze(-1))[:, 0], made + more.products + 1
        residual, before = _relative(rhs - kx, size), residual
    left = max(residual / tolerances[0], float(off.max()) / (2 * tolerances[1]))
    return found._replace(
        solution=x, probed=done._replace(kw=kw, ku=ku), residual=residual, left=left, products=made,
        expected=float(made), shift=shift,
    )  # fmt: skip


def _relative(vector: torch.Tensor, size: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(vector) / size) if size > 0 else 0.0


def _add(total: torch.Tensor, part: torch.Tensor, active: torch.Tensor) -> None:
    if len(active) == total.shape[1]:
        total += part
    else:
        total[:, active] += part


def _spread(values: torch.Tensor, active: torch.Tensor, count: int) -> torch.Tensor:
    out = torch.full((count,), math.nan, dtype=torch.float64, device="cpu")
    out[active] = values.double()
    return out


def still_needed(first: float, left: float, steps: int) -> float:
    """Return how many more products reduce a residual to 1 at the mean rate so far; 0 until the rate is known."""
    if steps < _SEEN:
        return 0.0
    rate = (math.log(first) - math.log(left)) / steps
    return math.log(left) / rate if rate > 0 else math.inf


def logdets(solved: Solution, n: int) -> torch.Tensor:
    """Return ``w^T log(M) w`` of each probe, by Gauss quadrature."""
    found = []
    for alpha, beta in zip(solved.steps.unbind(1), solved.ratios.unbind(1), strict=True):
        size = int(torch.isfinite(alpha).sum())
        inverse = 1 / alpha[:size]
        diagonal = inverse.clone()
        diagonal[1:] += beta[: size - 1] * inverse[:-1]
        beside = beta[: size - 1].sqrt() * inverse[:-1]
        values, vectors = torch.linalg.eigh(torch.diag(diagonal) + torch.diag(beside, 1) + torch.diag(beside, -1))
        found.append(n * (vectors[0].square() * values.clamp_min(1e-300).log()).sum())
    return torch.stack(found) + solved.shift
