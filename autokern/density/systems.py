"""Linear systems with a covariance plus noise, solved by preconditioned conjugate gradients to a stated residual.

A separate product checks the final residual. The iteration tracks the residual of the system itself;
`block_cg` tracks that of the preconditioned system, which its probes need, and takes ten times as many products in
single precision if the noise is small.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import NamedTuple

import torch

from autokern.core.decision import Solved, note
from autokern.density.block_cg import Product, UnfitError, product_with, still_needed
from autokern.density.preconditioners import Kept
from autokern.kernels.tree import Tree, apart
from autokern.model.libraries import LONGEST

_ROUNDS = 3  # most restarts from the solution so far, if rounding made the iteration inaccurate
_LARGE = 8192  # points from which single precision saves more time than the extra check of the residual costs
_ELEMENTS = 2**24  # most elements of the columns that are solved together, to limit the memory of their copies


class _Found(NamedTuple):
    x: torch.Tensor
    residual: float
    products: int


class _System:
    """A kernel tree with noise, and its cached preconditioners."""

    def __init__(self, tree: Tree, noise: torch.Tensor) -> None:
        self._tree, self._noise = tree.each(lambda t: t.detach().clone()), noise.detach().clone()
        self.sets = Kept(self._tree.points[0])
        self._made: dict[str, Product] = {}

    def is_of(self, tree: Tree, noise: torch.Tensor) -> bool:
        pairs = ((self._noise, *apart(self._tree)[1]), (noise, *apart(tree)[1]))
        same = (a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(*pairs, strict=True))
        return self._tree.node == tree.node and all(same)

    def inverse(self, name: str) -> Product:
        made = self._made.get(name)
        if made is None:
            by = self.sets.made(name, self._tree, self._noise)
            made = self._made[name] = lambda v: by.apply(by.turned(v))
        return made


_latest: dict[str, tuple[_System, weakref.ref[torch.Tensor]]] = {}
"""The last system, for repeated predictions; dropped when the caller frees its points."""


def of_tree(
    multiply: Product,  # with the noisy covariance, for columns ``(n, t)``
    tree: Tree,  # without noise and batch, of detached tensors
    noise: torch.Tensor,  # ``(n,)``, positive
    rhs: torch.Tensor,  # ``(n, t)``
    goal: float,  # relative residual
    owner: torch.Tensor,  # the caller's points, with which the cached system is freed
) -> torch.Tensor | None:
    """Return the solution of a system whose covariance is a kernel tree; None if no iteration converges."""
    system = next((known for known, _ in list(_latest.values()) if known.is_of(tree, noise)), None)
    if system is None:
        system = _System(tree, noise)
        _latest["last"] = system, weakref.ref(owner, functools.partial(_latest.pop, "last"))
    several, check = [multiply], multiply
    if len(noise) >= _LARGE and noise.dtype is torch.float32:
        check = product_with(tree, noise.double(), torch.float64)
    elif len(noise) >= _LARGE:
        several.insert(0, product_with(tree, noise, torch.float32))
    for name in system.sets.names(tree, noise):
        try:
            inverse = system.inverse(name)
        except UnfitError:
            continue
        found = _all_columns(several, check, inverse, rhs, goal)
        missed = int(not found.residual <= goal)
        note(Solved(found.residual, found.products, name, found.x.shape[1], goal=goal, missed=missed))
        if not missed:
            system.sets.served = name
            return found.x
    return None


def _all_columns(multiply: list[Product], check: Product, inverse: Product, rhs: torch.Tensor, goal: float) -> _Found:
    """Solve chunks of columns, each by the first product that reaches the goal."""
    parts, by = [], iter(multiply)
    product = next(by)
    for columns in rhs.split(max(1, _ELEMENTS // len(rhs)), 1):
        found = _refined(product, inverse, columns, goal, check)
        while not found.residual <= goal and (other := next(by, None)) is not None:
            product = other
            found = _refined(product, inverse, columns, goal, check)
        parts.append(found)
        if not found.residual <= goal:
            break
    products = max(part.products for part in parts)
    return _Found(torch.cat([part.x for part in parts], 1), max(part.residual for part in parts), products)


def _refined(multiply: Product, inverse: Product, b: torch.Tensor, goal: float, check: Product) -> _Found:
    """Solve, and restart from the solution, until the residual by the product `check` is small enough."""
    size = torch.linalg.vector_norm(b, dim=0)
    size = torch.where(size > 0, size, 1.0)
    x, r, products, residual = torch.zeros_like(b), b, 0, math.inf
    for _ in range(_ROUNDS):
        step, made = _iterated(multiply, inverse, r, size * goal, LONGEST - products)
        if step is None:
            return _Found(x, math.inf, products + made)
        x += step
        r = (b - check(x)).to(b.dtype)
        products += made + 1
        before, residual = residual, float((torch.linalg.vector_norm(r, dim=0) / size).max())
        if residual <= goal or not residual < before / 2:
            break
    return _Found(x, residual, products)


def _iterated(
    multiply: Product, inverse: Product, b: torch.Tensor, enough: torch.Tensor, most: int
) -> tuple[torch.Tensor | None, int]:
    """Return a solution with residual norms at most `enough`, None if it fails, and the number of products."""
    x, r = torch.zeros_like(b), b.clone()
    left = float((torch.linalg.vector_norm(r, dim=0) / enough).max())
    if left <= 1:
        return x, 0
    z = inverse(r)
    p, rho = z, (r * z).sum(0)
    first = left
    for made in range(1, most + 1):
        q = multiply(p)
        curvature = (p * q).sum(0)
        alpha = torch.where(rho > 0, rho / curvature, 0.0)  # a solved column stays unchanged
        if not torch.isfinite(alpha).all() or (alpha < 0).any():
            return None, made
        x.addcmul_(p, alpha)
        r.addcmul_(q, alpha, value=-1)
        left = float((torch.linalg.vector_norm(r, dim=0) / enough).max())
        if left <= 1:
            return x, made
        if not made + still_needed(first, left, made) <= 2 * LONGEST:
            return None, made
        z = inverse(r)
        fresh = (r * z).sum(0)
        p = torch.addcmul(z, p, torch.where(rho > 0, fresh / rho, 0.0))
        rho = fresh
    return None, most
