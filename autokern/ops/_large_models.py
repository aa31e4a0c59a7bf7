"""Candidates of `exact_log_prob` and `predict` for many points.

``state-space`` serves Matérn kernels in one dimension, in linear time.
``preconditioned`` solves to a stated residual; if its iterations do not converge, `matrix-free` serves.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import gpytorch
import torch
from linear_operator import settings as library

from autokern.core.op import Op
from autokern.core.problem import Problem
from autokern.core.state import Beside
from autokern.density import iterated_density
from autokern.density.preconditioners import footprint, kept_for
from autokern.kernels import tree as trees
from autokern.model.libraries import tolerance
from autokern.model.marginal import Marginal, ingredients, variances
from autokern.ops._candidates import every, of_many, of_trees, only, own_obeys, to_a_residual
from autokern.ops._problems import families, iterates
from autokern.prediction import factor_cache
from autokern.prediction.factor_cache import Query
from autokern.prediction.lazy_covariance import PosteriorCovariance

if TYPE_CHECKING:
    from autokern.prediction.markov_posterior import LinePosterior

LINE = "line"  # word in the variant of a problem: a single model, a sum of Matérn kernels, many one-dimensional points
ENOUGH = 400
"""Training points from which on counts of operations favour the state-space form on any CPU; fewer get no `LINE`."""


def word(marginal: Marginal, value: torch.Tensor) -> str:
    """Return ``/line`` for a density that the state-space form supports, else an empty string."""
    lazy, tensors = marginal.lazy, (marginal.noise, value, marginal.distribution.loc)
    x = lazy.x1
    if x.dim() != 2 or x.shape[-1] != 1 or len(x) < ENOUGH or lazy.batch_shape or any(t.dim() != 1 for t in tensors):
        return ""
    return _word_of(lazy.kernel)


def _word_of(kernel: Any) -> str:
    from autokern.density.markov_chain import leaves_of  # few programs have such points

    node = trees.form(kernel)
    if node is None or leaves_of(node) is None:
        return ""
    own = (part.active_dims for part in kernel.modules() if isinstance(part, gpytorch.kernels.Kernel))
    once = all(dims is None or len(dims) == 1 for dims in own)  # active dims may repeat a dimension
    return f"/{LINE}" if once else ""


_BY_PROBES = "; the log determinant and its gradient by probes; calls report the standard error"
_LINES = "only for sums of Matérn kernels on points of one dimension"
unsupported = every(
    only(_LINES, lambda p: LINE in p.words),
    only("on the CPU, without gradients by the points", lambda p: p.device == "cpu" and "x" not in p.grad),
)
predicts = every(
    only(_LINES, lambda p: LINE in p.words and "grown" not in p.words),
    only("on the CPU, without gradients", lambda p: p.device == "cpu" and not p.grad),
)


def _memory(problem: Problem) -> int:
    from autokern.density.markov_chain import BLOCK

    d = sum({"matern12": 1, "matern32": 2}.get(name, 3) for name in families(problem))
    n, parts = problem.n + BLOCK, len(families(problem))
    return 8 * n * (BLOCK * (7 + 2 * parts) + 12 * d) + 2**20


def _iterated_memory(problem: Problem) -> int:
    matrix = problem.n**2 * problem.itemsize
    held = matrix if matrix <= iterated_density.DENSE else 2**26  # of the tiles of kernels and derivatives
    return held + footprint(problem.n) + problem.n * 210 * 8


def register(op: Op) -> None:
    @op.candidate("state-space", accuracy="better", unsupported=unsupported, memory=_memory)
    def state_space(marginal: Marginal, value: torch.Tensor, exact: bool) -> Any:
        """Markov chains of Matérn kernels in one dimension, exact in linear time: blocks, and a scan over them."""
        from autokern.density import markov

        found = markov.log_prob(*ingredients(marginal, value), exact)
        return op.stock.run(marginal, value, exact) if found is None else found

    @op.candidate(
        "preconditioned",
        accuracy="better",
        unsupported=every(
            only("the covariance is factorised", iterates),
            of_many,
            of_trees,
            only("the points require gradients", lambda p: "x" not in p.grad.split("/")),
        ),
        memory=_iterated_memory,
        parts=True,
        as_stock=True,
        obeys=own_obeys,
        error=functools.partial(to_a_residual, more=_BY_PROBES),
    )
    def preconditioned(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
        """Conjugate gradients to a stated residual; the preconditioner (neighbours or pivots) is chosen per system."""
        kernel, x = marginal.lazy.kernel, marginal.lazy.x1
        found = iterated_density.log_prob(
            *ingredients(marginal, value), kept_for(kernel, x), library.num_trace_samples.value(), tolerance(x.dtype)
        )
        return op["matrix-free"].run(marginal, value, exact) if found is None else found


_posteriors: Beside[LinePosterior] = Beside()
"""The posterior of each prediction strategy; a model whose data or parameters change gets a new strategy."""


def prediction_word(query: Query) -> str:
    """Return ``/line`` for a prediction that the state-space form supports, else an empty string."""
    strategy, x = query.strategy, query.prior.x1
    if x.dim() != 2 or x.shape[-1] != 1 or query.mean.dim() != 1 or strategy.num_train < ENOUGH:
        return ""
    parts, prior = factor_cache.parts(strategy), strategy.train_prior_dist
    if parts is None or gpytorch.settings.observation_nan_policy.value() != "ignore":
        return ""
    lazy, diagonal = parts
    tensors = (variances(diagonal), strategy.train_labels, prior.loc)
    if lazy.x1.dim() != 2 or lazy.batch_shape or any(t.dim() != 1 or t.dtype is not x.dtype for t in tensors):
        return ""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (lazy.x1, *tensors, *lazy.kernel.parameters())):
        return ""
    return _word_of(lazy.kernel)


def _prediction_memory(problem: Problem) -> int:
    from autokern.density.markov_chain import BLOCK

    return 8 * BLOCK * (8 * problem.n + 4 * BLOCK * min(problem.m, 2048)) + 64 * problem.m + 2**20


def _conditioned(strategy: Any, exact: bool) -> LinePosterior:
    from autokern.density import markov
    from autokern.prediction.markov_posterior import LinePosterior

    found, most = _posteriors.get(strategy), markov.MOST[strategy.train_labels.dtype] if exact else math.inf
    if found is None or found.most > most:
        parts = factor_cache.parts(strategy)
        assert parts is not None
        lazy, diagonal = parts
        residual = strategy.train_labels - strategy.train_prior_dist.loc
        tree = trees.read(lazy.kernel, lazy.x1, lazy.x1[:1].detach())
        found = _posteriors.put(strategy, LinePosterior(markov.chained(tree, variances(diagonal), residual), most))
    return found


def register_prediction(op: Op) -> None:
    @op.candidate("state-space", accuracy="better", unsupported=predicts, memory=_prediction_memory, parts=True)
    def state_space(query: Query) -> Any:
        """Markov chains of 1-D Matérn kernels: mean and variances in linear time, the joint covariance when read."""
        from autokern.density import markov

        known, prior = _conditioned(query.strategy, query.exact), query.prior
        if not known.valid or not markov.is_clear(known.data, query.exact):
            return op["lazy"].run(query)
        tree = trees.read(prior.kernel, prior.x1, query.cross.x2[:1].detach())
        mean, own = known.at([z.squeeze(-1) for z in tree.points])
        if not mean.isfinite().all():
            return op["lazy"].run(query)
        covariance = PosteriorCovariance.deferred(prior, query.cross, known)
        covariance.variances = own.to(query.mean.dtype)
        return query.mean + mean.to(query.mean.dtype), covariance
