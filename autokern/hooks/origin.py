"""Which prediction strategies autokern serves: those whose inputs are known.

A strategy is adopted in the call that makes it, if its kernel and its likelihood are of the libraries' own classes,
which hide no state. From then on its inputs are compared by value (`state`); caches whose inputs changed are made anew.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy, prediction_strategy
from linear_operator.operators import BatchRepeatLinearOperator

from autokern.core.beside import Beside
from autokern.core.known import Relied, relied
from autokern.gp.frozen import is_library
from autokern.gp.relied import PREDICTION
from autokern.gp.state import State
from autokern.hooks.reading import unless_it_fails
from autokern.kernels.family import DISTANCES

__all__ = ["adopt", "holds", "is_ours", "just_made", "kernel_in", "kernel_of", "made", "ours"]


class _Newest(threading.local):
    """The strategy that this thread made last, with hooks installed: nothing can have changed since."""

    made: weakref.ref[Any] | None = None


_newest = _Newest()


class _Origin(NamedTuple):
    """The inputs of a strategy: states of its model, likelihood and parent, and whether it has a graph."""

    kernel: weakref.ref[Any]
    graph: bool
    prior: State
    noise: State
    parent: State | None
    relied: Relied

    def holds(self) -> bool:
        """Whether all inputs are unchanged."""
        return (
            self.relied.holds()
            and self.prior.holds()
            and self.noise.holds()
            and (self.parent is None or self.parent.holds())
        )

    def serves(self, growing: bool) -> bool:
        """Whether caches of that time may serve a prediction, or a fantasy that grows from them.

        With `fast_pred_var`, noise written past the version counters is not seen, as in stock: the library's own tests
        ask for that. Factor and covariances still belong together then.
        """
        if not self.relied.holds() or not self.prior.holds() or not (self.parent is None or self.parent.holds()):
            return False
        plain = not self.graph and self.parent is None and not growing
        if plain and torch.is_grad_enabled() and gpytorch.settings.detach_test_caches.off():
            return False  # gradients are to pass through caches that were made without
        return self.noise.holds() or (gpytorch.settings.fast_pred_var.on() and not self.noise.counted())


_ADOPTED = "_autokern_adopted"
"""Key in the dictionary of a strategy whose model holds all its inputs, so that it can be made anew."""
_origins = Beside[_Origin]()
"""Origins of the strategies that autokern serves; the inputs of any other are unknown."""


def adopt(model: Any, strategy: Any, parent: Any = None) -> bool:
    """Record the inputs of a strategy that was just made, if all are of known classes.

    Fantasies use the kernel of a `parent`; their model has a copy of it.
    """
    prior = strategy.train_prior_dist
    if type(prior) not in (MultivariateNormal, MultitaskMultivariateNormal):
        return False  # one of another class may define its mean
    if any(p.is_inference() for p in model.parameters()):
        return False  # autograd keeps none of those
    kernel = theirs = kernel_in(prior.lazy_covariance_matrix)
    if parent is not None:
        names = [name for name, module in parent.named_modules() if module is theirs]
        kernel = model.get_submodule(names[0]) if names else None
    known = kernel is not None and is_library(kernel) and is_library(model.likelihood)
    if type(strategy) is not DefaultPredictionStrategy or not known or not strategy.num_train:
        return False
    code = relied(*PREDICTION, *DISTANCES, *map(type, model.modules()))
    if not code.holds():
        made(None)
        return False
    if parent is None:
        strategy.__dict__[_ADOPTED] = True
    origin = _Origin(
        weakref.ref(kernel),
        torch.is_grad_enabled(),
        State(model, but=model.likelihood),
        State(model.likelihood),
        None if parent is None else State(theirs),
        code,
    )
    _origins.put(strategy, origin)
    return True


def kernel_in(covariance: Any) -> Any:
    """Return the kernel of a covariance that is one kernel's at some points, else None."""
    if type(covariance) is BatchRepeatLinearOperator:
        covariance = covariance.base_linear_op
    plain = type(covariance) is LazyEvaluatedKernelTensor and not covariance.params and not covariance.last_dim_is_batch
    return covariance.kernel if plain else None


@unless_it_fails
def ours(model: Any, growing: bool = False) -> Any:
    """Return the strategy of a model, made if there is none or its inputs changed; None if autokern does not serve it.

    With `growing`, it serves a fantasy and not a prediction.
    """
    strategy = model.prediction_strategy
    if _redefines(strategy):
        return None
    known = None if strategy is None else _origins.get(strategy)
    if known is not None and known.serves(growing):
        return strategy
    if strategy is None or known is not None or _ADOPTED in strategy.__dict__:  # or it came out of a pickle
        prior = model._get_train_prior_distribution(list(model.train_inputs))
        strategy = prediction_strategy(
            train_inputs=list(model.train_inputs),
            train_prior_dist=prior,
            train_labels=model.train_targets,
            likelihood=model.likelihood,
        )
        model.prediction_strategy = strategy
    elif not just_made(strategy):
        return None
    return strategy if adopt(model, strategy) else None


def made(strategy: Any) -> None:
    """Record the strategy that this thread has just made; None if its inputs are unknown."""
    _newest.made = None if strategy is None else weakref.ref(strategy)


def just_made(strategy: Any) -> bool:
    """Whether this is the strategy that this thread made last."""
    return _newest.made is not None and _newest.made() is strategy


def is_ours(strategy: Any) -> bool:
    """Whether a strategy was adopted, and redefines nothing of its class."""
    return _origins.get(strategy) is not None and not _redefines(strategy)


def _redefines(thing: Any) -> bool:
    kind = type(thing)
    return any(hasattr(kind, name) for name in getattr(thing, "__dict__", ()))


def holds(strategy: Any) -> bool:
    """Whether a strategy was adopted and its inputs are unchanged."""
    origin = _origins.get(strategy)
    return origin is not None and origin.holds()


def kernel_of(strategy: Any) -> Any:
    """Return the kernel of the model whose strategy this is."""
    origin = _origins.get(strategy)
    return None if origin is None else origin.kernel()
