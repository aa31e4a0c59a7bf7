"""How far results may be from the truth: multiples of n eps to a power of the condition number.

What an op checks (its contract: a residual) holds whatever the condition is. These bounds say what follows for the
result itself and for its gradients. Where a bound exceeds a tenth nothing is claimed, and where stock itself leaves it,
three times stock's error is allowed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NOTHING_CLAIMED = 0.1


class Tolerance(NamedTuple):
    """Bounds of an op by factor c and power p: errors relative to the largest entry are at most ``c n eps κ^p``."""

    result: tuple[float, float]
    gradient: tuple[float, float]
    of: str  # of what κ is the condition
    why: str  # where the power comes from

    def __call__(self, which: str, n: int, eps: float, kappa: float) -> float:
        """Return the bound for ``result`` or ``gradient``; infinite where nothing is claimed."""
        factor, power = getattr(self, which)
        bound = factor * n * eps * kappa**power if power else factor * n * eps
        return bound if bound < NOTHING_CLAIMED else float("inf")


TOLERANCES = {
    "cholesky": Tolerance((20, 1), (100, 1), "A", "Higham 2002, theorem 10.8; two solves with L in the gradient"),
    "qr": Tolerance((50, 1), (100, 2), "A", "Higham 2002, section 19.9; R is inverted twice in the gradient"),
}


def condition(op: str, a: torch.Tensor) -> float:
    """Return what κ is for an op on a matrix, the largest of a batch."""
    of = TOLERANCES[op].of
    if not of:
        return 1.0
    a = a.detach().double()
    values = torch.linalg.svdvals(a)
    smallest = values[..., -1]
    return float("inf") if bool((smallest == 0).any()) else (values[..., 0] / smallest).amax().item()


def table() -> str:
    """Return the bounds as a table of Markdown, for the documentation."""

    def told(bound: tuple[float, float]) -> str:
        factor, power = bound
        return f"{factor:g} n eps" + ("" if not power else " κ" if power == 1 else f" κ{'⁰¹²³'[int(power)]}")

    rows = [
        f"| `{name}` | {told(t.result)} | {told(t.gradient)} | {t.of or 'none'} | {t.why} |"
        for name, t in TOLERANCES.items()
    ]
    return "\n".join(["| op | result | gradients | κ of | source |", "|---|---|---|---|---|", *rows])
