"""What a model does with its points before mean and kernel get them: `forward`, BoTorch's input transforms and tasks.

A `forward` method is plain, which only returns mean and covariance of the points, if its bytecode equals that of a
template below, up to the names of variables and modules.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal

from autokern.core.releases.known import relied
from autokern.kernels.array_parts import Array
from autokern.model.arrays import Inspected, UnreadError

_HOME = "botorch.models.transforms.input"
_KINDS = (
    "AffineInputTransform", "ChainedInputTransform", "FilterFeatures", "InputStandardize", "Log10", "Normalize", "Round"
)  # fmt: skip
_PLAIN = (bool, int, float, str, type(None), torch.Size)
_NONE = frozenset(vars(torch.nn.Module()))
_FUNCTIONS = ("forward", "_split_inputs", "_map_tasks")


def _qualified(self: Any, x: Any) -> Any:
    mean = self.mean_module(x)
    covariance = self.covar_module(x)
    return gpytorch.distributions.MultivariateNormal(mean, covariance)


def _by_name(self: Any, x: Any) -> Any:
    mean = self.mean_module(x)
    covariance = self.covar_module(x)
    return MultivariateNormal(mean, covariance)


def _qualified_at_once(self: Any, x: Any) -> Any:
    return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def _at_once(self: Any, x: Any) -> Any:
    return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def _transformed(self: Any, x: Any) -> Any:
    if self.training:
        x = self.transform_inputs(x)
    mean = self.mean_module(x)
    covariance = self.covar_module(x)
    return MultivariateNormal(mean, covariance)


_FLAGS = 0xFFFF  # higher bits are those of `from __future__ import ...`
_TEMPLATES = (_qualified, _by_name, _qualified_at_once, _at_once, _transformed)


def _modules_of(forward: Callable[..., Any]) -> tuple[str, str, bool] | None:
    """Return the names of a plain method's mean and kernel, and whether it transforms inputs; None if not plain."""
    if not isinstance(forward, types.FunctionType) or forward.__closure__ or forward.__defaults__:
        return None
    code, space = forward.__code__, forward.__globals__
    for template in _TEMPLATES:
        model = template.__code__
        if _compared(code) != _compared(model):
            continue
        names = dict(zip(model.co_names, code.co_names, strict=True))
        root = "gpytorch" if "gpytorch" in names else "MultivariateNormal"
        fixed = {"distributions", "MultivariateNormal", "training", "transform_inputs"} - {root}
        plain = space.get(names[root]) is (gpytorch if root == "gpytorch" else MultivariateNormal)
        if plain and all(names.get(name, name) == name for name in fixed):
            return names["mean_module"], names["covar_module"], template is _transformed
    return None


def _compared(code: types.CodeType) -> tuple[Any, ...]:
    return code.co_code, code.co_argcount, code.co_flags & _FLAGS, len(code.co_names)


def transformed(seen: Inspected, transform: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return points mapped by an input transform; raises UnreadError if it is not a known one in training mode.

    The transform learns its coefficients in this call, as usual. Changes of its settings or buffers invalidate `seen`.
    """
    space = vars(sys.modules[_HOME]) if _HOME in sys.modules else {}
    kinds = {space[name] for name in _KINDS if name in space}
    parts = list(transform.modules())
    for part in parts:
        if type(part) not in kinds:
            raise UnreadError(f"an input transform {type(part).__name__}")
        if not part.training:
            raise UnreadError("an input transform in evaluation mode")
        for name in [*vars(part).keys() - _NONE, "training"]:
            value = seen.attribute(part, name)
            if type(value) is dict:
                seen.spelt(value)
            elif type(value) not in _PLAIN:
                raise UnreadError(f"a transform's {name}, a {type(value).__name__}")
    seen.look(*parts)
    if not relied(*map(type, parts)).holds():  # a call of an unknown transform may change its state
        raise UnreadError("an input transform that is not known")
    found = transform(x)
    for part in parts:
        for name in part._buffers:
            seen.unchanging(seen.buffer(part, name))
        for name in part._modules:
            seen.module(part, name)
    return found


def parts_of(kind: Any) -> tuple[str, str, bool]:
    """Return the names of a model class's mean and kernel, and whether `forward` transforms inputs; or UnreadError."""
    names = ("mean_module", "covar_module", True) if _is_mapping(kind) else _modules_of(kind.forward)
    if names is None or any(hasattr(kind, name) for name in names[:2]):
        raise UnreadError("a forward that is not the plain one")
    return names


def _is_mapping(kind: type) -> bool:
    """Whether a model class computes as BoTorch's `MultiTaskGP` does."""
    known = getattr(sys.modules.get("botorch.models.multitask"), "MultiTaskGP", None)
    return known is not None and all(getattr(kind, name, None) is getattr(known, name) for name in _FUNCTIONS)


class Tasks(NamedTuple):
    """The tasks of a BoTorch model."""

    column: int  # of the points, which holds a task's value
    values: Array  # of the tasks, sorted
    numbers: Array  # of the tasks, by which mean and kernel know them

    def mapped(self, x: Array) -> Array | None:
        """Return points ``(..., d)`` with task numbers in place of task values; None if a value is no task's."""
        found = np.trunc(x[..., self.column])
        at = np.searchsorted(self.values, found)
        if not (self.values.take(at, mode="clip") == found).all():
            return None
        whole = x.copy()
        whole[..., self.column] = self.numbers[at]
        return whole


def numbered(seen: Inspected, model: Any, x: Array) -> tuple[Tasks | None, Array]:
    """Return a model's tasks, None if it has no tasks, and the points that its mean and kernel get; or UnreadError."""
    if not _is_mapping(type(model)):
        return None, x
    module: Any = sys.modules["botorch.models.multitask"]
    seen.relies(module.MultiTaskGP, f"{module.__name__}:_compute_multitask_mean")
    names = "_task_feature", "_expected_task_values", "num_tasks"
    column, expected, count = (seen.attribute(model, name) for name in names)
    for name in ("_validate_task_values", "_task_mapper"):
        seen.attribute(model, name)
    values = numbers = np.arange(count, dtype=np.float64)
    if model._buffers.get("_task_mapper") is not None:
        values = np.array(sorted(expected), np.float64)
        numbers = seen.unchanging(seen.buffer(model, "_task_mapper"))[values.astype(np.int64)].astype(np.float64)
    tasks = Tasks(column, values, numbers)
    points = tasks.mapped(x)
    if points is None:
        raise UnreadError("tasks that there are not")
    return tasks, points


def mean_of_tasks(mean: Any, before: torch.Tensor, tasks: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return the mean of points, selected by BoTorch's own code for their task numbers ``(..., 1)``."""
    module: Any = sys.modules["botorch.models.multitask"]
    return module._compute_multitask_mean(mean, before, tasks, after)
