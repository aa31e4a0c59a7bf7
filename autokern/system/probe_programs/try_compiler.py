"""Whether `torch.compile` compiles a function that gives right numbers."""

from __future__ import annotations

import random

import torch


def main() -> None:
    """Compile and compare."""
    shift = random.random()  # otherwise an earlier compiled result would answer

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * shift).sin().sum()

    x = torch.linspace(0, 1, 100, dtype=torch.float64)
    found = torch.compile(function, fullgraph=True)(x)
    assert abs(float(found) - float(function(x))) < 1e-9, "a compiled function gives wrong numbers"


if __name__ == "__main__":
    main()
