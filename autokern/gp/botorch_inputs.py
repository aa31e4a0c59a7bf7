"""What BoTorch's models do to their inputs before mean and kernel get them: transforms, and the numbers of tasks."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from autokern.core.known import relied
from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.small import Array

__all__ = ["is_mapping", "mapped", "transformed"]

_HOME = "botorch.models.transforms.input"
_KINDS = (
    "AffineInputTransform", "ChainedInputTransform", "FilterFeatures", "InputStandardize", "Log10", "Normalize", "Round"
)  # fmt: skip
_PLAIN = (bool, int, float, str, type(None), torch.Size)
_NONE = frozenset(vars(torch.nn.Module()))
_FUNCTIONS = ("forward", "_split_inputs", "_map_tasks")


def transformed(seen: Inspected, transform: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return points as a transform of known kind maps them now; what it learns from them, it learns as ever.

    Later changes of its settings and of its buffers will be seen.
    """
    space = vars(sys.modules[_HOME]) if _HOME in sys.modules else {}
    kinds = {space[name] for name in _KINDS if name in space}
    parts = list(transform.modules())
    for part in parts:
        if type(part) not in kinds:
            raise UnreadError(f"an input transform {type(part).__name__}")
        if not part.training:
            raise UnreadError("an input transform in evaluation mode")
        _settings(seen, part)
    seen.look(*parts)
    if not relied(*map(type, parts)).holds():  # each call may change what an unknown one holds
        raise UnreadError("an input transform that is not known")
    found: torch.Tensor = transform(x)
    for part in parts:
        for name in part._buffers:
            seen.unchanging(seen.buffer(part, name))
        for name in part._modules:
            seen.module(part, name)
    return found


def _settings(seen: Inspected, part: Any) -> None:
    for name in [*vars(part).keys() - _NONE, "training"]:
        value = seen.attribute(part, name)
        if type(value) is dict:
            seen.spelt(value)
        elif type(value) not in _PLAIN:
            raise UnreadError(f"a transform's {name}, a {type(value).__name__}")


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
    with torch.no_grad():
        before, tasks, after = model._split_inputs(x)
    whole: Array = torch.cat([before, tasks, after], -1).numpy().astype(np.float64)
    return whole, tasks[:, 0].numpy().astype(np.int64)
