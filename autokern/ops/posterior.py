"""The Op `posterior`: mean and joint covariance of an exact model at a batch of small sets of points, with gradients.

Arguments: ``reading, x, forward``: the arrays of the model in its present state, points ``(..., m, d)``, and the
function that computes the same with modules and autograd. The result is the distribution that the model returns.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.operators import DenseLinearOperator

from autokern.core.problem import Features, Problem
from autokern.model import originals
from autokern.ops._candidates import OpOfParts, every, only
from autokern.ops._problems import families, objective_model, prior_of, random_matrix
from autokern.prediction import factor_cache
from autokern.prediction.array_posterior import Posterior

_MOST = 2**22
"""Number of covariances between test and training points above which one thread is slower than torch."""
_SMALL, _WORK = 2**18, {"float64": 2**27, "float32": 2**26}
"""Numbers of them, and of multiplications with the factor, up to which `arrays` needs no measurement."""
_OWN = 2**16
"""Number of covariances between test points above which one thread is slower than torch."""
Forward = Callable[[torch.Tensor], Any]


class _Posterior(OpOfParts):
    name = "posterior"
    summary = "posterior of an exact model at a few points of many sets, with the gradient by the points"
    nesting = 4

    def key(self, reading: Posterior, x: torch.Tensor, forward: Forward) -> Any:
        return reading.key, x.shape, _wanted(reading, x)

    def problem_of(self, reading: Posterior, x: torch.Tensor, forward: Forward) -> Problem | None:
        (_, n, d, device, dtype, names), m, sets, grad = reading.key, x.shape[-2], reading.sets(x), _wanted(reading, x)
        return Problem(op="posterior", m=m, n=n, d=d, batch=sets, device=device, dtype=dtype, grad=grad, variant=names)

    def reference(self, reading: Posterior, x: torch.Tensor, forward: Forward) -> Any:
        mean, covariance = reading.formula(x)
        return MultivariateNormal(mean, DenseLinearOperator(covariance))

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        model = objective_model(problem.replace(batch=1), generator).eval()
        model.requires_grad_("theta" in problem.grad.split("/"))
        x = random_matrix(problem, generator, problem.m, problem.d).requires_grad_("x" in problem.grad.split("/"))
        return _arguments(model, x)

    def converted(self, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        _, x, forward = args
        model = forward.args[0]
        own = copy.deepcopy(model, {id(model.prediction_strategy): None}).to(dtype)
        return _arguments(own, x.detach().to(dtype).requires_grad_(x.requires_grad))

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        base = Problem(op="posterior", d=6, dtype=dtype, device=device, variant="rbf", grad="theta/x")
        sizes = [(1, 8, 50), (4, 8, 50), (4, 8, 200), (1, 8, 200), (4, 1, 50)]
        if level == "full":
            sizes += [(1, 1, 20), (2, 100, 100), (1, 500, 50), (150, 1, 100), (16, 8, 400), (8, 20, 20), (4, 8, 800)]
        problems = [base.replace(m=m, batch=b, n=n) for m, b, n in sizes]
        plain = sizes if level == "full" else sizes[1:2]
        problems += [base.replace(m=m, batch=b, n=n, variant="matern52", grad="") for m, b, n in plain]
        return problems

    def features(self, problem: Problem) -> Features:
        parts, elements = len(families(problem)), float(problem.elements)
        again = 2.0 if problem.grad else 1.0
        flops = 2.6 * again * elements * (problem.n + problem.m + problem.d * parts)
        return Features(250.0 + again * (25.0 + 15.0 * parts), flops, again * 16.0 * 8.0 * elements * parts)

    def memory(self, problem: Problem) -> int:
        elements = problem.batch * problem.m * (problem.n * (3 + 3 * len(families(problem))) + 4 * problem.m)
        return (elements + problem.n**2) * problem.itemsize

    def materialize(self, out: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return out.loc, out.covariance_matrix

    def small(self, problem: Problem) -> bool:
        few = problem.elements <= min(_SMALL, _WORK[problem.dtype] // problem.n)
        return few and _unsupported(problem) is None


POSTERIOR = _Posterior()


def _wanted(reading: Posterior, x: torch.Tensor) -> str:
    """Return the gradients that may be required: ``theta`` (hyperparameters), ``x`` (points), both, or none."""
    if not torch.is_grad_enabled():
        return ""
    if reading.graded():
        return "theta/x" if x.requires_grad else "theta"
    return "x" if x.requires_grad else ""


def _arguments(model: Any, x: torch.Tensor) -> tuple[Any, ...]:
    with torch.no_grad():
        prior = prior_of(model)
        strategy = DefaultPredictionStrategy(list(model.train_inputs), prior, model.train_targets, model.likelihood)
        known = factor_cache.of(strategy)
    model.prediction_strategy = strategy
    assert known is not None
    return Posterior(model, known), x, functools.partial(_as_botorch, model)


def _as_botorch(model: Any, x: torch.Tensor) -> Any:
    """Call a model under BoTorch's settings."""
    settings = gpytorch.settings
    with settings.debug(False), settings.fast_pred_var(), settings.detach_test_caches():
        return originals.exact_call(model, x)


@POSTERIOR.candidate("stock")
def stock(reading: Posterior, x: torch.Tensor, forward: Forward) -> Any:
    """The library's own: joint kernel matrices of test and training points by modules and autograd."""
    return forward(x)


_unsupported = every(
    only(f"more than {_OWN} covariances of test points on one thread", lambda p: p.batch * p.m**2 <= _OWN),
    only(f"more than {_MOST} covariances on one thread", lambda p: p.elements <= _MOST),
)


@POSTERIOR.candidate("arrays", unsupported=_unsupported, threads=1)
def arrays(reading: Posterior, x: torch.Tensor, forward: Forward) -> Any:
    """NumPy and BLAS from the points to mean, covariance and gradients, in one autograd function."""
    found = reading.at(x)
    if found is None:  # stock raises its own error
        return forward(x)
    mean, covariance = found
    return MultivariateNormal(mean, DenseLinearOperator(covariance))
