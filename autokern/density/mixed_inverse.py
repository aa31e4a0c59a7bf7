"""Gradients of a log density by a float32 inverse W of a float64 factor, with checks of the errors.

Value, solution and log determinant come from the float64 factor. The inverse enters only the gradients, as
``tr(K^-1 dK)``. Rounding the factor to float32 hardly changes them; summing products in float32 does, most of all on
the diagonal, which is therefore summed in float64. Two identities check the rest: ``tr(K^-1 K) = n``, and the solution
by the inverse equals that by the factor. If either error is too large, a float64 inverse is used.
The trace's error is relative to the effective degrees of freedom ``tr(K^-1 (K - noise))``. Other terms of a sum can
hide the error of a term with few of them, so random vectors estimate the error ``tr((W - K^-1) dK)`` of each
hyperparameter (Hutchinson 1990) whenever one has changed by much.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from autokern.core.state import Weak
from autokern.density import gaussian
from autokern.kernels import products
from autokern.kernels.tiles import Place, usual
from autokern.kernels.tree import Node, Tree
from autokern.system import memory

OF_TRACE = 1e-4
"""Largest error of ``tr(K^-1 K)``, per effective degree of freedom."""
OF_SOLUTION = 1e-3
"""Largest relative error of a solution by the inverse, a check that the trace may pass by chance."""
OF_EACH = 1e-3
"""Largest error of the gradient by the log of any hyperparameter, relative to the larger of its two terms."""
_NOTHING = 1e-8
"""Absolute error of the gradient by the log of a hyperparameter, per effective degree of freedom, always accepted."""
_PROBES = 8
"""Random vectors that estimate errors."""
_CHANGE = 0.2
"""Relative change of a hyperparameter after which errors are estimated again."""
_RESTS = 50
"""Steps without another attempt after a failed one."""
_PANEL = 256
"""Rows and columns of the blocks of an inverse, whose products are nearly as fast as those of large matrices."""
_WIDENED = 1024
"""Columns of an inverse that are converted to float64 at a time, if its entries are summed in float64."""
_SUMS = (torch.float32, torch.float64)
"""Precisions of the sums in an inverse, in the order of trial; float32 fails on smooth kernels with little noise."""
_log = logging.getLogger("autokern")


class Mixed:
    """Gradients of one kernel's densities; remembers failures, and where the errors were last estimated."""

    def __init__(self) -> None:
        self._rests = dict.fromkeys(_SUMS, 0)
        self._sound: dict[torch.dtype, torch.Tensor] = {}

    def __call__(
        self, tree: Tree, state: gaussian.State, noise: torch.Tensor, wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Return the wanted gradients by noise, residual and the tree's tensors."""
        able = state.factor.dim() == 2 and (wanted[0] or any(wanted[2:]))
        for sums in _SUMS if able else ():
            self._rests[sums] -= 1
            if self._rests[sums] >= 0:
                continue
            at, sound = _place(tree, noise), self._sound.get(sums)
            near = sound is not None and sound.shape == at.shape and torch.allclose(at, sound, rtol=_CHANGE, atol=0)
            found = _by_single(tree, state, noise, sums, each=not near)
            if found is not None:
                if not near:
                    self._sound[sums] = at
                return [one * 0.5 if want else None for one, want in zip(found, wanted, strict=True)]
            self._rests[sums] = _RESTS
        return gaussian.gradients_by(tree, state, noise, wanted)


_kept: Weak[Mixed] = Weak()


def mixed_for(owner: Any) -> Mixed:
    """Return the cached `Mixed` of a kernel."""
    return _kept.get(owner) or _kept.put(owner, Mixed())


def _by_single(
    tree: Tree, state: gaussian.State, noise: torch.Tensor, sums: torch.dtype, each: bool
) -> list[torch.Tensor] | None:
    """Return twice the gradients, or None if they are inaccurate; `each` estimates every hyperparameter's error too."""
    n, white = len(state.factor), state.white.squeeze(-1)
    outer = _outer(tree.node)
    if outer is None:  # a scale around the tree yields the sum over the whole covariance, as its gradient
        weights = [state.factor.new_ones(()), *tree.weights]
        tree = Tree(Node("scale", "", (tree.node,)), tree.points, tree.shapes, weights)
    first = len(tree.points) + len(tree.shapes)
    scales = [(first + index, tree.weights[index]) for index in outer or (0,)]
    a = torch.linalg.solve_triangular(state.factor.mT, state.white, upper=True).squeeze(-1)
    inverse = memory.huge((n, n), state.factor.new_empty(0, dtype=torch.float32))
    _invert(state.factor, inverse)
    diagonal, solved = _square(inverse, white, sums)
    missed = (torch.linalg.vector_norm(solved - a) / torch.linalg.vector_norm(a)).item() if white.any() else 0.0
    if not missed <= OF_SOLUTION:
        _log.debug("gradients of %d points, sums in %s: solution %.1e off", n, sums, missed)
        return None
    found = _contracted(tree, a, inverse, diagonal)
    freedom = n - torch.dot(diagonal, noise.expand(n)).item()
    by_noise = a.square().sub_(diagonal)
    along = torch.dot(white, white) - n - torch.dot(by_noise, noise.expand(n))
    error = along - sum(found[index] * scale for index, scale in scales)
    if not abs(error.item()) <= OF_TRACE * freedom:
        _log.debug("gradients of %d points, sums in %s: trace %.1e off", n, sums, error)
        return None
    if each:
        known = scales[0][0] if len(scales) == 1 else None  # the trace's error is that of this gradient
        off = _worst(tree, a, state.factor, inverse, diagonal, found, freedom, known)
        if not off <= 1:
            _log.debug("gradients of %d points, sums in %s: one is %.1e times the bound off", n, sums, off)
            return None
    if outer is None:
        del found[first]
    total = sum(scale for _, scale in scales)
    for index, _ in scales if outer else ():  # corrects each by its share of the trace's error
        found[index] = found[index] + error / total
    by_noise = by_noise.sum(-1, keepdim=True) if noise.shape[-1] == 1 else by_noise
    return [by_noise, a * -2, *found]


def _outer(node: Node, at: int = 0) -> list[int] | None:
    """Return the index of the weight of each term of a sum, None if a term has no weight of its own."""
    if node.kind in ("scale", "constant"):
        return [at]
    found: list[int] = []
    for child in node.children if node.kind == "sum" else ():
        own = _outer(child, at)
        if own is None:
            return None
        found += own
        at += _weights(child)
    return found or None


def _weights(node: Node) -> int:
    return (node.kind in ("scale", "constant")) + sum(_weights(child) for child in node.children)


def _invert(factor: torch.Tensor, out: torch.Tensor) -> None:
    """Write the inverse of a lower factor into `out`; only its diagonal blocks get zeros above the diagonal."""
    panels = _panels(len(factor))
    memory = out.new_empty(_PANEL * len(factor))
    for top, bottom in panels:
        rows = out[top:bottom]
        rows[:, :bottom] = factor[top:bottom, :bottom]
        unit = torch.eye(bottom - top, dtype=out.dtype, device=out.device)
        corner = torch.linalg.solve_triangular(rows[:, top:bottom], unit, upper=False)
        if top:
            carried = memory[: (bottom - top) * top].view(bottom - top, top)
            for left, right in panels[: top // _PANEL]:
                torch.mm(rows[:, left:top], out[left:top, left:right], out=carried[:, left:right])
            torch.mm(corner, carried, out=rows[:, :top]).neg_()
        torch.tril(corner, out=rows[:, top:bottom])


def _square(root: torch.Tensor, white: torch.Tensor, sums: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace a lower root X by ``X^T X``, summed in `sums`; returns its diagonal and ``X^T white``, summed as `white`.

    In place, since a panel of the result depends only on its own rows of X and those below.
    """
    memory = root.new_empty(_PANEL * len(root))
    diagonal, solved = torch.zeros_like(white), torch.zeros_like(white)
    for top, bottom in _panels(len(root)):
        rows = root[top:bottom, :bottom]
        diagonal[:bottom] += torch.linalg.vector_norm(rows, dim=0, dtype=white.dtype).square_()
        solved[:bottom] += rows.mT @ white[top:bottom].to(root.dtype)
        product, left = memory[: rows.numel()].view_as(rows), root[top:, top:bottom].to(sums).mT
        if sums is root.dtype:
            torch.mm(left, root[top:, :bottom], out=product)
        else:
            for begin in range(0, bottom, _WIDENED):
                some = slice(begin, min(bottom, begin + _WIDENED))
                product[:, some] = left @ root[top:, some].to(sums)
        rows.copy_(product)
    return diagonal, solved


def _panels(n: int) -> list[tuple[int, int]]:
    return [(start, min(n, start + _PANEL)) for start in range(0, n, _PANEL)]


def _contracted(tree: Tree, a: torch.Tensor, inverse: torch.Tensor, diagonal: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of ``sum((a a^T - inverse) * K)`` by a tree's tensors; reads the inverse's lower half."""

    def write(at: Place, out: torch.Tensor) -> None:
        top, bottom, left, right = at
        if top != left:  # add the mirrored tile's share
            out.copy_(inverse[top:bottom, left:right]).addr_(a[top:bottom], a[left:right], beta=-2, alpha=2)
            return
        out.copy_(inverse[top:bottom, top:bottom]).tril_(-1)
        out.add_(out.mT.clone())
        out.diagonal().copy_(diagonal[top:bottom])
        out.addr_(a[top:bottom], a[top:bottom], beta=-1)

    return products.gradients_by(tree, None, write, usual(a.device))


def _place(tree: Tree, noise: torch.Tensor) -> torch.Tensor:
    """Return a vector that changes with every hyperparameter and with the points."""
    sizes = [torch.linalg.vector_norm(z, dim=-2).flatten() for z in tree.points]
    count = noise.new_full((1,), float(tree.points[0].shape[-2]))
    return torch.cat([count, noise.mean().reshape(1), *sizes, *(t.flatten() for t in (*tree.shapes, *tree.weights))])


def _probes(factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``L^-T g`` and ``L g`` for random sign vectors g, the same in each call.

    The mean of ``(W - K^-1) L g (L^-T g)^T`` is ``W - K^-1``; whitened so, no term has an eigenvalue above one.
    """
    draw = torch.Generator("cpu").manual_seed(0)
    g = torch.randint(2, (len(factor), _PROBES), generator=draw, device="cpu").to(factor).mul_(2).sub_(1)
    images = torch.empty_like(g)
    for top, bottom in _panels(len(g)):
        images[top:bottom] = factor[top:bottom, :bottom].tril(top) @ g[:bottom]
    return torch.linalg.solve_triangular(factor.mT, g, upper=True), images


def _worst(
    tree: Tree, a: torch.Tensor, factor: torch.Tensor, inverse: torch.Tensor, diagonal: torch.Tensor,
    found: list[torch.Tensor], freedom: float, known: int | None,
) -> float:  # fmt: skip
    """Return the largest estimated error of a hyperparameter's gradient in units of its bound, but for `known`."""
    probes, images = _probes(factor)
    missing = _multiplied(inverse, diagonal, images).sub_(probes)
    plan, pair = usual(a.device), (torch.cat([probes, missing], 1) / (2 * _PROBES), torch.cat([missing, probes], 1))
    errors, _ = products.gradients(tree, None, *pair, plan)
    if known is not None:
        errors[known].zero_()
    square = _by_logs(tree, products.gradients(tree, None, a[:, None], a[:, None], plan)[0])
    trace = square - _by_logs(tree, found)
    bound = OF_EACH * torch.maximum(square.abs(), trace.abs()) + _NOTHING * freedom
    return (_by_logs(tree, errors).abs() / bound).max().item()


def _multiplied(inverse: torch.Tensor, diagonal: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Return the product with columns of the symmetric matrix with this lower triangle, but this diagonal."""
    out = diagonal[:, None] * z
    for top, bottom in _panels(len(z)):
        rows = inverse[top:bottom, :bottom].to(z.dtype).tril_(top - 1)
        out[top:bottom] += rows @ z[:bottom]
        out[:bottom] += rows.mT @ z[top:bottom]
    return out


def _by_logs(tree: Tree, found: list[torch.Tensor]) -> torch.Tensor:
    """Return gradients by the logs of hyperparameters; for points, by the log scale of each coordinate."""
    points = [z - z.mean(-2, keepdim=True) for z in tree.points]
    by_points = [(z * g).sum(-2) for z, g in zip(points, found, strict=False)]
    values = [*tree.shapes, *tree.weights]
    by_values = [t * g for t, g in zip(values, found[len(points) :], strict=True)]
    return torch.cat([g.flatten() for g in (*by_points, *by_values)])
