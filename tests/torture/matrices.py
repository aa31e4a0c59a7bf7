"""Matrices of all kinds for the ops on tensors: recipes that hypothesis draws and shrinks, and a corpus of old trouble.

A recipe is small and readable, so that what fails is told as what to write down, not as a thousand numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

LAYOUTS: dict[str, Any] = {
    "contiguous": lambda a: a,
    "transposed": lambda a: a.mT.contiguous().mT,
    "strided": lambda a: torch.stack((a, a), -1)[..., 0],
    "part of a larger one": lambda a: torch.nn.functional.pad(a, (2, 1, 1, 3))[..., 1:-3, 2:-1],
    "expanded": lambda a: a.expand(2, *a.shape) if a.dim() == 2 else a,
}


@dataclass(frozen=True)
class Recipe:
    """How the matrix of one call of an op is made; condition, scale and shift are powers of ten."""

    op: str
    dtype: torch.dtype
    n: int
    more: int  # rows more than columns, of what is decomposed by QR
    batch: tuple[int, ...]
    condition: float  # the largest singular value over the smallest
    scale: float = 0.0  # the largest singular value
    spectrum: str = "geometric"  # how the others lie between
    layout: str = "contiguous"
    spoilt: str = ""  # what replaces an entry, all or the sign
    shift: float = -18.0  # the diagonal that noise adds before a factorisation, in units of the largest entry
    requires_grad: bool = False
    seed: int = 0

    def arguments(self) -> tuple[torch.Tensor]:
        """Make the matrix; without rounding that for a Cholesky factorisation would be positive semidefinite."""
        torch.manual_seed(self.seed)
        right, values = _orthonormal(*self.batch, self.n, self.n), self._singular_values()
        if self.op == "qr":
            a = _orthonormal(*self.batch, self.n + self.more, self.n) * values @ right.mT
        else:
            a = right * values @ right.mT
            a = (a + a.mT) / 2
            if self.shift >= -17 and a.numel():
                a += torch.eye(self.n, dtype=a.dtype) * a.abs().amax() * 10.0**self.shift
        if self.spoilt == "minus":
            a = -a
        elif self.spoilt == "zeros":
            a = a * 0
        elif self.spoilt and a.numel():
            a[..., a.shape[-2] // 2, a.shape[-1] // 3] = float(self.spoilt)
        return (LAYOUTS[self.layout](a.to(self.dtype).requires_grad_(self.requires_grad)),)

    def _singular_values(self) -> torch.Tensor:
        values = torch.logspace(0, -self.condition, self.n, dtype=torch.float64)
        if self.spectrum == "rank-deficient":
            values[(self.n + 1) // 2 :] = 0.0
        elif self.spectrum == "clustered":
            values = values.round(decimals=2) + 10.0**-self.condition
        elif self.spectrum == "one small":
            values[:-1] = 1.0
        elif self.spectrum == "one large":
            values[1:] = values[-1].item()
        return values * 10.0**self.scale


def _orthonormal(*shape: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(shape, dtype=torch.float64))[0]


@st.composite
def recipes(draw: st.DrawFn, op: str, largest: int) -> Recipe:
    """Draw a recipe for an op; batches are of smaller matrices, so that each has about as many entries."""
    batch = draw(st.sampled_from(((), (1,), (3,), (2, 2), (64,), (0,))))
    most = max(2, int(largest / max(1, torch.Size(batch).numel()) ** 0.5))
    n = max(1, round(most ** draw(st.floats(0, 1))))
    drawn = {
        "dtype": st.sampled_from((torch.float64, torch.float32)), "more": st.integers(0, 2 * n),
        "condition": st.floats(0, 16), "scale": st.one_of(st.just(0.0), st.floats(-8, 8)),
        "spectrum": st.sampled_from(("geometric", "rank-deficient", "clustered", "one small", "one large")),
        "layout": st.sampled_from(tuple(LAYOUTS)),
        "spoilt": st.sampled_from((*[""] * 12, "nan", "inf", "zeros", "minus")), "shift": st.floats(-18, 0),
        "requires_grad": st.booleans(), "seed": st.integers(0, 2**20),
    }  # fmt: skip
    return Recipe(op, n=n, batch=batch, **{name: draw(values) for name, values in drawn.items()})


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
            batch = ((), (64,))[half % 2]
            yield Recipe(op, dtype, n=2 + half % 3, more=3, batch=batch, condition=half / 2, seed=half).arguments()
