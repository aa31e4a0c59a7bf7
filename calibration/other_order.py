"""A pytest plugin: gpytorch's own distances sum the coordinates in another order, drawn anew for each call.

The formula is the same and the last bits are others; where there is but one coordinate, the last bit of each
distance is drawn too. A test that fails stock code with this plugin asks for more digits than stock has, and says
nothing of autokern. The environment variable `OTHER_ORDER` is the seed.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from typing import Any

import gpytorch.kernels.kernel as home
import torch

draws = random.Random(int(os.environ["OTHER_ORDER"]))


def reordered(distance: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function of distances with the coordinates of its points in another order on every call."""

    @functools.wraps(distance)
    def with_other_order(x1: torch.Tensor, x2: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        order = draws.sample(range(x1.shape[-1]), x1.shape[-1])
        first = x1[..., order]
        found = distance(first, first if x1 is x2 else x2[..., order], *args, **kwargs)
        if x1.shape[-1] > 1:
            return found
        generator = torch.Generator().manual_seed(draws.getrandbits(32))
        last_bit = torch.randint(-1, 2, found.shape, generator=generator).to(found) * torch.finfo(found.dtype).eps
        return found * (1 + last_bit)

    return with_other_order


home.sq_dist, home.dist = reordered(home.sq_dist), reordered(home.dist)
