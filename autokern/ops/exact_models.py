"""The Ops `objective` and `posterior` of small exact models that are read into arrays.

`objective` is the negative log marginal likelihood per point, or the leave-one-out likelihood, with its gradient. Its
arguments are ``reading, forward, parameters``: the arrays of a model (`density.exact_objective`), the function that
computes the loss with modules and autograd, and the parameters, by name, whose gradients are required. The result is
the loss ``()``, or ``(...)`` for a batch of independent models, and the gradients of its sum in the order of the
parameters; they are also stored in each ``grad``. For the arguments ``step, None, None``, a call of a marginal
likelihood (`density.array_density`), the result is its differentiable value ``()`` or ``(...)`` (grad ``theta``).

`posterior` is the distribution that the model returns at a batch of small sets of points, with gradients. Its arguments
are ``reading, x, forward``: the arrays of the model in its present state, points ``(..., m, d)``, and the function that
computes the same with modules and autograd.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.operators import DenseLinearOperator

from autokern.core.op import Altered, copied, tensors_in
from autokern.core.problem import INDUCING, Features, Problem
from autokern.density import array_density
from autokern.density.array_density import Step, step_of
from autokern.density.exact_objective import LEAVE_ONE_OUT, TOGETHER, Reading
from autokern.model import libraries
from autokern.ops._candidates import LOW_RANK, OpOfParts, every, is_few, only, squares
from autokern.ops._problems import families, objective_model, prior_of, random_matrix
from autokern.prediction import factor_cache
from autokern.prediction.array_posterior import MOST, Posterior
from autokern.system.threads import one_thread

_MOST_POINTS, _OF_SMALL = 1000, 2**18
"""Points, and elements of covariances of small models, above which one thread is slower than the ops that stock calls.
"""
_ACROSS = 2**24  # covariances between points and inducing points above which one thread is slower
_SEVERAL, _SINGLE = 32, 150
"""Models of a batch, and points in single precision, above which a step may be slower than the ops that stock calls."""

Found = tuple[torch.Tensor | None, ...]
Closure = Callable[[], torch.Tensor]
Known = Reading | Step
Parameters = Mapping[str, torch.Tensor]


class _Objective(OpOfParts):
    name = "objective"
    summary = "negative marginal likelihood of an exact model, with the gradient by all parameters"
    nesting = 4

    def key(self, reading: Known, forward: Closure | None, parameters: Parameters | None) -> Any:
        return reading.key, parameters is None and torch.is_grad_enabled() and _moved(reading)

    def problem_of(self, reading: Known, forward: Closure | None, parameters: Parameters | None) -> Problem | None:
        m, n, d, batch, dtype, device, names = reading.key
        grad = _moved(reading) if parameters is None and torch.is_grad_enabled() else ""
        return Problem(op="objective", m=m, n=n, d=d, batch=batch, dtype=dtype, device=device, grad=grad, variant=names)

    def reference(self, reading: Known, forward: Closure | None, parameters: Parameters | None) -> Found | torch.Tensor:
        return stock_objective(reading, forward, parameters)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        model = objective_model(problem, generator, priors=not problem.grad)
        model.mean_module.requires_grad_(not problem.grad)
        kind = LeaveOneOutPseudoLikelihood if LEAVE_ONE_OUT in problem.words else ExactMarginalLogLikelihood
        return _objective_arguments(kind(model.likelihood, model), bool(problem.grad))

    def converted(self, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        step = args[2] is None
        mll = args[0].reading.mll() if step else args[1].args[0]
        return _objective_arguments(copied(mll).to(dtype), step)

    def exact(self, args: tuple[Any, ...], altered: Altered | None) -> tuple[Any, ...]:
        if args[2] is not None or not args[0].reading.inducing:
            return super().exact(args, altered)
        found = self.converted(args, torch.float64)  # a kernel of inducing points and its model share the likelihood
        if altered is not None:
            for tensor in {id(t): t for t in tensors_in(found)}.values():
                tensor.data = altered(tensor.detach())
        return found

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        base = Problem(op="objective", d=6, dtype=dtype, device=device, variant="rbf")
        sizes = [20, 100, 50, 200] + ([10, 35, 70, 140, 300, 450, 700] if level == "full" else [])
        problems = [base.replace(m=n, n=n, variant=w) for n in sizes for w in ("rbf", "matern52")]
        if level == "full":
            problems += [base.replace(m=n, n=n, d=d) for n in (30, 150) for d in (1, 20)]
            problems += [base.replace(m=n, n=n, variant="matern52+rbf") for n in (30, 150)]
        several = [(2, 50), (4, 100)] + ([(2, 20), (8, 20)] if level == "full" else [])
        problems += [base.replace(m=n, n=n, batch=b) for b, n in several]
        apart = [base.replace(m=n, n=n, grad="theta", variant=f"rbf/{LEAVE_ONE_OUT}") for n in sizes[:1] + sizes[-2:]]
        sparse = ((20, 200), (50, 1000), (100, 5000)) if device == "cpu" else ()
        apart += [base.replace(m=m, n=n, grad="theta", variant=f"rbf/{INDUCING}") for m, n in sparse]
        problems += apart * (level == "full")
        problems += [base.replace(m=n, n=n, grad="theta") for n in sizes[:4] + sizes[-3:] * (level == "full")]
        return problems

    def features(self, problem: Problem) -> Features:
        parts, elements = _parts(problem), float(problem.batch * problem.n * problem.m)
        flops = elements * (problem.m * 4 / 3 + 6.0 * problem.d * parts)
        return Features(400.0 + 60 * parts, flops, (20.0 + 10.0 * parts) * problem.itemsize * elements)

    def memory(self, problem: Problem) -> int:
        elements = min(problem.batch * problem.n * problem.m, max(problem.n * problem.m, TOGETHER))
        return (4 + 3 * _parts(problem) + 3 * (problem.m < problem.n or LEAVE_ONE_OUT in problem.words)) * elements * 8

    def small(self, problem: Problem) -> bool:
        few = super().small(problem) or problem.m < problem.n or LEAVE_ONE_OUT in problem.words  # no part is an op
        if problem.batch > 1:  # torch computes a step of many small models at once
            at_once = problem.batch > _SEVERAL or (problem.dtype == "float32" and problem.n > _SINGLE)
            few = not (at_once and problem.grad)
        return few and _objective_unsupported(problem) is None


OBJECTIVE = _Objective()


def _moved(step: Any) -> str:
    """Return what a training step differentiates by: hyperparameters, and the points if they come from a network."""
    return "theta/x" if step.distribution._covar.x1.requires_grad else "theta"


def _objective_arguments(mll: Any, step: bool) -> tuple[Any, ...]:
    model = mll.train().model
    if step:
        with torch.enable_grad():
            prior = prior_of(model)
            prior = MultivariateNormal(prior.loc.detach().requires_grad_(), prior.lazy_covariance_matrix)
        return step_of(mll, mll.forward, prior, model.train_targets), None, None
    parameters = {name: p for name, p in mll.named_parameters() if p.requires_grad}
    return Reading(mll), functools.partial(_loss, mll), parameters


def _loss(mll: Any) -> torch.Tensor:
    return -mll(mll.model(*mll.model.train_inputs), mll.model.train_targets)


def _parts(problem: Problem) -> int:
    """Return the number of leaves of the kernel; a spectral mixture counts as four per dimension."""
    return sum(4 * problem.d if name == "mixture" else 1 for name in families(problem))


# with inducing points, stock holds 20 matrices; else inner ops check their own
@OBJECTIVE.candidate("stock", memory=lambda p: squares(p, 1) if p.m == p.n else 20 * p.n * p.m * p.itemsize)
def stock_objective(reading: Known, forward: Closure | None, parameters: Parameters | None) -> Found | torch.Tensor:
    """The libraries' own: modules forward, autograd backward; inner ops are dispatched."""
    if forward is None or parameters is None:
        assert isinstance(reading, Step)
        return reading.forward(reading.distribution, reading.value)
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad.zero_()
    with torch.enable_grad():
        loss = forward()
        loss.sum().backward()
    return loss, *(parameter.grad for parameter in parameters.values())


