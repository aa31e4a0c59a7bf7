"""Whether hooks are installed and removed, a small model agrees with stock, and a matrix too large is refused."""

from __future__ import annotations

import gpytorch
import torch

import autokern
from autokern.core import known
from autokern.hooks import install


def main() -> None:
    """Compare a model with autokern off and on."""
    patches = install.patches()
    before = [install.stock_of(p.owner, p.name) for p in patches]
    x = torch.linspace(0, 1, 40, dtype=torch.float64).unsqueeze(-1)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5)).double()

    def value() -> float:
        k = kernel(x).add_jitter(0.1)
        found: float = k.inv_quad_logdet(x, logdet=True)[1].item() + k.to_dense().sum().item()
        return found

    stock = value()
    with autokern.enabled():
        for patch, found in zip(patches, before, strict=True):
            put = install.stock_of(patch.owner, patch.name) is patch.replacement
            assert put is known.admits(patch.owner, patch.name, found, patch.relied), f"{patch.name} is hooked: {put}"
        assert abs(value() - stock) < 1e-6 * abs(stock), "a small model differs from stock"
        if not known.unknown():
            assert autokern.stats(), "no call was served"
            try:
                kernel(torch.zeros(10**6, 1, dtype=torch.float64).add_(1)).to_dense()
                raise SystemExit("a matrix of 7 TiB was not refused")
            except autokern.MemoryBudgetError:
                pass
    after = [install.stock_of(p.owner, p.name) for p in patches]
    assert all(a is b for a, b in zip(after, before, strict=True)), "a hook was not taken out"


if __name__ == "__main__":
    main()
