"""The tasks of the points of BoTorch's model of several tasks, as its forward numbers them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.small import Array

__all__ = ["mapped"]


def mapped(seen: Inspected, model: Any, x: torch.Tensor) -> tuple[Array, Array] | None:
    """Return points with the numbers of their tasks in place of the tasks' values, and these numbers.

    Returns
    -------
    tuple of array or None
        None for a model that does not compute what BoTorch's of several tasks does.
    """
    module = sys.modules.get("botorch.models.multitask")
    kind = getattr(module, "MultiTaskGP", None)
    names = ("forward", "_split_inputs", "_map_tasks")
    if module is None or any(getattr(type(model), name, None) is not getattr(kind, name) for name in names):
        return None
    seen.stands_for(kind, *names)
    seen.stands_for(module, "_compute_multitask_mean")
    for name in ("_task_feature", "_validate_task_values", "_expected_task_values", "num_tasks", "_task_mapper"):
        seen.attribute(model, name)
    if model._buffers.get("_task_mapper") is not None:
        seen.copied(seen.buffer(model, "_task_mapper"))
    try:
        with torch.no_grad():
            before, tasks, after = model._split_inputs(x)
    except (ValueError, RuntimeError, IndexError) as error:
        raise UnreadError("values that are no tasks") from error
    whole: Array = torch.cat([before, tasks, after], -1).numpy()
    return whole, tasks[:, 0].numpy().astype(np.int64)