_objective_unsupported = every(
    only(LOW_RANK, lambda p: families(p) != ["linear"]),
    only(
        "gradients by many points, for which the ops inside are measured",
        lambda p: p.grad != "theta/x" or is_few(p) or LEAVE_ONE_OUT in p.words,
    ),
    only(
        f"more than {_MOST_POINTS} points on one thread",
        lambda p: p.n * p.batch <= _MOST_POINTS or p.batch * p.n * p.m <= (_ACROSS if p.m < p.n else _OF_SMALL),
    ),
)


@OBJECTIVE.candidate("arrays", unsupported=_objective_unsupported, threads=1)
def objective_by_arrays(reading: Any, forward: Closure | None, parameters: Parameters | None) -> Found | torch.Tensor:
    """NumPy and LAPACK from the raw parameters to the gradients, without modules and without autograd."""
    with one_thread:
        found = array_density.loss(reading) if parameters is None else reading.evaluate(parameters)
    if found is None:  # stock adds jitter, warns or raises
        return stock_objective(reading, forward, parameters)
    return found if parameters is None else (found[0], *found[1])


_MOST_ACROSS = 2**22  # covariances between test and training points above which one thread is slower than torch
_SMALL, _WORK, _PLAIN = 2**18, {"float64": 2**27, "float32": 2**26}, 8
"""Numbers of such covariances, and of multiplications with the factor, up to which `arrays` needs no measurement, and
by what factor more without gradients."""
Call = Callable[[torch.Tensor], Any]


