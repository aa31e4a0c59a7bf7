"""Hooks into variational models: long training loops are recorded and replayed (`later.variational`)."""

from __future__ import annotations

import time
from typing import Any

import torch
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood
from gpytorch.models import ApproximateGP

from autokern.core.beside import Beside
from autokern.core.op import inside
from autokern.hooks.bypass import stay_out_of_models
from autokern.hooks.install import hook, stock_of

_ENOUGH = 0.03
"""Seconds of marginal likelihoods, without model and backward pass, before a step is recorded."""
_spent = Beside[float]()
"""By model."""
_stock_call = stock_of(ApproximateGP, "__call__")
_stock_forward = stock_of(_ApproximateMarginalLogLikelihood, "forward")


def _repeats(model: Any) -> bool:
    return (_spent.get(model) or 0.0) >= _ENOUGH and torch.is_grad_enabled() and not inside.repeated


@hook(ApproximateGP, "__call__", relies=None)
def _call(self: Any, inputs: Any, prior: Any = False, **kwargs: Any) -> Any:
    if prior or kwargs or not self.training or not _repeats(self) or stay_out_of_models():
        return _stock_call(self, inputs, prior=prior, **kwargs)
    from autokern.hooks.later import variational

    return variational.called(self, _stock_call, inputs)


@hook(_ApproximateMarginalLogLikelihood, "forward", relies=None)
def _forward(self: Any, approximate_dist_f: Any, target: Any, **kwargs: Any) -> Any:
    model = self.model
    if kwargs or not isinstance(model, ApproximateGP) or stay_out_of_models():
        return _stock_forward(self, approximate_dist_f, target, **kwargs)
    if not _repeats(model):
        began = time.perf_counter()
        found = _stock_forward(self, approximate_dist_f, target)
        _spent.put(model, (_spent.get(model) or 0.0) + time.perf_counter() - began)
        return found
    from autokern.hooks.later import variational

    return variational.loss(self, _stock_forward, _stock_call, approximate_dist_f, target)
