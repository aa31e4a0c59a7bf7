"""Hook into BoTorch: a small acquisition is optimised on one thread.

Its tensors are so small that torch gains nothing from further threads on a quiet machine. Beside another process that
computes they wait for each other at every operation, which takes 4 to 40 times as long.
"""

from __future__ import annotations

import math
from typing import Any

from autokern.hooks.bypass import stay_out
from autokern.hooks.install import hook
from autokern.hooks.reading import unless_it_fails
from autokern.system import threads

__all__ = ["declare"]

_MOST = 2**16
"""Elements of the largest tensor: torch would share an element-wise operation among two threads at most."""


def declare(optimize: Any) -> None:
    """Declare the hook of the module that optimises acquisition functions."""
    stock = getattr(optimize, "_optimize_acqf_batch", None)
    if stock is None:
        return
    alone = threads.limited(stock, 1)

    @hook(optimize, "_optimize_acqf_batch")
    def batch(opt_inputs: Any) -> Any:
        return (alone if not stay_out() and _is_small(opt_inputs) else stock)(opt_inputs)


@unless_it_fails
def _is_small(inputs: Any) -> bool | None:
    """Whether no tensor of an evaluation is large; None where that cannot be told."""
    acquisition, options = inputs.acq_function, inputs.options or {}
    model = acquisition.model
    if not inputs.bounds.is_cpu:
        return False
    restarts = min(inputs.num_restarts, options.get("batch_limit", inputs.num_restarts))
    augmented = getattr(acquisition, "get_augmented_q_batch_size", None)
    points = inputs.q if augmented is None else augmented(inputs.q)
    points += sum(_rows(getattr(acquisition, name, None)) for name in ("X_pending", "X_baseline"))
    sampler = getattr(acquisition, "sampler", None)
    samples = 1 if sampler is None else math.prod(sampler.sample_shape)
    n = sum(math.prod(one.train_inputs[0].shape[:-1]) for one in getattr(model, "models", [model]))
    fantasies = getattr(acquisition, "num_fantasies", 0)
    largest = max(points * (n + samples * model.num_outputs), fantasies * n**2)
    return bool(restarts * largest <= _MOST)


def _rows(points: Any) -> int:
    return 0 if points is None else int(points.shape[-2])
