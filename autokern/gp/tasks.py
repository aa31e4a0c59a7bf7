"""The tasks of the points of BoTorch's model of several tasks, as its forward numbers them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.small import Array

__all__ = ["is_mapping", "mapped"]


_FUNCTIONS = ("forward", "_split_inputs", "_map_tasks")


def is_mapping(kind: type) -> bool:
    """Whether the models of a class compute what BoTorch's of several tasks do."""
    known = getattr(sys.modules.get("botorch.models.multitask"), "MultiTaskGP", None)
    return known is not None and all(getattr(kind, name, None) is getattr(known, name) for name in _FUNCTIONS)


def mapped(seen: Inspected, model: Any, x: torch.Tensor) -> tuple[Array, Array]:
    """Return points with the numbers of their tasks in place of the tasks' values, and these numbers."""
    module: Any = sys.modules["botorch.models.multitask"]
    seen.relies(module.MultiTaskGP, f"{module.__name__}:_compute_multitask_mean")
    for name in ("_task_feature", "_validate_task_values", "_expected_task_values", "num_tasks", "_task_mapper"):
        seen.attribute(model, name)
    if model._buffers.get("_task_mapper") is not None:
        seen.unchanging(seen.buffer(model, "_task_mapper"))
    if x.dim() != 2:
        raise UnreadError("a batch of models of tasks")
    try:
        with torch.no_grad():
            before, tasks, after = model._split_inputs(x)
    except (ValueError, RuntimeError, IndexError) as error:
        raise UnreadError("values that are no tasks") from error
    whole: Array = torch.cat([before, tasks, after], -1).numpy().astype(np.float64)
    return whole, tasks[:, 0].numpy().astype(np.int64)
