"""The log density of a Gaussian with a large kernel matrix, by preconditioned conjugate gradients and probes.

``log |K| = log |P| + E w^T log(M) w`` with ``M = S^T K S``, ``P^-1 = S S^T`` and random signs w: the preconditioner
gives nearly all of the log determinant and of its gradient exactly, and probes estimate the rest. Systems are solved to
a stated relative residual. The probes depend only on the number of points, so the density is a smooth function.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from autokern.core.autograd import computed
from autokern.core.decision import Solved, note
from autokern.density import block_cg, gaussian
from autokern.density.block_cg import Preconditioner, Solution, UnfitError
from autokern.density.matrices import LOG_2_PI
from autokern.density.preconditioners import Kept
from autokern.kernels import matmul, products
from autokern.kernels.tiles import usual
from autokern.kernels.tree import Parts, Tree
from autokern.system import memory

_OF_PROBES = 1e-3  # largest relative residual of probes: such errors are far below the probes' own variance
_REFINED = 1e-4  # smallest residual of probes for which most products are in single precision
DENSE = 2**29  # most bytes of a matrix that is held, so that products do not evaluate the kernel again
_FEW = 8  # number of products up to which no other preconditioner is tried
_LONGEST = 100  # most products with a preconditioner before it counts as failed
_log = logging.getLogger("autokern")


def log_prob(
    tree: Tree, noise: torch.Tensor, residual: torch.Tensor, kept: Kept, probes: int, tolerance: float
) -> torch.Tensor | None:
    """Return the log density of a residual, and note how it was solved; None if the iteration does not converge."""
    parts, shape, tensors = gaussian.arranged(tree, noise, residual)
    if residual.numel() != residual.shape[-1] or shape.numel() != 1:
        return None
    read = [t.detach() for t in tensors]
    with torch.no_grad():
        own, *others = (t.reshape(t.shape[t.dim() - d :]) for t, d in zip(read, [1, 1, *parts.dims], strict=True))
        found = _found(parts.tree(others[1:]), own.expand_as(others[0]), others[0], kept, probes, tolerance)
    if found is None:
        return None
    value, by, solved = found
    plainly, gradients = gaussian.plainly(parts), functools.partial(_gradients, parts, by, solved, read)
    return computed(value, gradients, lambda *t: plainly(*t).view(()), saved=tensors).view(shape)


def _found(
    tree: Tree, noise: torch.Tensor, residual: torch.Tensor, kept: Kept, probes: int, tolerance: float
) -> tuple[float, Preconditioner, Solution] | None:
    n = len(residual)
    given = (noise, residual, *tree.points, *tree.shapes, *tree.weights)
    if not all(torch.isfinite(t).all() for t in given) or not (noise > 0).all() or probes < 1:
        return None
    signs = torch.randint(0, 2, (n, probes), generator=torch.Generator().manual_seed(n), dtype=torch.int8, device="cpu")
    signs = signs.to(residual.dtype).mul_(2).sub_(1)
    found = _solved(_Matrix(tree, noise, kept), residual, signs, tolerance)
    if found is None:
        return None
    name, by, solved = found
    left = block_cg.logdets(solved, n)
    quadratic = float(torch.dot(residual.double(), solved.solution.double()))
    value = -0.5 * (quadratic + by.logdet + float(left.mean()) + n * LOG_2_PI)
    error = 0.5 * float(left.std()) / math.sqrt(probes) if probes > 1 else math.inf
    report = Solved(solved.residual, solved.products, name, probes, error, tolerance)
    note(report)
    _log.debug("log density of %d points: %s", n, report)
    return (value, by, solved) if math.isfinite(value) else None


def _solved(
    matrix: _Matrix, residual: torch.Tensor, signs: torch.Tensor, tolerance: float
) -> tuple[str, Preconditioner, Solution] | None:
    """Return the preconditioner that needs the fewest products, with its solutions; None if none converges."""
    tree, noise, kept = matrix.tree, matrix.noise, matrix.kept
    if kept.rests():
        return None
    best: tuple[str, Preconditioner, Solution] | None = None
    patience, missed = float(_LONGEST), []
    tolerances, tried = (tolerance, min(_OF_PROBES, 100 * tolerance)), 0
    # the second is tried if the first fails, or needs many products and twice those of the last choice
    for name in kept.names(tree, noise):
        tried += 1
        try:
            by = kept.made(name, tree, noise)
        except UnfitError:
            continue
        solved = matrix.solved(by, residual, signs, tolerances, patience)
        if solved.left <= 1 and solved.products < patience:
            best, patience = (name, by, solved), solved.products
            if solved.products <= max(_FEW, 2 * kept.products) or (name == "vecchia" and kept.leaves_much(tree, noise)):
                break
        elif best is None and solved.left > 1:
            number = int(solved.residual <= tolerance)  # 0 if the targets missed their goal, 1 if only probes did
            goal, left = tolerances[number], (solved.residual, solved.left * tolerances[1])[number]
            missed.append(Solved(left, solved.products, name, signs.shape[1], goal=goal, missed=1))
    for report in missed if best is None else ():
        note(report)
    if kept.served is None or tried > 1:
        kept.choose(*((None, 0) if best is None else (best[0], best[2].products)))
    return best


class _Matrix:
    """A noisy kernel matrix for products with few columns, held if it is at most `DENSE` bytes."""

    def __init__(self, tree: Tree, noise: torch.Tensor, kept: Kept) -> None:
        self.tree, self.noise, self.kept, self._low, n = tree, noise, kept, None, len(noise)
        self._multiply = block_cg.product_with(tree, noise, noise.dtype)
        if n * n * noise.element_size() <= DENSE:
            held = memory.huge((n, n), noise)
            products.filled(tree, None, held, usual(noise.device)).diagonal().add_(noise)
            self._multiply = lambda v: held @ v
        elif noise.dtype is torch.float64:
            self._low = block_cg.product_with(tree, noise, torch.float32)

    def solved(
        self, by: Preconditioner, rhs: torch.Tensor, signs: torch.Tensor, tolerances: tuple[float, float],
        patience: float,
    ) -> Solution:  # fmt: skip
        """Solve for targets and probes; in double precision, most products use tiles in single precision."""
        low = self._low if tolerances[1] >= _REFINED and self.kept.single else None
        if low is not None:
            found = block_cg.refined(low, self._multiply, by, rhs, signs, tolerances, _LONGEST, patience)
            if found.left <= 1 or patience < found.expected < math.inf:
                return found
        found = block_cg.solve(self._multiply, by, rhs, signs, tolerances, _LONGEST, patience)
        if low is not None and found.left <= 1:
            self.kept.single = False
        return found


def _gradients(
    parts: Parts, made: Preconditioner, solved: Solution, tensors: list[torch.Tensor], wanted: Sequence[bool]
) -> list[torch.Tensor | None]:
    noise, residual, *own = tensors
    a, by = solved.solution, solved.probed
    found: list[Any] = [None] * len(tensors)
    if wanted[1]:
        found[1] = (-a).view(residual.shape)
    if not (wanted[0] or any(wanted[2:])):
        return found
    by_noise, *others = made.gradients(by)
    if wanted[0]:
        each = a.square().sub_((by.su * by.sw).mean(1)).sub_(by_noise.to(a.dtype))
        total = each.sum().view(1) if noise.shape[-1] == 1 < len(a) else each
        found[0] = (total * 0.5).view(noise.shape)
    if any(wanted[2:]):
        flat = [t.reshape(t.shape[t.dim() - d :]) for t, d in zip(own, parts.dims, strict=True)]
        left = torch.cat((a.unsqueeze(-1), by.su), 1)
        right = torch.cat((a.unsqueeze(-1) * 0.5, by.sw * (-0.5 / by.w.shape[1])), 1)
        exact, _ = matmul.gradients(parts.tree(flat), None, left, right, usual(a.device))
        for index, (one, two, like) in enumerate(zip(exact, others, own, strict=True)):
            found[2 + index] = (one - 0.5 * two.to(one.dtype)).view(like.shape)
    return found