class _Posterior(OpOfParts):
    name = "posterior"
    summary = "posterior of an exact model at a few points of many sets, with the gradient by the points"
    nesting = 4

    def key(self, reading: Posterior, x: torch.Tensor, forward: Call) -> Any:
        return reading.key, x.shape, _wanted(reading, x)

    def problem_of(self, reading: Posterior, x: torch.Tensor, forward: Call) -> Problem | None:
        (_, n, d, device, dtype, names), m, sets, grad = reading.key, x.shape[-2], reading.sets(x), _wanted(reading, x)
        return Problem(op="posterior", m=m, n=n, d=d, batch=sets, device=device, dtype=dtype, grad=grad, variant=names)

    def reference(self, reading: Posterior, x: torch.Tensor, forward: Call) -> Any:
        mean, covariance = reading.formula(x)
        return MultivariateNormal(mean, DenseLinearOperator(covariance))

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        model = objective_model(problem.replace(batch=1), generator).eval()
        model.requires_grad_("theta" in problem.grad.split("/"))
        x = random_matrix(problem, generator, problem.m, problem.d).requires_grad_("x" in problem.grad.split("/"))
        return _posterior_arguments(model, x)

    def converted(self, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        _, x, forward = args
        model = forward.args[0]
        own = copy.deepcopy(model, {id(model.prediction_strategy): None}).to(dtype)
        return _posterior_arguments(own, x.detach().to(dtype).requires_grad_(x.requires_grad))

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
        most = min(_SMALL, _WORK[problem.dtype] // problem.n) * (1 if problem.grad else _PLAIN)
        return problem.elements <= most and _posterior_unsupported(problem) is None


POSTERIOR = _Posterior()


def _wanted(reading: Posterior, x: torch.Tensor) -> str:
    """Return the gradients that may be required: ``theta`` (hyperparameters), ``x`` (points), both, or none."""
    if not torch.is_grad_enabled():
        return ""
    if any(p.tensor.requires_grad for p in reading.parameters):
        return "theta/x" if x.requires_grad else "theta"
    return "x" if x.requires_grad else ""


def _posterior_arguments(model: Any, x: torch.Tensor) -> tuple[Any, ...]:
    with torch.no_grad():
        prior = prior_of(model)
        strategy = DefaultPredictionStrategy(list(model.train_inputs), prior, model.train_targets, model.likelihood)
        known = factor_cache.of(strategy)
    model.prediction_strategy = strategy
    assert known is not None
    return Posterior(model, known), x, functools.partial(_as_botorch, model)


def _as_botorch(model: Any, x: torch.Tensor) -> Any:
    settings = gpytorch.settings
    with settings.debug(False), settings.fast_pred_var(), settings.detach_test_caches():
        return libraries.exact_call(model, x)


@POSTERIOR.candidate("stock")
def stock_posterior(reading: Posterior, x: torch.Tensor, forward: Call) -> Any:
    """The library's own: joint kernel matrices of test and training points by modules and autograd."""
    return forward(x)


_posterior_unsupported = every(
    only(f"more than {MOST} covariances of test points on one thread", lambda p: p.batch * p.m**2 <= MOST),
    only(f"more than {_MOST_ACROSS} covariances on one thread", lambda p: p.elements <= _MOST_ACROSS),
)


@POSTERIOR.candidate("arrays", unsupported=_posterior_unsupported, threads=1)
def posterior_by_arrays(reading: Posterior, x: torch.Tensor, forward: Call) -> Any:
    """NumPy and BLAS from the points to mean, covariance and gradients, in one autograd function."""
    found = reading.at(x)
    if found is None:  # stock raises its own error
        return forward(x)
    mean, covariance = found
    return MultivariateNormal(mean, DenseLinearOperator(covariance))
