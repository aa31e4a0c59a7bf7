"""Matrices of all kinds for the ops on tensors: recipes that hypothesis draws and shrinks, and a corpus of old trouble.

A recipe is small and readable, so that what fails is told as what to write down, not as a thousand numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

Batch = tuple[int, ...]
_BATCHES: tuple[Batch, ...] = ((), (1,), (3,), (2, 2), (64,), (0,))
_SPECTRA = ("geometric", "rank-deficient", "clustered", "one small", "one large")
_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda a: a,
    "transposed": lambda a: a.mT.contiguous().mT,
    "strided": lambda a: torch.stack((a, a), -1)[..., 0],
    "part of a larger one": lambda a: torch.nn.functional.pad(a, (2, 1, 1, 3))[..., 1:-3, 2:-1],
    "expanded": lambda a: a.expand(2, *a.shape),
}
_SPOILT = ("NaN", "infinity", "zeros", "minus")


@dataclass(frozen=True)
class Recipe:
    """How the arguments of one call of an op are made; condition, scale and shift are powers of ten."""

    op: str
    dtype: torch.dtype
    n: int
    more: int  # rows more than columns
    batch: Batch
    condition: float  # the largest singular value over the smallest
    scale: float  # the largest singular value
    spectrum: str  # how the others lie between
    layout: str
    spoilt: str  # what replaces an entry, all or the sign
    shift: float  # the diagonal that is added before a factorisation, in units of the largest entry
    requires_grad: bool
    seed: int

    def arguments(self) -> tuple[Any, ...]:
        """Make the arguments."""
        torch.manual_seed(self.seed)
        a = _MAKERS[self.op](self)
        if self.spoilt and a.numel():
            a = _spoilt(a, self.spoilt)
        a = a.to(self.dtype).requires_grad_(self.requires_grad)
        a = _LAYOUTS[self.layout](a)
        return (a,)

    def singular_values(self, k: int) -> torch.Tensor:
        """Return the singular values that the matrix has before it is rounded."""
        if k == 0:
            return torch.empty(0, dtype=torch.float64)
        values = torch.logspace(0, -self.condition, k, dtype=torch.float64)
        if self.spectrum == "rank-deficient":
            values[(k + 1) // 2 :] = 0.0
        elif self.spectrum == "clustered":
            values = values.round(decimals=2) + 10.0**-self.condition
        elif self.spectrum == "one small":
            values[:-1] = 1.0
        elif self.spectrum == "one large":
            values[1:] = values[-1].item()
        return values * 10.0**self.scale


def _orthonormal(batch: Batch, m: int, k: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(*batch, m, k, dtype=torch.float64))[0]


def _symmetric(recipe: Recipe) -> torch.Tensor:
    """Symmetric matrices; without rounding they would be positive semidefinite."""
    q = _orthonormal(recipe.batch, recipe.n, recipe.n)
    a = (q * recipe.singular_values(recipe.n)) @ q.mT
    return (a + a.mT) / 2


def _shifted(recipe: Recipe) -> torch.Tensor:
    """Symmetric matrices with something on their diagonal, as noise adds it; nothing of it under 1e-17."""
    a = _symmetric(recipe)
    if recipe.shift < -17 or not a.numel():
        return a
    return a + torch.eye(recipe.n, dtype=a.dtype) * a.abs().amax() * 10.0**recipe.shift


def _general(recipe: Recipe, m: int, n: int) -> torch.Tensor:
    k = min(m, n)
    left, right = (_orthonormal(recipe.batch, size, k) for size in (m, n))
    return (left * recipe.singular_values(k)) @ right.mT


def _tall(recipe: Recipe) -> torch.Tensor:
    return _general(recipe, recipe.n + recipe.more, recipe.n)


_MAKERS: dict[str, Callable[[Recipe], torch.Tensor]] = {
    "cholesky": _shifted,
    "qr": _tall,
}


def _spoilt(a: torch.Tensor, how: str) -> torch.Tensor:
    if how == "minus":
        return -a
    if how == "zeros":
        return a * 0
    a = a.clone()
    a[..., a.shape[-2] // 2, a.shape[-1] // 3] = float("nan") if how == "NaN" else float("inf")
    return a


@st.composite
def recipes(draw: st.DrawFn, op: str, largest: int) -> Recipe:
    """Draw a recipe for an op; batches are of smaller matrices, so that each has about as many entries."""
    batch = draw(st.sampled_from(_BATCHES))
    most = max(2, int(largest / max(1, torch.Size(batch).numel()) ** 0.5))
    n = max(1, round(most ** draw(st.floats(0, 1))))
    return Recipe(
        op=op,
        dtype=draw(st.sampled_from((torch.float64, torch.float32))),
        n=n,
        more=draw(st.integers(0, 2 * n)),
        batch=batch,
        condition=draw(st.floats(0, 16)),
        scale=draw(st.one_of(st.just(0.0), st.floats(-8, 8))),
        spectrum=draw(st.sampled_from(_SPECTRA)),
        layout=draw(st.sampled_from(tuple(_LAYOUTS)[: 5 if len(batch) == 0 else 4])),
        spoilt=draw(st.one_of(st.just(""), st.just(""), st.just(""), st.sampled_from(_SPOILT))),
        shift=draw(st.floats(-18, 0)),
        requires_grad=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )


def corpus(op: str) -> Iterator[tuple[Any, ...]]:
    """Matrices that have been trouble somewhere: tiny, empty, singular, indefinite, huge and minute entries.

    Then a ladder of conditions, for what breaks does so within a decade or two of them.
    """
    for dtype in (torch.float64, torch.float32):
        hilbert = 1 / (torch.arange(12)[:, None] + torch.arange(12) + 1).to(dtype)
        ones, eye = torch.ones(5, 5, dtype=dtype), torch.eye(6, dtype=dtype)
        nan, inf = (torch.full((3, 3), float(text), dtype=dtype) for text in ("nan", "inf"))
        arrow = torch.cat((eye, torch.linspace(-1, 1, 6, dtype=dtype).unsqueeze(0)))  # a row appended to a root
        for a in (
            ones[:1, :1], -ones[:1, :1], 0 * ones[:1, :1], eye[:3, :3], ones, 0 * ones, hilbert, -hilbert,
            eye * 1e30, eye * 1e-30, eye * 1e-42, eye[:4, :4].flip(0), torch.stack((eye, ones[:1, :1] * eye, -eye)),
            torch.diag(torch.tensor([1.0, 1e-16, 1.0, 1e-8], dtype=dtype)), hilbert.expand(3, 12, 12), nan, inf,
            torch.stack((nan, eye[:3, :3])), eye.new_empty(0, 0), eye.new_empty(0, 3, 3), eye.new_empty(3, 0, 0),
            *((arrow, eye.new_empty(4, 0)) if op == "qr" else ()),
        ):  # fmt: skip
            yield (a,)
        for half in range(33):
            yield Recipe(
                op, dtype, n=2 + half % 3, more=3, batch=((), (64,))[half % 2], condition=half / 2, scale=0.0,
                spectrum="geometric", layout="contiguous", spoilt="", shift=-18.0, requires_grad=False,
                seed=half,
            ).arguments()  # fmt: skip
