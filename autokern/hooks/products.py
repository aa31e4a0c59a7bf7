"""Products of conjugate gradients are counted: how long stock takes depends on the numbers, not on the sizes alone."""

from __future__ import annotations

from typing import Any

import linear_operator.utils
import torch

from autokern.core.op import inside
from autokern.hooks.install import hook

_stock = linear_operator.utils.linear_cg


@hook(linear_operator.utils, "linear_cg")
def _linear_cg(matmul_closure: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    multiply = matmul_closure.matmul if torch.is_tensor(matmul_closure) else matmul_closure
    if not callable(multiply):
        return _stock(matmul_closure, rhs, *args, **kwargs)

    def counted(vectors: Any) -> Any:
        inside.products += 1
        return multiply(vectors)

    return _stock(counted, rhs, *args, **kwargs)
