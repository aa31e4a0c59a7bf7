"""Candidates of class ``approximate`` of `kernel_matmul`: float32 and half precision.

They run only under ``accuracy="approximate"``, and where the error measured on this machine is at most `max_error`.
"""

from __future__ import annotations

from typing import Any

import torch

from autokern.core.problem import Problem
from autokern.kernels import embedded as forms
from autokern.kernels import matmul as products
from autokern.kernels.tiles import usual
from autokern.ops._candidates import Rule, every, needs_few, only
from autokern.ops.kernel_matmul import KERNEL_MATMUL, in_tiles, of_outputs


def in_lower_precision(
    kernel: Any, x1: torch.Tensor, x2: torch.Tensor, rhs: torch.Tensor, precision: str = ""
) -> torch.Tensor:
    """Return the product of a kernel matrix with `rhs`, computed tile by tile in float32, in the dtype of `rhs`.

    `precision` (float16, bfloat16) rounds the points of products further. Points are centred in their own dtype
    first: float32 has too few digits for points far from the origin.
    """
    tree, others = forms.both(kernel, x1, x2)
    centres = [z.detach().mean(-2, keepdim=True) for z in tree.points]

    def centred(points: list[torch.Tensor]) -> list[torch.Tensor]:
        return [(z - c).float() for z, c in zip(points, centres, strict=True)]

    low = tree._replace(points=centred(tree.points)).each(torch.Tensor.float)
    columns, plan = None if others is None else centred(others), usual(x1.device)._replace(precision=precision)
    return products.matmul(low, columns, rhs.float(), plan).to(rhs.dtype)


_tensor_cores = every(only("only a GPU has tensor cores of this precision", lambda p: p.device == "cuda"), needs_few)


def _low_memory(problem: Problem) -> int:
    """Return the bytes of the embedded float64 points, and of a product in float32."""
    low = problem.replace(dtype="float32")
    doubled = of_outputs(problem) // 4 if problem.dtype == "float64" else 0
    return doubled + in_tiles(usual(torch.device(problem.device)).tile)(low)


def _add(name: str, precision: str, summary: str, unsupported: Rule) -> None:
    register = KERNEL_MATMUL.candidate(
        name, accuracy="approximate", unsupported=unsupported, memory=_low_memory, summary=summary
    )
    register(lambda kernel, x1, x2, rhs: in_lower_precision(kernel, x1, x2, rhs, precision))


_add(
    "float32", "", "Tile by tile in float32, for points and columns in float64.",
    every(only("the data is float32 already", lambda p: p.dtype == "float64"), needs_few),
)  # fmt: skip
_add("float16", "float16", "Tile by tile, points in float16 on tensor cores.", _tensor_cores)
_add("bfloat16", "bfloat16", "Tile by tile, points in bfloat16 on tensor cores.", _tensor_cores)
