"""Hook into BoTorch's `optimize_acqf`: a small acquisition function is optimised on one thread.

Its tensors are too small to gain from more threads on a quiet machine. Beside another busy process, the threads wait
for each other at every operation, which takes 4 to 40 times as long.
"""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any

from autokern.core.errors import unless_it_fails
from autokern.hooks.bypass import stay_out
from autokern.hooks.install import hook
from autokern.system import threads

_MOST = 2**16
"""Most elements of a tensor in each evaluation: torch shares an operation on it among two threads at most."""
_MOST_ONCE = 2**20
"""Most elements in the single evaluation of the raw samples, from which the starts are chosen."""
_MOST_POINTS = 512
"""Most training points: each evaluation multiplies matrices of their number of rows."""
_KNOWN = {f"botorch.acquisition.{name}" for name in ("analytic", "knowledge_gradient", "logei", "monte_carlo")}
_KNOWN |= {f"botorch.acquisition.multi_objective.{name}" for name in ("logei", "monte_carlo")}
"""Modules of acquisition functions whose tensors `_is_small` counts."""
_PLAIN = {f"botorch.acquisition.objective.{name}MCObjective" for name in ("Identity", "Linear")}
_PLAIN |= {
    f"botorch.acquisition.multi_objective.objective.{name}MCMultiOutputObjective" for name in ("Identity", "Weighted")
}
"""Objectives that create no larger tensor; others may call the user's functions."""


def declare(optimize: Any) -> bool:
    """Declare the hook of `botorch.optim.optimize`; return False to be called again later."""
    stock = getattr(optimize, "_optimize_acqf_batch", None)
    if type(stock) is not FunctionType or stock.__module__ != optimize.__name__:
        return stock is None  # a mock may be gone later
    alone = threads.limited(stock, 1)

    @hook(optimize, "_optimize_acqf_batch")
    def batch(opt_inputs: Any) -> Any:
        return (alone if not stay_out() and _is_small(opt_inputs) else stock)(opt_inputs)

    return True


@unless_it_fails
def _is_small(inputs: Any) -> bool:
    """Whether all tensors of an evaluation are small, by an estimate; a failure means no."""
    acquisition, options = inputs.acq_function, inputs.options or {}
    objective = getattr(acquisition, "objective", None)
    if not inputs.bounds.is_cpu or type(acquisition).__module__ not in _KNOWN:
        return False
    if objective is not None and f"{type(objective).__module__}.{type(objective).__name__}" not in _PLAIN:
        return False
    models = getattr(acquisition.model, "models", [acquisition.model])
    if not all(_is_plain(model) for model in models):
        return False
    sizes = [math.prod(model.train_inputs[0].shape[:-1]) for model in models]
    augmented = getattr(acquisition, "get_augmented_q_batch_size", None)
    q = inputs.q if augmented is None else augmented(inputs.q)
    points = q + sum(_rows(getattr(acquisition, name, None)) for name in ("X_pending", "X_baseline"))
    sampler = getattr(acquisition, "sampler", None)
    samples = 1 if sampler is None else math.prod(sampler.sample_shape)
    boxes = _rows(getattr(acquisition, "cell_lower_bounds", None)) or 1
    each = points * (sum(sizes) + samples * acquisition.model.num_outputs * boxes)
    fantasies = getattr(acquisition, "num_fantasies", 0) * max(sizes) ** 2
    restarts = min(inputs.num_restarts, options.get("batch_limit", inputs.num_restarts))
    few = max(model.train_inputs[0].shape[-2] for model in models) <= _MOST_POINTS
    return bool(few and restarts * max(each, fantasies) <= _MOST and (inputs.raw_samples or 0) * each <= _MOST_ONCE)


def _is_plain(model: Any) -> bool:
    """Whether a model is BoTorch's, without an input transform that turns one point into several."""
    several = getattr(getattr(model, "input_transform", None), "is_one_to_many", False)
    return type(model).__module__.startswith("botorch.models.") and not several


def _rows(points: Any) -> int:
    return 0 if points is None else int(points.shape[-2])
